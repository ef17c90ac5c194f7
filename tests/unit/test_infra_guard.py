"""Jobs that a change of the cluster would hurt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
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


def test_an_object_of_google_s_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.gcp import target
    from infra.gcp.api import GcpError

    asked: list[tuple[str, Any]] = []

    class Session:
        ok = True

        def get(self, url: str, params: Any, timeout: float) -> SimpleNamespace:
            asked.append((url, params))
            return SimpleNamespace(ok=self.ok, content=b"{}")

    monkeypatch.setattr(target, "provider_config", lambda _: None)
    monkeypatch.delenv("GOOGLE_STORAGE_CUSTOM_ENDPOINT", raising=False)
    session = Session()
    monkeypatch.setattr(target, "session", lambda _: session)
    found: Any = SimpleNamespace(bucket="mine")
    assert target.GCP.read("dev", found, QUEUE) == b"{}"
    url = "https://storage.googleapis.com/storage/v1/b/mine/o/cluster%2Fqueue.json"
    assert asked == [(url, {"alt": "media"})]
    session.ok = False
    assert target.GCP.read("dev", found, QUEUE) is None

    def none(_: Any) -> Any:
        raise GcpError("no credentials")

    monkeypatch.setattr(target, "session", none)
    assert target.GCP.read("dev", found, QUEUE) is None


def test_a_file_of_a_local_bucket_is_read_through_a_host_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.lxd import target

    def host(name: str) -> SimpleNamespace:
        files = SimpleNamespace(get=lambda path: f"{name}:{path}".encode())
        return SimpleNamespace(status="Running" if name == "worker-0" else "Stopped", files=files)

    monkeypatch.setattr(target, "client", lambda _: SimpleNamespace(instances=SimpleNamespace(get=host)))
    for there, read in ((["ps-0", "worker-0"], b"worker-0:/bucket/cluster/queue.json"), (["ps-0"], None), ([], None)):
        monkeypatch.setattr(target, "hosts_of", lambda _, there=there: there)
        assert target.LXD.read("local", None, QUEUE) == read
