"""The stack of measurements: another's of that name stays, and one that a measurement made never does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import results
from benchmarks import stack as module
from benchmarks.measure import MeasureError, Ran
from benchmarks.registry import Benchmark, Figure
from benchmarks.stack import BenchStack


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the commands of the stack instead of running them; Pulumi lists the stacks of `stacks.json`."""
    commands: list[str] = []
    (listed := tmp_path / "stacks.json").write_text("[]")

    def run(self: BenchStack, *command: str, stdin: bytes | None = None) -> Ran:
        commands.append(" ".join(word for word in command if not word.startswith("--")))
        return Ran(0, listed.read_text() if "ls" in command else "", "", 0)

    monkeypatch.setattr(BenchStack, "run", run)
    monkeypatch.setattr(module, "MARKS", tmp_path / "stacks")
    monkeypatch.setattr(module, "claimed_projects", lambda _: [])
    return commands


def list_stacks(folder: Path, *names: str) -> None:
    (folder / "stacks.json").write_text(json.dumps([{"name": name} for name in names]))


def test_a_users_own_stack_of_that_name_is_not_destroyed(calls: list[str], tmp_path: Path) -> None:
    list_stacks(tmp_path, "local", "bench")
    with BenchStack() as stack, pytest.raises(MeasureError, match="`pulumi stack rename --stack bench OTHER` keeps yours"):
        stack._create()
    assert calls == ["pulumi stack ls"]


def test_a_retained_bucket_of_that_name_is_not_used(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "claimed_projects", lambda _: ["project scaletier-bench-aaaaaa (its retained bucket)"])
    with BenchStack() as stack, pytest.raises(MeasureError, match=r"already \(project scaletier-bench-aaaaaa"):
        stack._create()
    assert calls == ["pulumi stack ls"]


def test_the_stack_of_a_killed_run_is_replaced(calls: list[str], tmp_path: Path) -> None:
    BenchStack()._create()
    list_stacks(tmp_path, "bench")
    calls.clear()
    with BenchStack() as stack:
        stack._create()
        assert calls.index("pulumi destroy") < calls.index("pulumi stack init bench")
        calls.clear()
    assert calls[-2:] == ["pulumi destroy", "pulumi stack rm bench"]
    with pytest.raises(MeasureError):
        BenchStack()._create()


def test_hosts_are_destroyed_if_the_output_is_closed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        with BenchStack() as stack:
            stack._create()
        assert "pulumi destroy" in calls


def test_a_measurement_uses_no_state_of_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    urls: list[str | None] = []

    def measure(stack: BenchStack) -> Figure:
        urls.append(stack.env.get("PULUMI_BACKEND_URL"))
        return Figure(1.0)

    monkeypatch.setattr(command, "chosen", lambda _: [Benchmark("a", "seconds of it", None, 1.0, None, measure)])
    monkeypatch.setattr(command, "SUITE", ())
    monkeypatch.setattr(command, "_SIGNALS", ())
    monkeypatch.setattr(results, "write", lambda *_: [])
    assert command.main([]) == 0
    assert urls == [None]
