"""Real hosts for the e2e tests: separate stacks, always destroyed in `finally`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hosts_report import FAILED
from stacks import ORIGINAL, Stack

NAME = os.environ.get("CLUSTER", "e2e")
"""The stack of the shared cluster: each shard uses its own name, so that two can be up at once."""
CUSTOM = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-highcpu-8",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "2",
    "workerType": "n1-highcpu-8",
    "workerCount": "2",
    "evaluatorType": "n1-highcpu-4",
    "evaluatorCount": "1",
    # Equal on every machine: the default is a share of this machine's memory, so a too large model could fit on another.
    "memory": '{"master": "1843MiB", "worker": "1843MiB", "ps": "3840MiB", "evaluator": "1GiB"}',
}


@pytest.fixture(scope="session")
def _shared() -> list[Stack]:
    """Return the shared cluster, once a test has used it."""
    return []


@pytest.fixture(scope="session")
def cluster(_shared: list[Stack]) -> Iterator[Stack]:
    """Bring up a CUSTOM cluster: 2 ps, 1 master, 2 workers, 1 evaluator. Tests restore what they change."""
    with Stack(NAME, CUSTOM) as stack:
        stack.up()
        _shared.append(stack)
        yield stack
        _shared.clear()


@pytest.fixture(autouse=True)
def _restore_the_cluster(_shared: list[Stack], request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test leaves, and restore the hosts after a failed one, without delay."""
    before = [(stack, stack.settings) for stack in _shared]
    yield
    remaining = [problem for stack in _shared for problem in stack.cancel_jobs()]
    if remaining or request.node.stash.get(FAILED, False):
        for stack, settings in before:
            stack.restore(settings)
        remaining = [problem for stack in _shared for problem in stack.cancel_jobs()]
    assert not remaining, f"these jobs cannot be cancelled: {remaining}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that fetch packages."""
    config.addinivalue_line("markers", "registry(packages): fetches these packages from a registry")


@pytest.fixture(scope="session")
def served(cluster: Stack) -> str:
    """Train a job on one host for tests of serving."""
    cluster.must("train", "served", "--scale-tier", "BASIC", "--", "--model", "mlp", "--max-steps", "800")
    return "served"


@pytest.fixture(scope="session")
def original(cluster: Stack) -> str:
    """Train a job on the whole cluster."""
    cluster.must("train", "--job", "original", "--args", ORIGINAL)
    return "original"


@pytest.fixture
def empty_stack() -> Iterator[Stack]:
    """Return a second, empty stack."""
    with Stack(f"{NAME}-second", {"scaleTier": "BASIC"}) as stack:
        yield stack
