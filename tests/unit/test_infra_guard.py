"""Jobs that a change of the cluster would disrupt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from pylxd.exceptions import LXDAPIException, NotFound

from infra import guard
from infra.guard import AffectedJob, Change
from infra.scale_tiers import ScaleTier, TargetError, preset
from jobs import paths
from jobs.paths import QUEUE
from jobs.queue import Queue, QueueEntry
from jobs.records import Plan, Task

BASIC = preset(ScaleTier.BASIC)
STANDARD = ["ps-0", "master-0", "worker-0", "worker-1"]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(guard.pulumi.log, "warn", messages.append)
    return messages


def queue() -> Queue:
    either = {"master-0": ["worker-0", "master-0"]}
    return (
        Queue()
        .added(QueueEntry("peers", ["worker-0", "worker-1"]))
        .added(QueueEntry("one", ["master-0"]))
        .added(QueueEntry("large", ["master-0", "ps-0"]))
        .added(QueueEntry("small", [], candidates=either))
    )


def test_removed_hosts() -> None:
    assert guard.removed_hosts(STANDARD, BASIC) == ["ps-0", "worker-0", "worker-1"]
    assert guard.removed_hosts(STANDARD, preset(ScaleTier.STANDARD_1)) == []
    assert guard.removed_hosts([], BASIC) == []


class Files:
    """A bucket with the queue and plans, which records writes."""

    def __init__(self, **optional: list[str]) -> None:
        plans = {
            paths.plan(job): Plan(job, ["master-0"], "m", [], {"master-0": Task("{}")}, optionalRoles=roles)
            for job, roles in optional.items()
        }
        self.contents = {QUEUE: queue().to_json()} | {path: plan.to_json() for path, plan in plans.items()}
        self.written: dict[str, Any] = {}

    def create(self, path: str, content: bytes) -> None:
        self.written[path] = json.loads(content)


@pytest.mark.parametrize(
    ("files", "continues"), [(Files(), True), (Files(peers=["evaluator"]), False), (Files(peers=["worker"]), True)]
)
def test_affected_jobs(files: Files, continues: bool) -> None:
    assert guard.affected_jobs(queue(), Change(["worker-0", "worker-1", "ps-0"]), files.contents.get) == [
        AffectedJob("peers", "job peers has worker-0, worker-1", continues),
        AffectedJob("large", "job large waits for more hosts than remain", continues=False),
    ]
    assert guard.affected_jobs(queue(), Change(["evaluator-0"]), files.contents.get) == []
    files.contents[paths.plan("peers")] = b"{"
    assert guard.affected_jobs(queue(), Change(["worker-0"]), files.contents.get)[0].continues, (
        "a job without a readable plan is not cancelled"
    )


def test_a_preview_warns_an_update_refuses_and_disrupt_jobs_cancels(warnings: list[str]) -> None:
    files, lost = Files(peers=[]), Change(["worker-1"])
    bucket = (files.contents.get, files.create)
    guard.protect_jobs(lost, *bucket, preview=True, allowed=False)
    assert warnings.pop().startswith("this removes worker-1, and job peers has worker-1: pulumi up will refuse. Wait")
    with pytest.raises(TargetError, match=r"job peers has worker-1: nothing was changed\. Wait .* disruptJobs true"):
        guard.protect_jobs(lost, *bucket, preview=False, allowed=False)
    warning = "this removes worker-1, and job peers has worker-1: disruptJobs is true, so it is done; peers ends"
    guard.protect_jobs(lost, *bucket, preview=True, allowed=True)
    assert (warnings.pop(), files.written) == (warning, {})
    guard.protect_jobs(lost, *bucket, preview=False, allowed=True)
    assert warnings.pop() == warning
    assert files.written.keys() == {paths.cancel("peers")}
    request = files.written[paths.cancel("peers")]
    assert (request["requestedBy"], request["reason"]) == ("pulumi up", "hosts removed or replaced: worker-1")


def test_a_replaced_host_affects_its_job_but_no_waiting_job(warnings: list[str]) -> None:
    files, change = Files(peers=[]), Change(["evaluator-0"], ["worker-0", "ps-0"])
    assert guard.affected_jobs(queue(), change, files.contents.get) == [
        AffectedJob("peers", "job peers has worker-0", continues=False)
    ]
    guard.protect_jobs(change, files.contents.get, files.create, preview=True, allowed=False)
    assert warnings.pop().startswith(
        "this removes evaluator-0 and replaces worker-0, ps-0, and job peers has worker-0: pulumi up"
    )
    with pytest.raises(TargetError, match=r"^this replaces worker-0, and job peers has worker-0: nothing was changed\."):
        guard.protect_jobs(Change(replaced=["worker-0"]), files.contents.get, files.create, preview=False, allowed=False)
    guard.protect_jobs(change, files.contents.get, files.create, preview=False, allowed=True)
    assert files.written[paths.cancel("peers")]["reason"] == "hosts removed or replaced: evaluator-0, worker-0, ps-0"


def test_a_job_continues_without_an_optional_host(warnings: list[str]) -> None:
    files = Files(peers=["worker"])
    guard.protect_jobs(Change(["worker-1"]), files.contents.get, files.create, preview=False, allowed=True)
    assert warnings.pop().endswith("so it is done; peers continues, or waits for its hosts")
    assert files.written == {}


def test_a_harmless_change_is_allowed(warnings: list[str]) -> None:
    def fail_if_called(*_: object) -> Any:
        raise AssertionError("no host is removed, so nothing is read")

    guard.protect_jobs(Change(), fail_if_called, fail_if_called, preview=False, allowed=False)
    guard.protect_jobs(Change(["ps-0"]), lambda _: None, fail_if_called, preview=False, allowed=False)
    guard.protect_jobs(Change(["evaluator-0"]), lambda _: queue().to_json(), fail_if_called, preview=False, allowed=False)
    assert warnings == []
    guard.protect_jobs(Change(["ps-0"], ["ps-1"]), lambda _: b"{", fail_if_called, preview=False, allowed=False)
    assert "the queue cannot be read" in warnings.pop()


def test_google_s_bucket_is_read_and_written_by_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.gcp import bucket_guard, target
    from infra.gcp.api import GcpError

    def fail_if_called(*_: object) -> Any:
        raise AssertionError("no job is known")

    reads: list[tuple[str, Any]] = []

    writes: list[tuple[str, str, str, bytes]] = []

    class Session:
        read: int | Exception = 200
        status = 200

        def post(self, url: str, params: Any, data: bytes, timeout: float) -> SimpleNamespace:
            writes.append((url, params["name"], params["ifGenerationMatch"], data))
            return SimpleNamespace(ok=self.status == 200, status_code=self.status)

        def get(self, url: str, params: Any, timeout: float) -> SimpleNamespace:
            reads.append((url, params))
            if isinstance(self.read, Exception):
                raise self.read
            return SimpleNamespace(ok=self.read == 200, status_code=self.read, content=b"{}")

    monkeypatch.setattr(target, "provider_config", lambda _: None)
    monkeypatch.delenv("GOOGLE_STORAGE_CUSTOM_ENDPOINT", raising=False)
    session = Session()
    for module in (bucket_guard, target):
        monkeypatch.setattr(module, "session", lambda _: session)
    gcp = object.__new__(target.GcpTarget)  # without a call to Google
    gcp.bucket = "mine"
    assert gcp.read_object(QUEUE) == b"{}"
    url = "https://storage.googleapis.com/storage/v1/b/mine/o/cluster%2Fqueue.json"
    assert reads == [(url, {"alt": "media"})]
    session.read = 404
    assert gcp.read_object(QUEUE) is None, "before the first update there is no bucket"
    for failure, message in ((503, "HTTP 503"), (403, "HTTP 403"), (requests.ConnectionError("broken"), "broken")):
        session.read = failure
        with pytest.raises(TargetError, match=rf"^the bucket does not answer \({message}.*\): try again$"):
            guard.protect_jobs(Change(["ps-0"]), gcp.read_object, fail_if_called, preview=False, allowed=False)

    gcp.create_object("jobs/j/cancel.json", b"{}")
    assert writes == [("https://storage.googleapis.com/upload/storage/v1/b/mine/o", "jobs/j/cancel.json", "0", b"{}")]
    session.status = 412  # another writer was faster
    gcp.create_object("jobs/j/cancel.json", b"{}")
    session.status = 403
    with pytest.raises(TargetError, match=r"the bucket does not take jobs/j/cancel\.json \(HTTP 403\)"):
        gcp.create_object("jobs/j/cancel.json", b"{}")

    def refuse(_: Any) -> Any:
        raise GcpError("no credentials")

    for module in (bucket_guard, target):
        monkeypatch.setattr(module, "session", refuse)
    with pytest.raises(TargetError, match=r"^the bucket does not answer \(no credentials\): try again$"):
        gcp.read_object(QUEUE)
    with pytest.raises(TargetError, match="no credentials"):
        gcp.create_object("jobs/j/cancel.json", b"{}")


NOT_FOUND = NotFound(SimpleNamespace(status_code=404, json=lambda: {"error": "Not Found"}))


class FakeHost:
    """A host of LXD whose root is a folder; `ln` is its only command."""

    def __init__(self, root: Path, status: str) -> None:
        self.root, self.status = root, status
        self.files, self.api, self.client = self, {"exec": self}, SimpleNamespace(operations=self)
        self.before_link: Callable[[], object] = lambda: None
        self.ended = {"get", "put", "delete"}

    def _end_once(self, method: str) -> None:
        """Fail as if LXD's process for files had ended, once for each method."""
        if method in self.ended:
            self.ended.remove(method)
            raise LXDAPIException(SimpleNamespace(status_code=500, json=lambda: {"error": "forkfile.sock: connection reset"}))

    def get(self, path: str) -> bytes:
        self._end_once("get")
        try:
            return (self.root / path.lstrip("/")).read_bytes()
        except FileNotFoundError:
            raise NOT_FOUND from None

    def put(self, path: str, content: bytes, mode: int) -> None:
        self._end_once("put")
        (self.root / path.lstrip("/")).write_bytes(content)

    def delete(self, path: str) -> None:
        try:
            (self.root / path.lstrip("/")).unlink()
        except FileNotFoundError:
            raise NOT_FOUND from None
        self._end_once("delete")  # whose answer is lost

    def post(self, json: dict[str, Any]) -> SimpleNamespace:
        program, option, *paths = json["command"]
        assert (program, option) == ("ln", "--no-target-directory")
        with suppress(OSError):
            self.before_link()
            os.link(*(self.root / path.lstrip("/") for path in paths))
        return SimpleNamespace(json=lambda: {"operation": "/1.0/operations/1"})

    def wait_for_operation(self, operation: str) -> None:
        assert operation == "/1.0/operations/1"


