"""A job's submission: the order of its writes, its waits, and that nothing is left behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import signal
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opsdata import put_job
from waiting import limit, wait_for

from infra.inventory import Inventory, PowerAccess
from jobs import paths
from jobs.bucket import Bucket, BucketError, Item, RecordStore
from jobs.folder import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.queue import QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER
from jobs.records import HostFile, JobRecord
from jobs.serialization import RecordError
from jobs.states import JobState
from ops.cluster import start_hosts
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.cluster.inventory import ROOT
from ops.cluster.ledger import newest_job
from ops.cluster.remote import CommandResult
from ops.errors import HostError, HostsError, OpsError, UsageError, explain
from ops.package import package, push
from ops.package.trainer_config import Data, TrainerConfig
from ops.submit import render, train
from ops.submit import submit as module
from ops.submit.config import JobFlags, build_job
from ops.submit.program import SHIPPED
from ops.submit.submit import Submission, submit
from ops.submit.submitter import Submitter

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"


class FakeFleet:
    """Hosts that remember what they were told; `answers` says what becomes of a command."""

    def __init__(self, inventory: Inventory, answers: Callable[[str, str], CommandResult | None] = lambda *_: None) -> None:
        self.inventory, self.answers = inventory, answers
        self.told: list[tuple[str, str]] = []
        self.sent: dict[str, bytes] = {}
        self.parts: list[tuple[bytes, ...]] = []
        self._lock = threading.Lock()

    def run(self, name: str, command: str, stdin: bytes | tuple[bytes, ...] | None = None) -> CommandResult:
        with self._lock:
            self.told.append((name, command))
            if stdin is not None:
                self.parts.append((stdin,) if isinstance(stdin, bytes) else stdin)
                self.sent[name] = b"".join(self.parts[-1])
        return self.answers(name, command) or CommandResult(name, 0, "")

    def must(self, name: str, command: str, what: str, stdin: bytes | tuple[bytes, ...] | None = None, sent: Any = None) -> str:
        ran = self.run(name, command, stdin)
        if sent:
            sent(len(self.sent.get(name, b"")))
        if ran.exit_code:
            raise HostError(name, what, ran.exit_code, ran.output)
        return ran.output

    def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
        return fan_out(names, work, seconds, done)

    def connect_each(self, names: Any, done: Any = None) -> Outcome[Any]:
        return self.each(names, lambda name: self.run(name, "connect"), 30, done)

    def any_connection(self) -> None:
        raise AssertionError("the bucket is a directory")

    connection = any_connection


class Watched:
    """A store that says what is written, and may fail."""

    def __init__(self, store: RecordStore, wrote: Callable[[str, bytes], None]) -> None:
        self._store, self._wrote = store, wrote

    def read(self, name: str) -> Item | None:
        return self._store.read(name)

    def read_all(self, names: Any) -> dict[str, Item]:
        return self._store.read_all(names)

    def scan(self, pattern: str) -> dict[str, bytes]:
        return self._store.scan(pattern)

    def create(self, name: str, content: bytes) -> str:
        self._wrote(name, content)
        return self._store.create(name, content)

    def replace(self, name: str, content: bytes, version: str) -> str:
        self._wrote(name, content)
        return self._store.replace(name, content, version)


@pytest.fixture
def submission(inventory: Inventory, tmp_path: Path) -> Submission:
    inventory = replace(inventory, operator_bucket=str(tmp_path / "bucket"))
    (tmp_path / "bucket").mkdir()
    return Submission(inventory, build_job(JobFlags("job01"), inventory, "tiny"), package.build(TINY, "tiny.task"), {})


@pytest.fixture
def ledger(submission: Submission) -> Ledger:
    return Ledger(FolderBucket(Path(submission.inventory.operator_bucket)))


@pytest.fixture
def bucket(submission: Submission) -> Bucket:
    return open_bucket(submission.inventory.operator_bucket)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases all the time."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.01)


def on(fleet: FakeFleet, ledger: Ledger | None = None) -> ClusterClient:
    return ClusterClient(fleet.inventory, fleet, ledger=ledger)  # type: ignore[arg-type]


def found(ledger: Ledger, job_id: str = "job01") -> JobRecord:
    stored = ledger.job(job_id)
    assert stored is not None
    return stored.record


def state(ledger: Ledger) -> tuple[str, str]:
    return found(ledger).state, found(ledger).errorMessage


def unpacked(stream: bytes) -> dict[str, bytes]:
    """Return the files in a host's stream."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(stream))) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}  # type: ignore[union-attr]


