"""A job of objects in each strategy; one strategy refuses it with a message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loopback import METRIC, ROLES, Job

HOSTS = {"one host": (("chief", 0),), **ROLES}
_FULL = {
    "one host": "test_scaletier_job.py trains a compiled model and a dataset that are objects on one host",
    "model-parallel": "an error that needs two hosts: no cheaper test has it",
}


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.full(_FULL[name]) if name in _FULL else ()) for name in HOSTS]
)
def test_objects_are_trained_or_refused_by_strategy(tmp_path: Path, strategy: str) -> None:
    flags = [] if strategy == "one host" else [f"--strategy={strategy}"]
    with Job(tmp_path, "objects", HOSTS[strategy], "--max-steps=200", *flags) as job:
        job.start_all()
        code = job.wait("chief-0")
        if strategy == "sync":
            assert code == job.wait("worker-0") == 2
            for name in ("chief-0", "worker-0"):
                assert re.search(
                    "^error: --strategy sync begins too late: .* pass functions to scaletier.Job", job.log(name), re.MULTILINE
                )
        elif strategy == "model-parallel":  # one layer is on one host
            assert code == 2
            job.await_line("chief-0", "^error: the model sequential is not divided among several hosts: its layers ")
        else:
            assert code == 0, job.log("chief-0")
            final = job.await_line("chief-0", rf"^Final metrics after 20\d steps, loss: ({METRIC}), mae: ({METRIC})$")
            assert (float(final[1]) < 0.01, float(final[2]) < 0.1) == (True, True)