def test_a_local_bucket_is_read_and_written_through_a_running_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from infra.lxd import bucket_guard, files, target
    from infra.lxd.layout import LxdNames

    request = tmp_path / "bucket/jobs/j/cancel.json"
    (tmp_path / "bucket/cluster").mkdir(parents=True)
    (tmp_path / "bucket" / QUEUE).write_bytes(b"the queue")
    request.parent.mkdir(parents=True)
    hosts = {"worker-0": FakeHost(tmp_path, "Running"), "ps-0": FakeHost(tmp_path / "none", "Stopped")}
    lxd = object.__new__(target.LxdTarget)  # without a call to LXD
    lxd.preflight = SimpleNamespace(names=LxdNames("scaletier-local-abcdef"))  # type: ignore[assignment]
    lxd.config = target.LxdConfig.parse({"disruptJobs": "true"})
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    monkeypatch.setattr(bucket_guard, "client", lambda _: SimpleNamespace(instances=hosts))
    for names, read in ((["ps-0"], None), ([], None), (["ps-0", "worker-0"], b"the queue")):
        for module in (bucket_guard, target):
            monkeypatch.setattr(module, "hosts_of", lambda _, names=names: names)
        assert lxd.read_object(QUEUE) == read
        if read is None:
            with pytest.raises(TargetError, match="no host of the stack runs"):
                lxd.create_object("jobs/j/cancel.json", b"{}")
    for content in (b"first", b"second"):  # the second time it exists
        hosts["worker-0"].ended = {"get", "put", "delete"}
        lxd.create_object("jobs/j/cancel.json", content)
        assert request.read_bytes() == b"first"
    request.unlink()
    hosts["worker-0"].before_link = lambda: request.write_bytes(b"of fab cancel")
    lxd.create_object("jobs/j/cancel.json", b"{}")
    assert (list(request.parent.iterdir()), request.read_bytes()) == ([request], b"of fab cancel"), "another writer was first"
    request.unlink()
    hosts["worker-0"].before_link = request.unlink  # fails, and so ln
    with pytest.raises(TargetError, match=r"^the bucket does not take jobs/j/cancel\.json \(LXD: Not Found\): try again$"):
        lxd.create_object("jobs/j/cancel.json", b"{}")
    assert list(request.parent.iterdir()) == []


