"""Replicas that stop, end, return and resume train like those of an undisturbed run."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from loopback import ROLES, Job
from ones import RATE
from waiting import wait_for

from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()
PERIOD, MOMENTUM = 4, 0.9
NEVER = "--max-steps=1000000", "--checkpoint-steps=1000000", "--checkpoint-seconds=100000"


def test_a_restarted_worker_continues_its_data_at_the_global_step(tmp_path: Path) -> None:
    flags = "--sync-period=1", "--log-interval=0.1", "--max-steps=1000000"
    with Job(tmp_path, "counting", ROLES["async"], *flags) as job:
        job.start_all()
        first = job.await_line("worker-0", r"^Train \[worker/0\], step \d+: loss: (\S+) ")
        assert float(first[1]) == 1.0, "the second batch of two replicas"
        job.terminate("worker-0", signal.SIGKILL)
        chief_step = job.await_step("chief-0", 100)
        job.start("worker", 0)
        line = job.await_line("worker-0", r"^Train \[worker/0\], step (\d+): loss: (\S+) ")
        assert chief_step - 1 <= float(line[2]) <= int(line[1])


def read_values(log: str, what: str) -> list[float]:
    """Return the numbers behind a word in a log."""
    return [float(one) for one in re.findall(rf"\b{what} (-?[\d.e-]+)\s", log)]


def await_rate(job: Job, replicas: int) -> None:
    """Wait until the chief trains at the rate for this number of replicas."""
    begin = len(job.log("chief-0"))
    wait_for(lambda: RATE * replicas in read_values(job.log("chief-0")[begin:][-1000:], "Rate"), f"a rate for {replicas}")


def moved(job: Job, step: int) -> float:
    """Return the steps that the weight of a checkpoint has moved by; an undisturbed run's are its global step."""
    reader = tf.train.load_checkpoint(f"{job.directory}/job/checkpoints/model-{step}")
    assert int(reader.get_tensor("global_step/.ATTRIBUTES/VARIABLE_VALUE")) == step
    return float(-reader.get_tensor("dense:kernel/.ATTRIBUTES/VARIABLE_VALUE")[0, 0] / RATE)


def run_until_done(job: Job) -> int:
    """Start the chief, and again while it has lost a host, as the agent does; return how often it has.

    A worker that outlives its server may learn from its next call alone that the connection is reset.
    """
    losses = 0
    while True:
        job.start("chief", 0)
        if (code := job.wait("chief-0")) == 0:
            return losses
        assert code == -signal.SIGTERM, job.log("chief-0")
        losses += 1


@pytest.mark.full("test_scaletier_loop.py proves which steps count; nothing cheaper has servers that lose a replica")
def test_each_step_counts_once_whichever_replica_stops_or_ends(tmp_path: Path) -> None:
    flags = f"--sync-period={PERIOD}", "--log-interval=0.1"
    with Job(tmp_path, "ones", ROLES["async"], *flags, *NEVER) as job:
        job.start_all()
        job.await_step("worker-0", 20)
        await_rate(job, 2)
        job.processes["worker-0"].send_signal(signal.SIGSTOP)
        await_rate(job, 1)
        job.processes["worker-0"].send_signal(signal.SIGCONT)
        await_rate(job, 2)
        (tmp_path / "worker-0/die").touch()
        assert job.wait("worker-0") == -signal.SIGABRT
        (tmp_path / "worker-0/die").unlink()
        await_rate(job, 1)
        job.start("worker", 0)
        job.await_step("worker-0", 20)
        await_rate(job, 2)
        job.terminate("ps-0", signal.SIGKILL)
        assert job.wait("chief-0") == -signal.SIGTERM
        saved = int(job.await_line("chief-0", r"^A checkpoint of step (\d+) is saved, with the values of this host$")[1])
        # One round was counted and not pushed, and the last one may be half done.
        assert saved - 2 * PERIOD <= round(moved(job, saved)) <= saved + PERIOD
        job.flags = (*flags, *NEVER, f"--max-steps={saved + 200}")
        job.start("ps", 0)
        losses = run_until_done(job)
        last = int(job.await_line("chief-0", r"^Final metrics after (\d+) steps")[1])
        assert last - saved == pytest.approx(moved(job, last) - moved(job, saved), abs=PERIOD * (1 + losses))


@pytest.mark.full("test_arithmetic.py[sync, resumed] proves the variables of the optimizer, in hosts that all return")
def test_replicas_that_return_have_the_optimizer_s_variables_and_new_random_numbers(tmp_path: Path) -> None:
    flags = f"--sync-period={PERIOD}", "--log-interval=0.1"
    job = Job(tmp_path, "ones", ROLES["async"], *flags, *NEVER, MOMENTUM=str(MOMENTUM))
    # In an undisturbed run the velocity approaches this and stays there.
    limit = -RATE / (1 - MOMENTUM)
    drawn = list[float]()

    def check(names: Sequence[str]) -> None:
        for name in names:
            job.await_line(name, r"^Train ")
            assert read_values(job.log(name), "velocity")[0] <= 0.95 * limit
        check_numbers(names)

    def check_numbers(names: Sequence[str]) -> None:
        for name in names:
            drawn.extend(read_values(job.log(name), "Drew"))
        assert len(drawn) == len(set(drawn))

    with job:
        job.start_all()
        job.await_step("chief-0", 200)
        job.await_step("worker-0", 100)
        job.terminate("worker-0", signal.SIGKILL)
        check_numbers(["worker-0"])
        job.start("worker", 0)
        check(["worker-0"])
        assert job.terminate("chief-0") == -signal.SIGTERM
        job.await_line("chief-0", r"^Ends by SIGTERM at step (\d+); a checkpoint is saved$")
        check_numbers(["chief-0"])
        for name in ("worker-0", "ps-0"):
            job.terminate(name, signal.SIGKILL)
        job.start_all()
        check(["worker-0", "chief-0"])
