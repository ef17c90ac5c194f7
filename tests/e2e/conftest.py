"""Real hosts for the e2e tests: stacks of their own, destroyed in `finally` whatever happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stacks import ORIGINAL, Stack

CUSTOM = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-highcpu-8",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "2",
    "workerType": "n1-highcpu-8",
    "workerCount": "2",
    "evaluatorType": "n1-highcpu-4",
    "evaluatorCount": "1",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Stack]:
    """A CUSTOM cluster, up: 2 ps, 1 master, 2 workers, 1 evaluator. What a test changes it puts back."""
    with Stack("e2e", CUSTOM) as stack:
        stack.up()
        yield stack


@pytest.fixture(scope="session")
def served(cluster: Stack) -> str:
    """A job that has trained on one host, whose export answers."""
    trained = cluster.fab("train", "served", "--scale-tier", "BASIC", "--", "--model", "mlp", "--max-steps", "800")
    assert trained.code == 0, trained.text
    return "served"


@pytest.fixture(scope="session")
def original(cluster: Stack) -> str:
    """A job that has trained on all of the cluster."""
    result = cluster.fab("train", "--job", "original", "--args", ORIGINAL)
    assert result.code == 0, result.text
    return "original"


@pytest.fixture
def empty_stack() -> Iterator[Stack]:
    """A stack with nothing in it yet, beside the cluster."""
    with Stack("e2e-second", {"scaleTier": "BASIC"}) as stack:
        yield stack
