"""Write the state of hosts, jobs and logs to a file when a test on hosts failed.

tests/conftest.py has the hook; each stack is in WATCHED while it exists. Nothing here raises or needs a stack that is up: a
host that does not answer in time is one line of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "failures"
FAILED = pytest.StashKey[bool]()
"""Key of a failed test's mark, for fixtures that clean up after it."""
NOT_RUN = "not run: "
"""The first words of the failure of a test that did not run, as an earlier one failed: it needs no report of its own."""
_FAB_SECONDS, _HOST_SECONDS = 120.0, 40.0
_ON_HOST = (
    "systemctl list-units 'scaletier*' --all --no-pager; systemctl --failed --no-pager; uptime; free -m; "
    "sudo -n journalctl --no-pager -n 200 -u 'scaletier*' || journalctl --no-pager -n 200 -u 'scaletier*'"
)


class Answer(Protocol):
    """The output of a command."""

    @property
    def out(self) -> str: ...
    @property
    def text(self) -> str: ...


class Watched(Protocol):
    """A stack that is up, or comes up."""

    name: str

    @property
    def host_names(self) -> list[str]: ...
    def fab(self, *arguments: str, timeout: float = ...) -> Answer: ...
    def ssh(self, host: str, command: str, timeout: float = ...) -> Answer: ...


WATCHED: list[Watched] = []
"""Stacks of this process, from their creation until they are destroyed."""


def write(name: str) -> str:
    """Write a report of all watched stacks; return a line with its path, or "" if there is no stack."""
    if not WATCHED:
        return ""
    base = FOLDER / re.sub(r"[^\w.-]+", "_", name)[-150:]
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = base.with_name(f"{base.name}.txt")
        path.write_text("\n".join(part for stack in list(WATCHED) for part in _describe(stack, base)))
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  the test's own failure counts, not a timeout here
        return f"its hosts could not be queried: {error!r}"
    return f"fab doctor, jobs, bundle and the journals of its hosts: {path}"


def _describe(stack: Watched, base: Path) -> Iterator[str]:
    bundle = base.with_name(f"{base.name}.{stack.name}.tar.gz")
    bundle.unlink(missing_ok=True)  # fab bundle overwrites nothing
    try:
        hosts = stack.host_names
    except (OSError, ValueError, KeyError):
        hosts = []
    queries: dict[str, Callable[[], str]] = {
        "fab doctor": lambda: stack.fab("doctor", timeout=_FAB_SECONDS).text,
        "fab jobs": lambda: stack.fab("jobs", "--limit", "20", timeout=_FAB_SECONDS).text,
        f"fab bundle, of the last job: {bundle}": lambda: _bundle(stack, bundle),
        **{host: lambda host=host: stack.ssh(host, _ON_HOST, timeout=_HOST_SECONDS).text for host in hosts},  # type: ignore[misc]
    }
    with ThreadPoolExecutor(max(1, len(queries))) as pool:
        answers = pool.map(_try, queries.values())
        for what, answer in zip(queries, answers, strict=True):
            yield f"===== stack {stack.name}: {what}\n{answer}"


def _bundle(stack: Watched, path: Path) -> str:
    jobs: Sequence[dict[str, str]] = json.loads(stack.fab("jobs", "--limit", "1", "--json", timeout=_FAB_SECONDS).out)
    return stack.fab("bundle", jobs[0]["jobId"], str(path), timeout=_FAB_SECONDS).text if jobs else "there is no job"


def _try(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  each answer is independent
        return f"no answer: {error!r}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the report of a test that failed, and name its path below the failure."""
    report = yield
    if report.failed and not report.longreprtext.startswith(NOT_RUN):
        item.stash[FAILED] = True
        if line := write(f"{item.nodeid.rpartition('/')[2]}.{report.when}"):
            report.sections.append(("hosts", line))
    return report
