"""A worker that returns in the middle of a job continues where the job is by then."""

from __future__ import annotations

import signal
from pathlib import Path

from loopback import Job


def test_a_worker_that_returns_continues_in_its_data_by_the_global_step(tmp_path: Path) -> None:
    flags = "--sync-period=1", "--log-interval=0.1", "--max-steps=1000000"
    roles = ("ps", 0), ("worker", 0), ("chief", 0)
    job = Job(tmp_path, "counting", roles, *flags, PYTHONPATH=str(Path(__file__).parent))
    try:
        job.start_all()
        first = job.await_line("worker-0", r"^Train \[worker/0\], step \d+: loss: ([\d.]+) ")
        assert float(first[1]) == 1.0, "of two replicas the second batch"
        job.end("worker-0", signal.SIGKILL)
        reached = job.await_step("chief-0", 100)
        job.start("worker", 0)
        again = job.await_line("worker-0", r"^Train \[worker/0\], step (\d+): loss: ([\d.]+) ")
        assert reached - 1 <= float(again[2]) <= int(again[1])
    finally:
        job.stop()
