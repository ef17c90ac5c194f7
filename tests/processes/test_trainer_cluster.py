"""The trainer as real processes on loopback: a parameter server, two workers and a chief; then an evaluator beside them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import METRIC, SMALL_METRIC, Job, slow_answers

ROLES = (("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0))


@pytest.fixture
def job(data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    flags = ("--model=mlp", "--batch-size=10", "--log-interval=0.2", "--average=0.9", *request.param)
    with Job(tmp_path, "trainer.task", ROLES, *flags, SCALETIER_DATA=str(data)) as running:
        yield running


@pytest.mark.full("test_library.py[async-tabular] proves the kills; nothing cheaper has an evaluator and three replicas")
@pytest.mark.parametrize("job", [["--checkpoint-steps=200"]], indirect=True)
def test_a_job_survives_lost_replicas_and_reaches_its_last_step(job: Job) -> None:
    flags = job.flags
    job.flags = (*flags, "--max-steps=10000000")
    for role, index in reversed(ROLES):  # the chief first: it waits for the others in any order
        job.start(role, index)
    job.start("evaluator", 0)
    line = (
        rf"step \d+: loss: {METRIC}, accuracy: \d\.\d{{3}} \(\d+\.\d{{3}} sec\) \d+\.\d global steps/s, \d+\.\d local steps/s$"
    )
    for name, replica in (("chief-0", "master/0"), ("worker-0", "worker/0"), ("worker-1", "worker/1")):
        job.await_line(name, rf"^Train \[{replica}\], {line}")
        assert len(set(re.findall(r"\[(\w+/\d)\]", job.log(name)))) == 1

    job.terminate("worker-1", signal.SIGKILL)
    job.start("worker", 1)
    job.await_line("worker-1", r"^Train \[worker/1\]")

    job.await_line("evaluator-0", r"^Eval, step \d+: loss: ")
    assert job.terminate("chief-0") == -signal.SIGTERM
    saved = int(job.await_line("chief-0", r"^Ends by SIGTERM at step (\d+); a checkpoint is saved$")[1])

    job.flags = (*flags, f"--max-steps={saved + 2000}")
    job.start("chief", 0)
    assert job.wait("chief-0") == 0, job.log("chief-0")
    assert int(job.await_line("chief-0", r"^Resuming from .*, step (\d+)$")[1]) == saved
    # A round that ends after the job's wait goes past the last step, as in the sample ("after 5006 steps").
    final = job.await_line("chief-0", rf"^Final metrics after (\d+) steps, loss: {SMALL_METRIC}, accuracy: 1\.000$")
    assert int(final[1]) >= saved + 2000
    assert job.log("ps-0").splitlines() == [f"Started [ps/0] on {job.cluster['ps'][0]}, serves variables"]
    (exported,) = (job.directory / "job/export/Servo").iterdir()
    assert b"/job:" not in (exported / "saved_model.pb").read_bytes()
    assert job.terminate("evaluator-0") == 0
    assert {job.terminate(name) for name in ("ps-0", "worker-0", "worker-1")} == {-signal.SIGTERM}


@pytest.mark.full("test_trainer_training.py proves the error of one replica; nothing cheaper has several")
@pytest.mark.parametrize("job", [["--strategy=model-parallel", "--checkpoint-steps=10"]], indirect=True)
def test_a_model_of_nans_ends_the_job_and_the_last_checkpoint_stays(job: Job) -> None:
    job.cluster = {role: hosts[:1] for role, hosts in job.cluster.items() if role != "ps"}
    flags = job.flags
    job.flags = (*flags, "--max-steps=20")
    job.start("worker", 0)
    job.start("chief", 0)
    assert job.wait("chief-0") == 0
    saved = sorted((job.directory / "job/checkpoints").iterdir())
    job.flags = (*flags, "--max-steps=90000000", "--learning-rate=1e30")
    job.start("worker", 0)
    job.start("chief", 0)
    assert job.wait("chief-0") == 1
    job.await_line("chief-0", r"^error: the (loss|parameters) of \S+ (is|are) .+ at step \d+; try a lower learning rate")
    assert sorted((job.directory / "job/checkpoints").iterdir()) == saved


@pytest.mark.full("test_end.py proves the end where a worker is lost; here all are there, and their answers late")
@pytest.mark.parametrize("job", [["--strategy=sync", "--max-steps=16"]], indirect=True)
def test_no_replica_ends_before_the_others_have_its_data(job: Job) -> None:
    job.cluster = {role: hosts[:1] for role, hosts in job.cluster.items() if role != "ps"}
    job.start("worker", 0)
    with slow_answers(job.cluster["worker"][0], 0.3) as address:
        job.cluster["worker"] = [address]
        job.start("chief", 0)
        assert job.wait("chief-0") == 0, job.log("chief-0")
        assert job.wait("worker-0") == 0, job.log("worker-0")
    assert job.log("chief-0").splitlines()[-1].startswith("Final metrics after 16 steps")


@pytest.mark.full(
    "test_scaletier_loop.py proves what becomes of a silent worker's steps; TensorFlow's part has no cheaper proof"
)
@pytest.mark.parametrize("job", [[]], indirect=True)
def test_other_replicas_finish_without_an_unresponsive_worker(job: Job) -> None:
    flags = job.flags
    job.flags = (*flags, "--max-steps=10000000")
    job.start_all()
    worker = job.processes["worker-1"]
    step = job.await_step("worker-1", 100)
    for _ in range(8):  # at any point of a round
        worker.send_signal(signal.SIGSTOP)  # its connections stay open
        step = job.await_step("chief-0", step + 300)
        worker.send_signal(signal.SIGCONT)
        step = job.await_step("worker-1", step + 1)
    worker.send_signal(signal.SIGSTOP)
    assert job.terminate("chief-0") == -signal.SIGTERM
    saved = int(job.await_line("chief-0", r"^Ends by SIGTERM at step (\d+); a checkpoint is saved$")[1])

    worker.send_signal(signal.SIGCONT)
    job.flags = (*flags, f"--max-steps={saved + 3000}")
    job.start("chief", 0)
    job.await_line("chief-0", r"^Train \[master/0\]")
    worker.send_signal(signal.SIGSTOP)  # in a round, or before the first one
    assert job.wait("chief-0") == 0, job.log("chief-0")
    assert int(job.await_line("chief-0", r"^Final metrics after (\d+) steps, ")[1]) >= saved + 3000


@pytest.mark.full("test_scaletier_numbers.py proves steps of several devices; nothing cheaper has a cluster of them")
@pytest.mark.parametrize("job", [["--max-steps=1000"]], indirect=True)
@pytest.mark.parametrize("strategy", ["async", "sync", "model-parallel"])
def test_all_devices_of_a_host_train(job: Job, strategy: str) -> None:
    job.flags = (*job.flags, f"--strategy={strategy}")
    job.environ["SCALETIER_CPU_DEVICES"] = "2"
    job.start_all()
    assert job.wait("chief-0") == 0, job.log("chief-0")
    final = job.await_line("chief-0", rf"^Final metrics after (\d+) steps, loss: {SMALL_METRIC}, accuracy: 1\.000$")
    assert int(final[1]) >= 1000
    assert "as 2 devices" in job.log("chief-0")
    if strategy == "model-parallel":
        placed = re.findall(r"^Placed (.*) on (\S+): ", job.log("chief-0"), re.MULTILINE)
        assert [replica for _, replica in placed] == ["master/0", "master/0", "worker/0"]
        reported_steps = [
            re.findall(r"^Train \[\S+\], step (\d+)", job.log(name), re.MULTILINE) for name in ("chief-0", "worker-0")
        ]
        assert reported_steps[0] == reported_steps[1] and len(set(reported_steps[0])) == len(reported_steps[0]), (
            "a host reports a step once"
        )