def content(bucket: Bucket, name: str) -> bytes:
    item = bucket.read(name)
    assert item is not None
    return item.content


def named(submission: Submission, job_id: str, priority: int = 0) -> Submission:
    return replace(submission, job=replace(submission.job, id=job_id, priority=priority))


def test_every_host_is_told_once(submission: Submission, ledger: Ledger, bucket: Bucket) -> None:
    fleet = FakeFleet(submission.inventory)
    assert submit(on(fleet, ledger), submission, may_wait=True) == []
    _, version = push.code(ROOT)
    assert sorted(fleet.told) == sorted((name, push.install_command(version, "job01")) for name in submission.inventory.names)
    record = found(ledger)
    assert (record.state, record.errorMessage) == (JobState.PREPARING, "")
    assert record.lease.free, "the job is its replicas'"
    assert record.hosts[0] == "master-0"
    assert content(bucket, "jobs/job01/package.tar.gz") == submission.package.archive
    assert b'"module": "tiny.task"' in content(bucket, "jobs/job01/manifest.json")
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan == render.plan(submission.inventory, submission.job, hashlib.sha256(submission.package.archive).hexdigest())
    assert newest_job(ledger) == "job01"
    for name in submission.inventory.names:
        files = unpacked(fleet.sent[name])
        assert HostFile.from_json(files["etc/scaletier/host.json"]).name == name
        assert files["opt/scaletier/.new/package.sha256"].decode() == plan.packageSha256
        assert files["opt/scaletier/.new/hosts/VERSION"].decode() == version
    whole = [parts for parts in fleet.parts if len(parts) > 1]
    assert len(whole) == len(submission.inventory.names)
    assert len({id(shared) for shared, _ in whole}) == 1, "the package is in memory once, however many hosts there are"


