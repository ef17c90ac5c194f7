"""The trainer as real processes on loopback: a parameter server, two workers and a chief; then an evaluator beside them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Job, slow_answers

from trainer import records
from trainer.mnist import Split

ROLES = (("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with made-up digits that a few steps can learn."""
    (tmp_path / "data").mkdir()
    labels = bytes(number % 10 for number in range(40))
    images = b"".join(bytes([255 if pixel // 20 == label else 0 for pixel in range(784)]) for label in labels)
    for split in ("train", "test"):
        records.write_shard(tmp_path / "data" / f"{split}-00000-of-00001.tfrecord", Split(images, labels), 0, 1)
    return tmp_path


@pytest.fixture
def job(directory: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    flags = ("--model=mlp", "--batch-size=10", "--log-interval=0.2", *request.param)
    running = Job(directory, "trainer.task", ROLES, *flags, SCALETIER_DATA=str(directory / "data"))
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("job", [["--max-steps=8000"]], indirect=True)
def test_every_replica_trains_and_the_servers_end_when_told(job: Job) -> None:
    for role, index in reversed(ROLES):  # the chief first: it waits for the others, whatever their order
        job.start(role, index)
    assert job.wait("chief-0") == 0
    # Steps that others take at the same moment may go past the last one, as in the sample ("after 5006 steps").
    assert re.search(
        r"^Final metrics after 80[01]\d steps, loss: 0\.\d{3}, accuracy: 1\.000$", job.log("chief-0"), re.MULTILINE
    )
    line = r"step \d+: loss: \d+\.\d{3}, accuracy: \d\.\d{3} \(\d+\.\d{3} sec\) \d+\.\d global steps/s, \d+\.\d local steps/s$"
    for name, replica in (("chief-0", "master/0"), ("worker-0", "worker/0"), ("worker-1", "worker/1")):
        assert re.search(rf"^Train \[{replica}\], {line}", job.log(name), re.MULTILINE)
        assert len(set(re.findall(r"\[(\w+/\d)\]", job.log(name)))) == 1
    assert job.log("ps-0").splitlines() == [f"Started [ps/0] on {job.cluster['ps'][0]}, serves variables"]
    (exported,) = (job.directory / "job/export/Servo").iterdir()
    assert b"/job:" not in (exported / "saved_model.pb").read_bytes()
    assert {job.end(name) for name in ("ps-0", "worker-0", "worker-1")} == {-signal.SIGTERM}


@pytest.mark.parametrize("job", [["--strategy=sync", "--max-steps=16"]], indirect=True)
def test_no_replica_goes_before_the_others_have_what_it_sent(job: Job) -> None:
    job.cluster = {role: hosts[:1] for role, hosts in job.cluster.items() if role != "ps"}
    job.start("worker", 0)
    with slow_answers(job.cluster["worker"][0], 0.3) as address:
        job.cluster["worker"] = [address]
        job.start("chief", 0)
        assert job.wait("chief-0") == 0, job.log("chief-0")
        assert job.wait("worker-0") == 0, job.log("worker-0")
    assert job.log("chief-0").splitlines()[-1].startswith("Final metrics after 16 steps")


@pytest.mark.parametrize("job", [["--max-steps=15000"]], indirect=True)
def test_the_others_go_on_to_the_end_without_a_worker_that_says_nothing(job: Job) -> None:
    job.start_all()
    reached = job.await_step("worker-1", 100)
    for _ in range(8):  # wherever in a round it is
        job.processes["worker-1"].send_signal(signal.SIGSTOP)  # its connections stay open
        reached = job.await_step("chief-0", reached + 300)
        job.processes["worker-1"].send_signal(signal.SIGCONT)
        reached = job.await_step("worker-1", reached + 1)
    job.processes["worker-1"].send_signal(signal.SIGSTOP)
    assert job.wait("chief-0") == 0
    assert re.search(r"^Final metrics after 15000 steps, ", job.log("chief-0"), re.MULTILINE)


@pytest.mark.parametrize("job", [["--max-steps=10000000", "--checkpoint-steps=200"]], indirect=True)
def test_lost_replicas(job: Job) -> None:
    job.start_all()
    job.start("evaluator", 0)
    job.await_line("worker-1", r"^Train \[worker/1\]")

    job.end("worker-1", signal.SIGKILL)
    job.start("worker", 1)
    job.await_line("worker-1", r"^Train \[worker/1\]")

    job.await_line("evaluator-0", r"^Eval, step \d+: loss: ")
    assert job.end("chief-0") == 143
    told = job.await_line("chief-0", r"^error: told to end at step (\d+); a checkpoint is saved$")
    assert job.end("evaluator-0") == 0
    job.start("chief", 0)
    resumed = job.await_line("chief-0", r"^Resuming from .*, step (\d+)$")
    assert int(resumed[1]) >= int(told[1])
    job.await_line("chief-0", r"^Train \[master/0\]")

    job.end("ps-0", signal.SIGKILL)
    assert job.wait("chief-0") == 143
    job.await_line("chief-0", r"^error: a host of the cluster is lost: ")


@pytest.mark.parametrize("job", [["--max-steps=1000"]], indirect=True)
@pytest.mark.parametrize("strategy", ["async", "sync", "model-parallel"])
def test_a_host_s_devices_all_train(job: Job, strategy: str) -> None:
    job.flags = (*job.flags, f"--strategy={strategy}")
    job.environ["SCALETIER_CPU_DEVICES"] = "2"
    job.start_all()
    assert job.wait("chief-0") == 0, job.log("chief-0")
    assert re.search(r"^Final metrics after 10\d\d steps, loss: 0\.\d{3}, accuracy: 1\.000$", job.log("chief-0"), re.MULTILINE)
    assert "as 2 devices" in job.log("chief-0")
    if strategy == "model-parallel":
        placed = re.findall(r"^Placed (.*) on (\S+): ", job.log("chief-0"), re.MULTILINE)
        assert [replica for _, replica in placed] == ["master/0", "master/0", "worker/0"]
        told = [re.findall(r"^Train \[\S+\], step (\d+)", job.log(name), re.MULTILINE) for name in ("chief-0", "worker-0")]
        assert told[0] == told[1] and len(set(told[0])) == len(told[0]), "a host tells of a step once"
