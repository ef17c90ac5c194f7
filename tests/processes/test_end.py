"""The end of a synchronous job: a worker that is lost once the chief has finished changes nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from loopback import PEERS, Job


@pytest.mark.parametrize("meetings", [pytest.param(0, marks=pytest.mark.full("[1] loses it one meeting later")), 1])
def test_a_finished_job_succeeds_without_its_worker(tmp_path: Path, meetings: int) -> None:
    flags = ("--strategy=sync", "--max-steps=16")
    with Job(tmp_path, "leaving", PEERS, *flags, MEETINGS=str(meetings)) as job:
        job.start_all()
        assert job.wait("worker-0") == -signal.SIGKILL, job.log("worker-0")
        assert job.wait("chief-0") == 0, job.log("chief-0")
        assert job.log("chief-0").splitlines()[-1].startswith("Final metrics after 16 steps")