def test_a_local_queue_that_cannot_be_read_protects_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.lxd import target
    from infra.lxd.layout import LxdNames

    def fail_if_called(*_: object) -> Any:
        raise AssertionError("no job is known")

    def fail(status: int) -> Any:
        def get(_: str) -> bytes:
            raise (NotFound if status == 404 else LXDAPIException)(
                SimpleNamespace(status_code=status, json=lambda: {"error": "busy"})
            )

        return SimpleNamespace(files=SimpleNamespace(get=get))

    def protect() -> None:
        guard.protect_jobs(Change(["ps-0"]), lxd.read_object, fail_if_called, preview=False, allowed=lxd.config.disrupt_jobs)

    lxd = object.__new__(target.LxdTarget)  # without a call to LXD
    lxd.preflight = SimpleNamespace(names=LxdNames("scaletier-local-abcdef"))  # type: ignore[assignment]
    lxd.config = target.LxdConfig.parse({})
    monkeypatch.setattr(target, "hosts_of", lambda _: ["ps-0"])
    monkeypatch.setattr(target, "running_host", lambda _: None)
    with pytest.raises(
        TargetError, match=r"no host runs .*: `fab doctor --fix` starts them, or `pulumi config set disruptJobs"
    ):
        protect()
    monkeypatch.setattr(target, "running_host", lambda _: fail(500))
    with pytest.raises(TargetError, match=r"^the bucket: busy"):
        protect()
    monkeypatch.setattr(target, "running_host", lambda _: fail(404))
    protect()
    monkeypatch.setattr(target, "running_host", lambda _: None)
    lxd.config = target.LxdConfig.parse({"disruptJobs": "true"})
    protect()
    lxd.config = target.LxdConfig.parse({})
    monkeypatch.setattr(target, "hosts_of", lambda _: [])
    protect()