def test_what_is_written_in_which_order(submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may start once the plan is there; the job is its replicas' once all that they may fetch is there."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", limit())  # none comes between
    events: list[str] = []

    def wrote(name: str, content: bytes) -> None:
        record = JobRecord.from_json(content) if name == paths.job("job01") else None
        free = " free" if record and record.lease.free else ""
        events.append(f"{name} {record.state}{free}" if record else name)

    class Spied(FolderBucket):
        def upload(self, name: str, *args: Any) -> None:
            time.sleep(0.1)  # longer than the hosts take
            super().upload(name, *args)
            events.append(name)

        def create(self, name: str, content: bytes) -> str:
            events.append(name)
            return super().create(name, content)

    fleet = FakeFleet(submission.inventory, lambda name, _: events.append(name))
    cluster = on(fleet, Ledger(Watched(ledger.store, wrote)))
    cluster.bucket = Spied(Path(submission.inventory.operator_bucket))
    submit(cluster, submission, may_wait=True)
    started = sorted(name for name in submission.inventory.names)
    assert events[:4] == [paths.QUEUE, "jobs/job01/job.json QUEUED", "jobs/job01/plan.json", "jobs/job01/job.json PREPARING"]
    assert sorted(events[4:-1]) == sorted([*started, "jobs/job01/manifest.json", "jobs/job01/package.tar.gz"])
    assert events[-1] == "jobs/job01/job.json PREPARING free"


def with_data(submission: Submission, file: Path) -> Submission:
    job = replace(submission.job, declared=TrainerConfig(data=Data(name="digits")))
    return replace(submission, job=job, data={file.name: file})


def test_data_is_there_before_a_host_starts(submission: Submission, ledger: Ledger, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").write_bytes(b"12345")
    submission = with_data(submission, tmp_path / "train.tfrecord")
    seen: list[int | None] = []
    fleet = FakeFleet(submission.inventory, lambda *_: seen.append(bucket.sizes("data/digits").get("train.tfrecord")))
    submit(on(fleet, ledger), submission, may_wait=True)
    assert seen == [5] * 5


def test_data_in_another_number_of_files_goes(submission: Submission, ledger: Ledger, bucket: Bucket, tmp_path: Path) -> None:
    new = "train-00000-of-00001.tfrecord"
    (tmp_path / new).write_bytes(b"12345")
    others = {"train-mine.tfrecord": 1, "test-00000-of-00002.tfrecord": 1}
    for name in ("train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord.gz", *others):
        bucket.upload(f"data/digits/{name}", b"1")
    submit(on(FakeFleet(submission.inventory), ledger), with_data(submission, tmp_path / new), may_wait=True)
    assert bucket.sizes("data/digits") == {new: 5, **others}


def test_a_host_that_fails_ends_the_job(submission: Submission, ledger: Ledger) -> None:
    def answers(name: str, command: str) -> CommandResult | None:
        return CommandResult(name, 2, "noise\nfailed: No space left\n") if name == "worker-1" and "take-in" in command else None

    fleet = FakeFleet(submission.inventory, answers)
    with pytest.raises(
        HostsError, match=r"worker-1 could not start its replica.*No space left: job job01 is FAILED, nothing runs"
    ):
        submit(on(fleet, ledger), submission, may_wait=True)
    assert state(ledger)[0] == JobState.FAILED
    assert "No space left" in state(ledger)[1]
    assert ledger.queue().entries == []


class Interrupted(FakeFleet):
    """Ctrl-C comes while the hosts are being told."""

    def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
        raise KeyboardInterrupt


def test_what_is_large_is_counted_by_bytes(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(on(FakeFleet(submission.inventory), ledger), submission, may_wait=True)
    assert re.match(r"job01: starting 5 hosts 5 of 5 \(", capsys.readouterr().err)
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    job = replace(submission.job, id="job02")
    submit(on(FakeFleet(submission.inventory), ledger), replace(submission, job=job), may_wait=True)
    said = re.match(r"job02: \w+ 5 hosts (\S+ kB) of (\S+ kB) \(", capsys.readouterr().err)
    assert said
    assert said[1] == said[2]


def test_an_interrupt_is_undone(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        submit(on(Interrupted(submission.inventory), ledger), submission, may_wait=True)
    assert state(ledger) == ("CANCELLED", "fab train was stopped before the job was handed over")
    assert "job01 is CANCELLED, and nothing runs" in capsys.readouterr().err
    assert ledger.queue().entries == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["give_up", "end"])
def test_another_interrupt_does_not_stop_the_undoing(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, when: str, number: signal.Signals
) -> None:
    kind: Any = module._Renewal if when == "end" else Submitter
    body = getattr(kind, when)

    def again(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        return body(*args)

    monkeypatch.setattr(kind, when, again)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    for each in before:
        signal.signal(each, raises)  # as ops.cli does
    try:
        if when == "end":  # it is called once more when all is undone
            monkeypatch.setattr(kind, when, lambda *args: (again if ledger.queue().entries else body)(*args))
        with pytest.raises(KeyboardInterrupt):
            submit(on(Interrupted(submission.inventory), ledger), submission, may_wait=True)
        assert {signal.getsignal(each) for each in before} == {raises}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert state(ledger)[0] == "CANCELLED"
    assert ledger.queue().entries == []


@pytest.mark.usefixtures("quick")
def test_the_lease_is_renewed_while_hosts_are_told(submission: Submission, ledger: Ledger) -> None:
    beats: list[int] = []

    def answers(name: str, _: str) -> None:
        if name == "ps-0":
            wait_for(lambda: beats.append(found(ledger).lease.heartbeatSeq) or len(set(beats)) > 2, "renewals", poll=0.01)

    submit(on(FakeFleet(submission.inventory, answers), ledger), submission, may_wait=True)
    assert len(set(beats)) > 2
    assert state(ledger)[0] == "PREPARING"
    after = found(ledger).lease
    time.sleep(0.05)
    assert found(ledger).lease == after, "a job that was handed over is renewed no more"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [BucketError("away"), HostsError({}, "away"), RecordError("job.json is no JSON")])
def test_a_bucket_that_fails_now_and_then_is_no_end(submission: Submission, ledger: Ledger, error: Exception) -> None:
    failed: list[str] = []

    def wrote(name: str, content: bytes) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # it is what renews the lease that is to meet the failures
        if name == paths.job("job01") and len(failed) < 3 and JobRecord.from_json(content).lease.heartbeatSeq > 1:
            failed.append(name)
            raise error

    def answers(*_: object) -> None:
        wait_for(lambda: len(failed) == 3, "failures", poll=0.01)

    cluster = on(FakeFleet(submission.inventory, answers), Ledger(Watched(ledger.store, wrote)))
    submit(cluster, submission, may_wait=True)
    assert len(failed) == 3
    assert state(ledger) == ("PREPARING", "")


@pytest.mark.usefixtures("quick")
def test_a_job_that_is_cancelled_while_it_is_submitted(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, run = threading.Event(), module._Renewal._run

    def watched(renewal: module._Renewal) -> None:
        run(renewal)
        ended.set()

    def answers(*_: object) -> None:
        ledger.request_cancel("job01", b"{}")
        assert ended.wait(limit()), "nobody has noticed"

    monkeypatch.setattr(module._Renewal, "_run", watched)
    with pytest.raises(OpsError, match=r"^job job01 was cancelled while it was being submitted$"):
        submit(on(FakeFleet(submission.inventory, answers), ledger), submission, may_wait=True)
    assert state(ledger) == ("CANCELLED", "")
    assert ledger.queue().entries == []


@pytest.mark.parametrize("renewed", [True, False])
def test_a_job_that_another_took_over_is_left_to_it(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.01 if renewed else limit())

    def answers(name: str, _: str) -> None:
        while name == "ps-0":
            stored = ledger.job("job01")
            assert stored is not None
            try:
                ledger.change_job(stored, stored.record.with_holder("bob@desk").ended(NOT_HANDED_OVER))
            except Exception:  # noqa: BLE001  it was renewed in between
                continue
            time.sleep(0.1)
            return

    why = f"^job job01 continued without this fab train, and is FAILED: {NOT_HANDED_OVER}$"
    with pytest.raises(OpsError, match=why):
        submit(on(FakeFleet(submission.inventory, answers), ledger), submission, may_wait=True)
    assert found(ledger).lease.holder == "bob@desk"
    assert ledger.queue().entries == []


def test_a_bucket_that_fails_is_one_line(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    def wrote(name: str, _: bytes) -> None:
        if name != paths.QUEUE and name != paths.job("job01"):
            broken.append(name)
        if broken:
            raise BucketError("gs://b did not answer within 20 s")

    broken: list[str] = []
    fleet = FakeFleet(submission.inventory)
    with pytest.raises(BucketError) as error:
        submit(on(fleet, Ledger(Watched(ledger.store, wrote))), submission, may_wait=True)
    assert explain(error.value) == ("the bucket fails: gs://b did not answer within 20 s", 1)
    assert capsys.readouterr().err == "", "the error says it"
    assert fleet.told == []


def test_a_package_that_cannot_be_uploaded_ends_the_job(submission: Submission, ledger: Ledger) -> None:
    class Full(FolderBucket):
        def upload(self, *_: Any) -> None:
            raise BucketError("No space left on device")

    cluster = on(FakeFleet(submission.inventory), ledger)
    cluster.bucket = Full(Path(submission.inventory.operator_bucket))
    why = "the package could not be put into the bucket: No space left on device"
    with pytest.raises(OpsError, match=f"^{why}$"):
        submit(cluster, submission, may_wait=True)
    assert state(ledger) == ("FAILED", why)
    assert ledger.queue().entries == []


def test_an_id_is_used_once(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(on(fleet, ledger), submission, may_wait=True)
    before = ledger.job("job01")
    for _ in range(2):  # while it has its hosts, and afterwards
        with pytest.raises(UsageError, match="job id 'job01' was used before, and an id is used once"):
            submit(on(fleet, ledger), submission, may_wait=True)
        assert ledger.job("job01") == before
        ledger.change_queue(lambda queue: replace(queue, entries=[]))


def test_on_a_busy_cluster_it_waits_by_priority(
    submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet(submission.inventory, checks(10**10))
    cluster = on(fleet, ledger)
    submit(cluster, submission, may_wait=True)
    fleet.sent.clear()
    assert [e.jobId for e in submit(cluster, named(submission, "job02"), may_wait=True)] == ["job01"]
    assert [e.jobId for e in submit(cluster, named(submission, "job03", 5), may_wait=True)] == ["job01"]
    assert [e.jobId for e in ledger.queue().ahead_of("job02")] == ["job01", "job03"]
    files = unpacked(fleet.sent["ps-0"])
    assert {"etc/scaletier/host.json", "opt/scaletier/.new/hosts/VERSION"} <= files.keys()
    assert not [name for name in files if "/jobs/job" in name], "its hosts take the package when its turn comes"
    waits = found(ledger, "job02")
    assert (waits.state, waits.lease.free) == (JobState.QUEUED, True), "whoever tends the queue starts it"
    capsys.readouterr()
    assert train.run(cluster, named(submission, "job04"), may_wait=True, follow=False) == 0
    says = "job04 is QUEUED behind job01, job03, job02: fab logs all --job job04 --follow, fab describe job04\n"
    assert capsys.readouterr().out == says
    ledger.change_queue(lambda queue: queue.without(queue.entries[0]))
    assert [entry.jobId for entry in ledger.queue().entries if entry.held] == ["job03"]


def test_the_longest_that_a_job_waits_is_in_the_queue(submission: Submission, ledger: Ledger) -> None:
    limited = replace(submission, job=replace(submission.job, policy={**submission.job.policy, "maxWaitTime": 60.0}))
    submit(on(FakeFleet(submission.inventory), ledger), limited, may_wait=True)
    assert ledger.queue().entries[0].maxWaitTime == 60.0


def test_a_busy_cluster_is_left_alone_with_no_queue(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(on(fleet, ledger), submission, may_wait=True)
    fleet.told.clear()
    before = ledger.store.scan("*/*.json"), ledger.store.scan("jobs/*/*.json")
    says = (
        r"^hosts that it needs are job job01's, which is PREPARING \(started by \S+@\S+ at \S+\): "
        r"follow it with fab logs all --job job01 --follow; without --no-queue the job waits for its turn$"
    )
    with pytest.raises(UsageError, match=says):
        submit(on(fleet, ledger), named(submission, "job02"), may_wait=False)
    assert fleet.told == []
    assert (ledger.store.scan("*/*.json"), ledger.store.scan("jobs/*/*.json")) == before


class Clock:
    """Time in which nothing waits; `tick` is what others do each second."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self.now, self._tick = 100.0, tick

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._tick()


def claimed(ledger: Ledger, submission: Submission, job_id: str, with_record: bool = True) -> Submitter:
    """Write the leftovers of a fab train that is killed right after its claim, or in the midst of it."""
    record = replace(submission.record(), jobId=job_id)
    submitter = Submitter(ledger, record, "ann@laptop/1")
    if with_record:
        submitter.claim(may_wait=False)
    else:
        ledger.change_queue(
            lambda queue: queue.added(
                QueueEntry(job_id, [], candidates=record.candidates, token="ann@laptop/1", createTime=record.createTime)
            )
        )
    return submitter


@pytest.mark.parametrize("with_record", [True, False])
def test_what_a_killed_fab_train_left_behind_is_cleared_away(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, with_record: bool
) -> None:
    claimed(ledger, submission, "job00", with_record)
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    assert submit(on(FakeFleet(submission.inventory), ledger), submission, may_wait=False) == []
    assert 30 <= clock.now - 100 < 35
    assert (found(ledger, "job00").state, found(ledger, "job00").errorMessage) == ("FAILED", NOT_HANDED_OVER)
    assert [entry.jobId for entry in ledger.queue().entries] == ["job01"]


def test_a_fab_train_that_lives_keeps_its_hosts(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = claimed(ledger, submission, "job00")
    clock = Clock(lambda: other.renew() if clock.now >= 103 else None)
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(UsageError, match=r"^hosts that it needs are job job00's, which is QUEUED"):
        submit(on(FakeFleet(submission.inventory), ledger), submission, may_wait=False)
    assert clock.now == 103
    assert ledger.job("job01") is None
    assert [entry.jobId for entry in ledger.queue().entries] == ["job00"]


def checks(room: int, lacking: str = "") -> Callable[[str, str], CommandResult | None]:
    return lambda name, command: CommandResult(name, 0, f"ready\n{room}\n{room}\n{lacking}\n") if "; df " in command else None


def test_a_host_that_prepares_is_waited_for_with_a_word(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_AGAIN_SECONDS", 0.0)
    asked: list[str] = []

    def answers(name: str, command: str) -> CommandResult | None:
        if "; df " not in command:
            return None
        asked.append(name)
        early = name == "worker-0" and asked.count(name) < 3
        return CommandResult(name, 0, "preparing: runtime\n") if early else checks(10**10)(name, command)

    train.check_hosts(on(FakeFleet(submission.inventory, answers)), submission)
    assert asked.count("worker-0") == 3
    assert {asked.count(name) for name in submission.inventory.names if name != "worker-0"} == {1}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("failed: image: it has no curl", "worker-0 could not be set up: image: it has no curl"),
        ("older than this scaletier", "worker-0 is older than this scaletier: run pulumi up"),
        ("preparing: runtime", "worker-0 is not ready after 0 s: preparing: runtime"),
    ],
)
def test_a_host_that_is_none_is_named(submission: Submission, monkeypatch: pytest.MonkeyPatch, said: str, words: str) -> None:
    monkeypatch.setattr(train, "_READY_SECONDS", 0.0)

    def late(name: str, command: str) -> CommandResult | None:
        mine = name == "worker-0" and "; df " in command
        return CommandResult(name, 0, f"{said}\n") if mine else checks(10**10)(name, command)

    with pytest.raises(HostsError, match=words):
        train.check_hosts(on(FakeFleet(submission.inventory, late)), submission)


def test_hosts_are_checked_before_anything_is_changed(submission: Submission, ledger: Ledger, bucket: Bucket) -> None:
    fleet = FakeFleet(submission.inventory, checks(10**10))
    train.check_hosts(on(fleet), submission)
    assert bucket.walk("") == {}
    with pytest.raises(UsageError, match=r"ps-0 has only 50.0 MB free in /var/lib/scaletier, a job needs 100"):
        train.check_hosts(on(FakeFleet(submission.inventory, checks(50_000_000))), submission)
    wanting = replace(submission, package=replace(submission.package, imports={"pandas": "tiny/task.py:3"}))
    with pytest.raises(UsageError, match=r"tiny/task.py:3 imports pandas, which neither the package tiny nor the hosts have"):
        train.check_hosts(on(FakeFleet(submission.inventory, checks(10**10, "pandas"))), wanting)
    put_job(ledger, submission.record())
    with pytest.raises(UsageError, match="job id 'job01' was used before"):
        train.check_hosts(on(fleet), submission)


def part_of(submission: Submission) -> Submission:
    """Return a job of one host, for which the master's or a worker's would do."""
    return replace(submission, job=build_job(JobFlags("job01", scale_tier="BASIC"), submission.inventory, "tiny"))


def test_a_part_of_the_cluster_concerns_no_other_host(submission: Submission, ledger: Ledger) -> None:
    fleet, part = FakeFleet(submission.inventory), part_of(submission)
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job00", ["master-0"])))
    assert submit(on(fleet, ledger), part, may_wait=False) == []
    assert list(fleet.sent) == ["worker-0"]
    assert (found(ledger).state, found(ledger).placement) == ("PREPARING", {"master-0": "worker-0"})
    assert found(ledger).manifest["cluster"]["replicas"] == {"master": 1}
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan.replicas == ["master-0"]
    config = json.loads(plan.with_hosts(found(ledger).placement).tasks["master-0"].tfConfig)
    assert config["cluster"] == {"chief": ["10.0.0.64:2222"]}


def test_a_part_that_waits_is_told_to_all_hosts_that_would_do(submission: Submission, ledger: Ledger) -> None:
    fleet, part = FakeFleet(submission.inventory), part_of(submission)
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job00", ["master-0", "worker-0", "worker-1"])))
    assert [entry.jobId for entry in submit(on(fleet, ledger), part, may_wait=True)] == ["job00"]
    assert sorted(fleet.sent) == ["master-0", "worker-0", "worker-1"]
    assert (found(ledger).state, found(ledger).placement) == ("QUEUED", {})


def test_a_host_that_does_not_answer_is_done_without_where_another_would_do(
    submission: Submission, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*gone: str) -> Any:
        checked = checks(10**10)

        def answer(name: str, command: str) -> CommandResult | None:
            if name in gone:
                raise HostError(name, "does not answer")
            return None if command == "connect" else checked(name, command)

        return answer

    part = part_of(submission)
    checked = train.check_hosts(on(FakeFleet(submission.inventory, away("master-0", "ps-0"))), part)
    assert checked.candidates == {"master-0": ["worker-0", "worker-1"]}
    assert checked.record().candidates == checked.candidates
    assert "master-0 does not answer: the job goes without this host" in capsys.readouterr().err
    gone = away("master-0", "worker-0", "worker-1")
    with pytest.raises(HostsError, match=r"master-0 does not answer.*run pulumi up, which brings back what is missing"):
        train.check_hosts(on(FakeFleet(submission.inventory, gone)), part)
    with pytest.raises(HostsError, match="ps-0 does not answer"):
        train.check_hosts(on(FakeFleet(submission.inventory, away("ps-0"))), submission)


def test_hosts_that_are_stopped_are_started_for_a_job_that_says_so(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    off, started = {"ps-0", "worker-1"}, []
    checked = checks(10**10)

    def answer(name: str, command: str) -> CommandResult | None:
        if name in off:
            raise HostError(name, "does not answer")
        return None if command == "connect" else checked(name, command)

    def start(name: str) -> str:
        started.append(name)
        off.remove(name)
        return ""

    hosts = tuple(replace(host, start=f"{host.name}/start") for host in submission.inventory.hosts)
    inventory = replace(
        submission.inventory,
        hosts=hosts,
        power=PowerAccess(url="http://x/", operator_url="http://y/", token="http://t", token_command="true", preempted=""),
    )
    stopped = replace(submission, inventory=inventory)
    with pytest.raises(
        HostsError,
        match=r"ps-0 does not answer; .*: fab train --start-hosts \(or startHosts: true in config.yaml\) starts those that",
    ):
        train.check_hosts(on(FakeFleet(inventory, answer), ledger), stopped)
    monkeypatch.setattr(start_hosts, "_start", lambda _: start)
    willing = replace(stopped, job=replace(submission.job, start_hosts=True))
    assert train.check_hosts(on(FakeFleet(inventory, answer), ledger), willing).excluded == frozenset()
    assert sorted(started) == ["ps-0", "worker-1"]
    off.add("ps-0")
    put_job(ledger, JobRecord(willing.job.id))
    with pytest.raises(UsageError, match="was used before"):
        train.check_hosts(on(FakeFleet(inventory, answer), ledger), willing)
    assert len(started) == 2, "no host is started for a job that cannot be"


def test_two_jobs_do_not_write_to_one_output_at_once(submission: Submission, ledger: Ledger) -> None:
    def job(job_id: str, job_dir: str, **flags: str) -> Submission:
        told = JobFlags(job_id, job_dir=job_dir, **flags)  # type: ignore[arg-type]
        return replace(submission, job=build_job(told, submission.inventory, "tiny"))

    fleet = FakeFleet(submission.inventory, checks(10**10))
    first = job("job00", "/bucket/jobs/old/output", scale_tier="BASIC")
    submit(on(FakeFleet(submission.inventory), ledger), first, may_wait=False)
    for folder in ("/bucket/jobs/old/output/", "/bucket/jobs/old/output/more", "/bucket/jobs/old"):
        with pytest.raises(
            UsageError, match="job job00, which is PREPARING, writes to /bucket/jobs/old/output, and this job would"
        ):
            train.check_hosts(on(fleet, ledger), job("job01", folder, scale_tier="BASIC"))
    train.check_hosts(on(fleet, ledger), job("job01", "/bucket/jobs/old2/output", scale_tier="BASIC"))
    # One that needs the same host comes after it, and may go on in its output.
    train.check_hosts(on(fleet, ledger), job("job01", "/bucket/jobs/old/output"))


def test_the_shipped_trainer_needs_data(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ROOT", tmp_path)
    (tmp_path / ".cache/mnist").mkdir(parents=True)
    inventory = replace(inventory, operator_bucket=str(tmp_path))
    fleet = FakeFleet(inventory, checks(10**10))
    with pytest.raises(UsageError, match="there is no mnist to train on: run make data"):
        train.check_hosts(on(fleet), train.prepare(inventory, JobFlags("job01"), str(SHIPPED)))
    told = train.prepare(inventory, JobFlags("job01", args="--train-data=x --eval-data=y"), str(SHIPPED))
    assert told.data == {}
    train.check_hosts(on(fleet), told)
    (tmp_path / ".cache/mnist/train-0.tfrecord").write_bytes(b"")
    assert list(train.prepare(inventory, JobFlags("job01"), None).data) == ["train-0.tfrecord"]


def test_arguments_that_are_no_utf_8_are_shown_but_sent_as_they_are(submission: Submission, ledger: Ledger) -> None:
    made = build_job(JobFlags("job01", more_args=["\udcff"]), submission.inventory, "tiny")
    submit(on(FakeFleet(submission.inventory), ledger), replace(submission, job=made), may_wait=True)
    assert found(ledger).trainingInput["args"] == ["\ufffd"]
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan.args == ["\udcff"]


@pytest.mark.parametrize("wanted", ["SUCCEEDED", "FAILED", "CANCELLED"])
def test_the_exit_code_of_a_followed_job(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    from ops.screen import logs

    ended = JobRecord("job01", JobState(wanted), errorMessage="worker-1 ran out of memory.\nmore")
    monkeypatch.setattr(logs, "follow_plain", lambda *_: ended)
    monkeypatch.setattr(train.outcome, "read", lambda *_: ["what is there", "what is beside it"])
    monkeypatch.setattr(train.outcome, "read_unsaved", lambda *_: ["what is beside it"])
    cluster: Any = SimpleNamespace(inventory=submission.inventory)
    assert train.watch(cluster, submission.record()) == (0 if wanted == "SUCCEEDED" else 1)
    first, rest = capsys.readouterr().err.split("\n", 1)
    err = f"{first}\n"
    assert rest == "what is beside it\n"
    if wanted == "SUCCEEDED":
        assert err == "job01 SUCCEEDED: what is there\n"
    else:
        more = "; fab bundle job01 collects the evidence in one file" if wanted == "FAILED" else ""
        assert err == f"error: job01 {wanted}: worker-1 ran out of memory (fab describe job01{more})\n"


def test_ctrl_c_leaves_a_job_to_itself(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ops.screen import logs

    def follow(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "follow_plain", follow)
    cluster: Any = SimpleNamespace(inventory=submission.inventory)
    assert train.watch(cluster, submission.record()) == 130
    assert "job01 continues, or waits for its turn: fab logs all --job job01 --follow" in capsys.readouterr().err
