"""An invalid batch late in a job of several hosts: each strategy reports it in one line and saves the training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from late import VALID
from loopback import ROLES, Job

PERIOD = 4


@pytest.mark.full("test_scaletier_job.py::test_a_late_invalid_batch_is_one_line_and_training_is_saved, on one host")
@pytest.mark.parametrize("strategy", ROLES)
def test_a_late_invalid_batch_is_one_line(tmp_path: Path, strategy: str) -> None:
    flags = [f"--strategy={strategy}", f"--sync-period={PERIOD}", "--max-steps=100000", "--checkpoint-steps=100000"]
    with Job(tmp_path, "late", ROLES[strategy], *flags) as job:
        job.start_all()
        assert job.wait("chief-0") == 2, job.log("chief-0")
        log = job.log("chief-0")
        *_, last = log.splitlines()
        assert last.startswith("error: a batch of the job cannot be made, or does not go through its model: ")
        assert "Received a label value of 2 which is outside the valid range of [0, 2)" in last
        assert "Traceback" not in log
        assert not re.search(r"^Graph execution error", log, re.MULTILINE)
        step = int(job.await_line("chief-0", r"^A checkpoint of step (\d+) is saved$")[1])
        # One of the two has trained on all its valid batches but those of its last round, the other perhaps on none.
        assert VALID / 2 - PERIOD <= step <= VALID * (1 if strategy == "model-parallel" else 2)
        assert (tmp_path / f"job/checkpoints/model-{step}.index").exists()
