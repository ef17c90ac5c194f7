"""Jobs that a change of the cluster would hurt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra import guard
from infra.spec import ScaleTier, preset
from infra.targets import TargetError
from jobs.paths import QUEUE
from jobs.queue import Entry, Queue

BASIC = preset(ScaleTier.BASIC)
STANDARD = ["ps-0", "master-0", "worker-0", "worker-1"]


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps({"hosts": [{"name": name} for name in STANDARD]}))
    return path


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(guard.pulumi.log, "warn", said.append)
    return said


def queue() -> Queue:
    either = {"master-0": ["worker-0", "master-0"]}
    return (
        Queue()
        .added(Entry("peers", ["worker-0", "worker-1"]))
        .added(Entry("one", ["master-0"]))
        .added(Entry("large", ["master-0", "ps-0"]))
        .added(Entry("small", [], wants=either))
    )


def test_the_hosts_that_go(inventory: Path, tmp_path: Path) -> None:
    assert guard.hosts_lost(inventory, BASIC) == ["ps-0", "worker-0", "worker-1"]
    assert guard.hosts_lost(inventory, preset(ScaleTier.STANDARD_1)) == []
    assert guard.hosts_lost(tmp_path / "none.json", BASIC) == []
    inventory.write_text("{")
    assert guard.hosts_lost(inventory, BASIC) == []


def test_the_jobs_that_would_be_hurt() -> None:
    assert guard.endangered(queue(), ["worker-0", "worker-1", "ps-0"]) == [
        "job peers has worker-0, worker-1",
        "job large waits for hosts of which too few stay",
    ]
    assert guard.endangered(queue(), ["evaluator-0"]) == []


def test_a_preview_warns_an_update_refuses_and_a_key_allows(warned: list[str]) -> None:
    def read(path: str) -> bytes:
        assert path == QUEUE
        return queue().to_json()

    lost = ["worker-1"]
    guard.check(lost, read, preview=True, allowed=False)
    assert warned.pop().startswith("this takes worker-1 away, and job peers has worker-1: pulumi up will refuse. Wait")
    with pytest.raises(TargetError, match=r"job peers has worker-1: nothing was changed\. Wait .* disruptJobs true"):
        guard.check(lost, read, preview=False, allowed=False)
    guard.check(lost, read, preview=False, allowed=True)
    assert warned.pop() == "this takes worker-1 away, and job peers has worker-1: disruptJobs is true, so it is done"


def test_what_harms_nobody_is_done(warned: list[str]) -> None:
    def never(_: str) -> Any:
        raise AssertionError("nothing goes, so nothing is looked at")

    guard.check([], never, preview=False, allowed=False)
    guard.check(["ps-0"], lambda _: None, preview=False, allowed=False)
    guard.check(["evaluator-0"], lambda _: queue().to_json(), preview=False, allowed=False)
    assert warned == []
    guard.check(["ps-0"], lambda _: b"{", preview=False, allowed=False)
    assert "which job has which host cannot be seen" in warned.pop()
