"""A restarted worker continues at the job's current step."""

from __future__ import annotations

import signal
from pathlib import Path

from loopback import Job


def test_a_restarted_worker_continues_its_data_at_the_global_step(tmp_path: Path) -> None:
    flags = "--sync-period=1", "--log-interval=0.1", "--max-steps=1000000"
    roles = ("ps", 0), ("worker", 0), ("chief", 0)
    job = Job(tmp_path, "counting", roles, *flags, PYTHONPATH=str(Path(__file__).parent))
    try:
        job.start_all()
        first = job.await_line("worker-0", r"^Train \[worker/0\], step \d+: loss: ([\d.]+) ")
        assert float(first[1]) == 1.0, "the second batch of two replicas"
        job.terminate("worker-0", signal.SIGKILL)
        chief_step = job.await_step("chief-0", 100)
        job.start("worker", 0)
        line = job.await_line("worker-0", r"^Train \[worker/0\], step (\d+): loss: ([\d.]+) ")
        assert chief_step - 1 <= float(line[2]) <= int(line[1])
    finally:
        job.stop()
