"""Asynchronous workers do not wait for the chief's evaluations."""

from __future__ import annotations

from pathlib import Path

from loopback import ROLES, Job


def test_a_worker_trains_during_an_evaluation(tmp_path: Path) -> None:
    flags = "--log-interval=0.1", "--eval-interval=0.1", "--max-steps=1000000"
    with Job(tmp_path, "evaluating", ROLES["async"], *flags) as job:
        job.start_all()
        job.await_line("chief-0", r"^Eval, step \d+: loss: ")  # otherwise the evaluation would not have ended
