"""Run the story in the order it is written, on one stack, and stop at the first step that fails."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hosts_report import NOT_RUN

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from stacks import Stack

CONFIG = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-highcpu-8",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "1",
    "workerType": "n1-highcpu-8",
    "workerCount": "1",
}
_failed: list[str] = []


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Return an empty stack; it is always destroyed and removed at the end."""
    with Stack("story", CONFIG) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _fail_after_a_failure() -> None:
    """Fail at once after a failed step, as later steps would wait until their timeouts."""
    if _failed:
        pytest.fail(f"{NOT_RUN}{_failed[0]} failed", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        _failed.append(item.name)
    return report
