"""The report of a failed test on hosts, also of an unresponsive stack; commands are fakes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import hosts_report
import pytest
from hosts_report import FAILED, NOT_RUN


class Answer(NamedTuple):
    """The output of a command."""

    out: str
    text: str


class FakeStack:
    """A stack with two hosts, one of which hangs."""

    name = "fake"
    host_names = ("master-0", "worker-0")

    def __init__(self, jobs: str = '[{"jobId": "last"}]') -> None:
        self.jobs = jobs

    def fab(self, *arguments: str, timeout: float) -> Answer:
        output = self.jobs if "--json" in arguments else " ".join(arguments)
        return Answer(output, output)

    def ssh(self, host: str, command: str, timeout: float) -> Answer:
        if host == "worker-0":
            raise subprocess.TimeoutExpired(host, timeout)
        return Answer(command, command)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hosts_report, "FOLDER", tmp_path / "failures")
    monkeypatch.setattr(hosts_report, "WATCHED", [FakeStack()])
    return tmp_path / "failures"


def test_the_report_has_the_answers_of_all_hosts(folder: Path) -> None:
    message = hosts_report.write("test_jobs.py::test_x[a/b].call")
    path = folder / "test_jobs.py_test_x_a_b_.call.txt"
    assert message.endswith(f": {path}")
    written = path.read_text()
    assert f"bundle last {folder}/test_jobs.py_test_x_a_b_.call.fake.tar.gz" in written
    assert "===== stack fake: fab doctor\ndoctor" in written
    assert "systemctl list-units 'scaletier*' --all" in written
    assert "===== stack fake: worker-0\nno answer: TimeoutExpired" in written


def test_without_a_stack_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_report, "WATCHED", [])
    assert hosts_report.write("x") == ""
    assert not folder.exists()


def test_a_missing_stack_or_a_full_disk_raises_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MissingStack(FakeStack):
        @property
        def host_names(self) -> list[str]:  # type: ignore[override]
            raise FileNotFoundError("inventory.json")

    monkeypatch.setattr(hosts_report, "WATCHED", [MissingStack("no JSON")])
    hosts_report.write("y")
    assert "the last job: " in (folder / "y.txt").read_text()
    folder.rename(folder.with_name("other"))
    folder.write_text("no folder")
    assert hosts_report.write("z").startswith("its hosts could not be queried: FileExistsError")


def report_failure(item: pytest.Item, reason: str) -> pytest.TestReport:
    """Return the report of a test that ends with this failure, as the hook leaves it."""
    call = pytest.CallInfo.from_call(lambda: pytest.fail(reason, pytrace=False), "setup")
    hook = hosts_report.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration) as result:
        hook.send(pytest.TestReport.from_item_and_call(item, call))
    report: pytest.TestReport = result.value.value
    return report


def test_only_a_test_that_ran_and_failed_has_a_report(folder: Path, request: pytest.FixtureRequest) -> None:
    assert report_failure(request.node, f"{NOT_RUN}test_up failed").sections == []
    assert not folder.exists()
    assert FAILED not in request.node.stash
    ((title, line),) = report_failure(request.node, "no host answers").sections
    (path,) = folder.glob("*.setup.txt")
    assert (title, line.endswith(f": {path}")) == ("hosts", True)
    assert request.node.stash[FAILED]
