"""Check a job's submission: the order of its writes, its waits, and that an abort leaves nothing behind."""

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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opsdata import put_job
from shared_fakes import Clock
from waiting import limit, wait_for

from infra.inventory import Inventory, PowerAccess
from jobs import paths
from jobs.background import Background
from jobs.bucket import Bucket, BucketError, Item, RecordStore
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.queue import QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER
from jobs.records import HostConfig, JobRecord, Plan
from jobs.serialization import RecordError
from jobs.states import JobState
from jobs.study import EarlierTrial, Measurement, Parameter, ParameterType, Study, Trial, TrialState
from ops.cluster import host_files, power_on
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.cluster.inventory import ROOT
from ops.cluster.ledger import current_user, newest_job
from ops.cluster.remote import ADVICE, CommandResult
from ops.errors import HostError, OpsError, SeveralHostsError, UsageError, explain
from ops.package import host_stream, package
from ops.package.trainer_config import Data, TrainerConfig
from ops.submit import job_plan, manifest, runner, train
from ops.submit import submit as module
from ops.submit.claim import LeaseLostError, Submitter
from ops.submit.config import JobFlags, build_job
from ops.submit.program import SHIPPED
from ops.submit.submit import Submission, submit

TINY = Path(__file__).resolve().parents[1] / "trainers" / "tiny"


class FakeFleet:
    """Record commands and input of hosts; `answers` returns the result of a command."""

    def __init__(self, inventory: Inventory, answer: Callable[[str, str], CommandResult | None] = lambda *_: None) -> None:
        self.inventory, self.answers = inventory, answer
        self.commands: list[tuple[str, str]] = []
        self.sent: dict[str, bytes] = {}
        self.parts: list[tuple[bytes, ...]] = []
        self._lock = threading.Lock()

    def run(self, name: str, command: str, stdin: bytes | tuple[bytes, ...] | None = None) -> CommandResult:
        with self._lock:
            self.commands.append((name, command))
            if stdin is not None:
                self.parts.append((stdin,) if isinstance(stdin, bytes) else stdin)
                self.sent[name] = b"".join(self.parts[-1])
        return self.answers(name, command) or CommandResult(name, 0, "")

    def check_output(
        self, name: str, command: str, what: str, stdin: bytes | tuple[bytes, ...] | None = None, sent: Any = None
    ) -> str:
        result = self.run(name, command, stdin)
        if sent:
            sent(len(self.sent.get(name, b"")))
        if result.exit_code:
            raise HostError(name, what, result.exit_code, result.output)
        return result.output

    def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
        return fan_out(names, work, seconds, done)

    def connect_each(self, names: Any, done: Any = None) -> Outcome[Any]:
        return self.each(names, lambda name: self.run(name, "connect"), 30, done)

    def any_connection(self) -> None:
        raise AssertionError("the bucket is a directory")

    connection = any_connection


class WatchedStore:
    """Call `on_write` before each write, which may fail."""

    def __init__(self, store: RecordStore, on_write: Callable[[str, bytes], None]) -> None:
        self._store, self._on_write = store, on_write

    def read(self, name: str) -> Item | None:
        return self._store.read(name)

    def create(self, name: str, content: bytes) -> str:
        self._on_write(name, content)
        return self._store.create(name, content)

    def replace(self, name: str, content: bytes, version: str) -> str:
        self._on_write(name, content)
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
def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases continuously."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.01)


def make_cluster(fleet: FakeFleet, ledger: Ledger | None = None) -> ClusterClient:
    return ClusterClient(fleet.inventory, fleet, ledger=ledger)  # type: ignore[arg-type]


def stored_job(ledger: Ledger, job_id: str = "job01") -> JobRecord:
    stored = ledger.job(job_id)
    assert stored is not None
    return stored.record


def state_and_error(ledger: Ledger) -> tuple[str, str]:
    return stored_job(ledger).state, stored_job(ledger).errorMessage


def unpack(stream: bytes) -> dict[str, bytes]:
    """Return the files in a host's stream."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(stream))) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}  # type: ignore[union-attr]


def read_content(bucket: Bucket, name: str) -> bytes:
    item = bucket.read(name)
    assert item is not None
    return item.content


def with_id(submission: Submission, job_id: str, priority: int = 0) -> Submission:
    return replace(submission, job=replace(submission.job, id=job_id, priority=priority))


def test_every_host_gets_one_command(submission: Submission, ledger: Ledger, bucket: Bucket) -> None:
    fleet = FakeFleet(submission.inventory)
    assert submit(make_cluster(fleet, ledger), submission, may_wait=True) == []
    _, version = host_stream.code(ROOT)
    assert sorted(fleet.commands) == sorted(
        (name, host_stream.install_command(version, "job01")) for name in submission.inventory.names
    )
    record = stored_job(ledger)
    assert (record.state, record.errorMessage) == (JobState.PREPARING, "")
    assert record.lease.free, "the replicas own the job now"
    assert record.hosts[0] == "master-0"
    assert read_content(bucket, "jobs/job01/package.tar.gz") == submission.package.archive
    assert b'"module": "tiny.task"' in read_content(bucket, "jobs/job01/manifest.json")
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan == job_plan.plan(submission.inventory, submission.job, hashlib.sha256(submission.package.archive).hexdigest())
    assert newest_job(ledger) == "job01"
    for name in submission.inventory.names:
        files = unpack(fleet.sent[name])
        assert HostConfig.from_json(files["etc/scaletier/host.json"]).name == name
        assert files["opt/scaletier/.new/package.sha256"].decode() == plan.packageSha256
        assert files["opt/scaletier/.new/hosts/VERSION"].decode() == version
    with_package = [parts for parts in fleet.parts if len(parts) > 1]
    assert len(with_package) == len(submission.inventory.names)
    assert len({id(shared) for shared, _ in with_package}) == 1, "the package is in memory once for all hosts"


def test_the_first_record_has_all_of_the_job(submission: Submission, inventory: Inventory) -> None:
    priced = replace(submission.inventory, hosts=tuple(replace(host, hourly_cost=0.5) for host in inventory.hosts))
    args, labels = ["--max-steps", "7", "\udcff"], ["owner=ann"]
    flags = JobFlags("job01", more_args=args, labels=labels, notify="./done.sh x", priority="2", replicas="worker=1")
    job = build_job(flags, priced, "tiny")
    full = replace(submission, inventory=priced, job=job, excluded=frozenset({"worker-0"}))
    record = full.record()
    assert record == JobRecord(
        "job01",
        candidates={"master-0": ["master-0", "worker-1"], "worker-0": ["worker-1"]},
        priority=2,
        hourlyCost=1.0,
        submittedBy=current_user(),
        createTime=record.createTime,
        labels={"owner": "ann"},
        trainingInput={**job.training_input, "args": ["--max-steps", "7", "\ufffd"]},
        steps=7,
        notification=Notification("command ./done.sh …"),
        manifest=manifest.summarize(full.manifest()),
    )
    plain = submission.record()
    assert (plain.steps, plain.notification, plain.hourlyCost) == (None, None, None)
    tuned = replace(full, job=replace(job, study=Study([])))
    assert tuned.record().steps is None
    assert module.replace_invalid_utf8({"a": ["\udcff", 1, {"b": "x"}]}) == {"a": ["\ufffd", 1, {"b": "x"}]}


def test_the_order_of_writes(submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the plan before a host may start, and hand over once all files that replicas fetch are uploaded."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", limit())  # no renewal in between
    events: list[str] = []

    def on_write(name: str, content: bytes) -> None:
        record = JobRecord.from_json(content) if name == paths.job("job01") else None
        free = " free" if record and record.lease.free else ""
        events.append(f"{name} {record.state}{free}" if record else name)

    class SpyBucket(FolderBucket):
        def upload(self, name: str, *args: Any) -> None:
            time.sleep(0.1)  # longer than the push to the hosts
            super().upload(name, *args)
            events.append(name)

        def create(self, name: str, content: bytes) -> str:
            events.append(name)
            return super().create(name, content)

    fleet = FakeFleet(submission.inventory, lambda name, _: events.append(name))
    cluster = make_cluster(fleet, Ledger(WatchedStore(ledger.store, on_write)))
    cluster.bucket = SpyBucket(Path(submission.inventory.operator_bucket))
    submit(cluster, submission, may_wait=True)
    started = sorted(name for name in submission.inventory.names)
    assert events[:4] == [paths.QUEUE, "jobs/job01/job.json QUEUED", "jobs/job01/plan.json", "jobs/job01/job.json PREPARING"]
    assert sorted(events[4:-1]) == sorted([*started, "jobs/job01/manifest.json", "jobs/job01/package.tar.gz"])
    assert events[-1] == "jobs/job01/job.json PREPARING free"


def with_data(submission: Submission, file: Path) -> Submission:
    job = replace(submission.job, declared=TrainerConfig(data=Data(name="digits")))
    return replace(submission, job=job, data={file.name: file})


def test_data_is_uploaded_before_a_host_starts(submission: Submission, ledger: Ledger, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").write_bytes(b"12345")
    submission = with_data(submission, tmp_path / "train.tfrecord")
    sizes: list[int | None] = []
    fleet = FakeFleet(submission.inventory, lambda *_: sizes.append(bucket.sizes("data/digits").get("train.tfrecord")))
    submit(make_cluster(fleet, ledger), submission, may_wait=True)
    assert sizes == [5] * 5


def test_changed_data_of_the_same_size_is_uploaded_again(submission: Submission, bucket: Bucket, tmp_path: Path) -> None:
    file, stored = tmp_path / "train.tfrecord", list[bytes]()
    for content, seconds in ((b"1", 1), (b"2", 2), (b"3", 2)):
        file.write_bytes(content)
        os.utime(file, (seconds, seconds))
        module._upload_data(bucket, with_data(submission, file), Data(name="digits"))
        stored.append(read_content(bucket, "data/digits/train.tfrecord"))
    assert stored == [b"1", b"2", b"2"], "a file of the same size and time is not uploaded"


def test_old_shards_of_the_data_are_deleted(submission: Submission, ledger: Ledger, bucket: Bucket, tmp_path: Path) -> None:
    new = "train-00000-of-00001.tfrecord"
    (tmp_path / new).write_bytes(b"12345")
    kept = {"train-mine.tfrecord": 1, "test-00000-of-00002.tfrecord": 1}
    for name in ("train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord.gz", *kept):
        bucket.upload(f"data/digits/{name}", b"1")
    submit(make_cluster(FakeFleet(submission.inventory), ledger), with_data(submission, tmp_path / new), may_wait=True)
    assert bucket.sizes("data/digits") == {new: 5, **kept}


def test_a_failing_host_fails_the_job(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(name: str, command: str) -> CommandResult | None:
        return CommandResult(name, 2, "noise\nfailed: No space left\n") if name == "worker-1" and "take-in" in command else None

    fleet = FakeFleet(submission.inventory, answer)
    with pytest.raises(
        SeveralHostsError, match=r"worker-1 could not start its replica.*No space left: job job01 is FAILED, nothing runs"
    ):
        submit(make_cluster(fleet, ledger), submission, may_wait=True)
    assert state_and_error(ledger)[0] == JobState.FAILED
    assert "No space left" in state_and_error(ledger)[1]
    assert ledger.queue().entries == []
    assert "job01 is FAILED" not in capsys.readouterr().err, "the error says so"


class InterruptedFleet(FakeFleet):
    """Raise Ctrl-C during the push to the hosts."""

    def each(self, names: Any, work: Any, seconds: float, done: Any = None) -> Outcome[Any]:
        raise KeyboardInterrupt


def test_a_large_package_shows_progress_in_bytes(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(make_cluster(FakeFleet(submission.inventory), ledger), submission, may_wait=True)
    assert re.match(r"job01: starting 5 hosts 5 of 5 \(", capsys.readouterr().err)
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    job = replace(submission.job, id="job02")
    submit(make_cluster(FakeFleet(submission.inventory), ledger), replace(submission, job=job), may_wait=True)
    match = re.match(r"job02: \w+ 5 hosts (\S+ kB) of (\S+ kB) \(", capsys.readouterr().err)
    assert match
    assert match[1] == match[2]


def test_an_interrupt_is_undone(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        submit(make_cluster(InterruptedFleet(submission.inventory), ledger), submission, may_wait=True)
    assert state_and_error(ledger) == ("CANCELLED", "fab train was stopped before the job was handed over")
    assert capsys.readouterr().err == "job01 is CANCELLED, and nothing runs; the next job needs another id\n"
    assert ledger.queue().entries == []


def test_a_failure_in_a_thread_is_undone(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory, lambda name, _: CommandResult(name, 1, "boom"))
    submitted = Background(lambda: submit(make_cluster(fleet, ledger), submission, may_wait=True))
    with pytest.raises(SeveralHostsError, match="could not start its replica, it ended: boom"):
        submitted.join(limit())
    assert state_and_error(ledger)[0] == "FAILED"
    assert ledger.queue().entries == []


def test_a_failed_cleanup_is_noted_once(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(message: str) -> Callable[..., None]:
        def give_up(*_: object) -> None:
            raise BucketError(message)

        return give_up

    class FullFleet(FakeFleet):
        def each(self, *_: Any) -> Any:
            raise BucketError("no space")

    order: list[str] = []
    end, give_up = module._Renewal.end, fail("gone")
    monkeypatch.setattr(module._Renewal, "end", lambda renewal: (order.append("end"), end(renewal)))
    monkeypatch.setattr(Submitter, "give_up", lambda *_: (order.append("give up"), give_up()))
    with pytest.raises(BucketError, match="no space"):
        submit(make_cluster(FullFleet(submission.inventory), ledger), submission, may_wait=True)
    note = "job job01 could not be ended (gone): within two minutes its hosts find out by themselves\n"
    assert capsys.readouterr().err == note
    assert order == ["end", "give up", "end"], "no renewal while it gives up"
    monkeypatch.setattr(Submitter, "give_up", fail("no space"))
    with pytest.raises(BucketError, match="no space"):
        submit(make_cluster(FullFleet(submission.inventory), ledger), with_id(submission, "job02"), may_wait=True)
    assert capsys.readouterr().err == ""


def test_a_job_that_was_handed_over_continues(
    submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    class LostAnswer(FolderBucket):
        def replace(self, name: str, content: bytes, version: str) -> str:
            written = super().replace(name, content, version)
            if name == paths.job("job01") and JobRecord.from_json(content).lease.free:
                raise BucketError("the answer is lost")
            return written

    store = LostAnswer(Path(submission.inventory.operator_bucket))
    with pytest.raises(BucketError, match="the answer is lost"):
        submit(make_cluster(FakeFleet(submission.inventory), Ledger(store)), submission, may_wait=True)
    assert capsys.readouterr().err.endswith("job01 is PREPARING, and it continues: fab cancel job01 ends it\n")
    assert (state_and_error(ledger), [entry.jobId for entry in ledger.queue().entries]) == (("PREPARING", ""), ["job01"])


def test_the_end_of_a_renewal_waits_for_the_last_one() -> None:
    started, proceed, renewals = threading.Event(), threading.Event(), list[str]()

    class Slow:
        def renew(self) -> None:
            started.set()
            assert proceed.wait(limit())
            renewals.append("done")

    renewal = module._Renewal(Slow())  # type: ignore[arg-type]
    renewal.end()
    renewal = module._Renewal(Slow())  # type: ignore[arg-type]
    renewal.begin()
    assert started.wait(limit())
    assert renewal._thread.daemon, "a process that ends does not wait for it"
    threading.Timer(0.02, proceed.set).start()
    renewal.end()
    assert renewals == ["done"]


def test_holders_and_takers_of_hosts_are_described(submission: Submission, ledger: Ledger) -> None:
    entry = QueueEntry("job00", [], submittedBy="ann@x", createTime="2026-01-31T12:00:00Z")
    assert module._describe_holders(make_cluster(FakeFleet(submission.inventory), ledger), [entry]) == (
        "hosts that it needs are job job00's, which is being submitted (started by ann@x at 2026-01-31T12:00:00Z): "
        "follow it with fab logs all --job job00 --follow"
    )
    gone = "the record of job job01 is gone from the bucket: start it again under another id"
    assert str(LeaseLostError("job01", None)) == gone
    ended = JobRecord("job01").ended("why\nmore")
    continued = "job job01 continued without this fab train, and is FAILED: why"
    assert str(LeaseLostError("job01", ended)) == continued


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_claim_is_interrupted_only_by_a_second_interrupt(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    body, claimed = Submitter.claim, list[str]()

    def claim(submitter: Submitter, may_wait: bool) -> list[QueueEntry]:
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        ahead = body(submitter, may_wait)
        claimed.extend(entry.jobId for entry in ledger.queue().entries)
        return ahead

    monkeypatch.setattr(Submitter, "claim", claim)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        submit(make_cluster(FakeFleet(submission.inventory), ledger), submission, may_wait=True)
    assert signal.getsignal(signal.SIGINT) == before
    job = ledger.job("job01")
    assert (claimed, job and job.record.state) == ((["job01"], JobState.CANCELLED) if interrupts == 1 else ([], None))
    assert ledger.queue().entries == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["give_up", "end"])
def test_a_second_interrupt_does_not_stop_the_cleanup(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, when: str, number: signal.Signals
) -> None:
    kind: Any = module._Renewal if when == "end" else Submitter
    body = getattr(kind, when)

    def interrupt_again(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        return body(*args)

    monkeypatch.setattr(kind, when, interrupt_again)
    handlers = {
        signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for signal_number in handlers:
        signal.signal(signal_number, raise_interrupt)  # as ops.cli does
    try:
        if when == "end":  # it is called again after the cleanup
            monkeypatch.setattr(kind, when, lambda *args: (interrupt_again if ledger.queue().entries else body)(*args))
        with pytest.raises(KeyboardInterrupt):
            submit(make_cluster(InterruptedFleet(submission.inventory), ledger), submission, may_wait=True)
        assert {signal.getsignal(signal_number) for signal_number in handlers} == {raise_interrupt}
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    assert state_and_error(ledger)[0] == "CANCELLED"
    assert ledger.queue().entries == []


@pytest.mark.usefixtures("renew_often")
def test_the_lease_is_renewed_during_the_push(submission: Submission, ledger: Ledger) -> None:
    heartbeats: list[int] = []

    def answer(name: str, _: str) -> None:
        if name == "ps-0":
            wait_for(
                lambda: heartbeats.append(stored_job(ledger).lease.heartbeatSeq) or len(set(heartbeats)) > 2,
                "renewals",
                poll=0.01,
            )

    submit(make_cluster(FakeFleet(submission.inventory, answer), ledger), submission, may_wait=True)
    assert len(set(heartbeats)) > 2
    assert state_and_error(ledger)[0] == "PREPARING"
    after = stored_job(ledger).lease
    time.sleep(0.05)
    assert stored_job(ledger).lease == after, "no renewal after the hand-over"


@pytest.mark.usefixtures("renew_often")
@pytest.mark.parametrize("error", [BucketError("away"), SeveralHostsError({}, "away"), RecordError("job.json is no JSON")])
def test_a_bucket_that_fails_for_a_while_does_not_end_a_submission(
    submission: Submission, ledger: Ledger, error: Exception
) -> None:
    failures: list[str] = []

    def on_write(name: str, content: bytes) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the renewal thread is to meet the failures
        if name == paths.job("job01") and len(failures) < 3 and JobRecord.from_json(content).lease.heartbeatSeq > 1:
            failures.append(name)
            raise error

    def answer(*_: object) -> None:
        wait_for(lambda: len(failures) == 3, "failures", poll=0.01)

    cluster = make_cluster(FakeFleet(submission.inventory, answer), Ledger(WatchedStore(ledger.store, on_write)))
    submit(cluster, submission, may_wait=True)
    assert len(failures) == 3
    assert state_and_error(ledger) == ("PREPARING", "")


@pytest.mark.usefixtures("renew_often")
def test_a_job_cancelled_during_its_submission_ends(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewal_ended, run = threading.Event(), module._Renewal._run

    def run_watched(renewal: module._Renewal) -> None:
        run(renewal)
        renewal_ended.set()

    def answer(*_: object) -> None:
        ledger.request_cancel("job01", b"{}")
        assert renewal_ended.wait(limit()), "the renewal did not end"

    monkeypatch.setattr(module._Renewal, "_run", run_watched)
    with pytest.raises(OpsError, match=r"^job job01 was cancelled while it was being submitted$"):
        submit(make_cluster(FakeFleet(submission.inventory, answer), ledger), submission, may_wait=True)
    assert state_and_error(ledger) == ("CANCELLED", "")
    assert ledger.queue().entries == []


@pytest.mark.usefixtures("renew_often")
def test_no_host_is_informed_of_a_job_cancelled_before(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_write(name: str, _: bytes) -> None:
        if name == paths.plan("job01"):
            ledger.request_cancel("job01", b"{}")
            assert renewal_ended.wait(limit()), "the renewal did not end"

    renewal_ended, run = threading.Event(), module._Renewal._run
    monkeypatch.setattr(module._Renewal, "_run", lambda renewal: (run(renewal), renewal_ended.set()))
    fleet = FakeFleet(submission.inventory)
    with pytest.raises(OpsError, match=r"^job job01 was cancelled while it was being submitted$"):
        submit(make_cluster(fleet, Ledger(WatchedStore(ledger.store, on_write))), submission, may_wait=True)
    assert (fleet.commands, state_and_error(ledger)) == ([], ("CANCELLED", ""))


@pytest.mark.parametrize("renewed", [True, False])
def test_a_job_that_another_process_took_over_is_left_alone(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.01 if renewed else limit())

    def answer(name: str, _: str) -> None:
        while name == "ps-0":
            stored = ledger.job("job01")
            assert stored is not None
            try:
                ledger.change_job(stored, stored.record.with_holder("bob@desk").ended(NOT_HANDED_OVER))
            except Exception:  # noqa: BLE001  the lease was renewed in between
                continue
            time.sleep(0.1)
            return

    message = f"^job job01 continued without this fab train, and is FAILED: {NOT_HANDED_OVER}$"
    with pytest.raises(OpsError, match=message):
        submit(make_cluster(FakeFleet(submission.inventory, answer), ledger), submission, may_wait=True)
    assert stored_job(ledger).lease.holder == "bob@desk"
    assert ledger.queue().entries == []


def test_a_failing_bucket_is_one_line(submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    def on_write(name: str, _: bytes) -> None:
        if name != paths.QUEUE and name != paths.job("job01"):
            failed_writes.append(name)
        if failed_writes:
            raise BucketError("gs://b did not answer within 20 s")

    failed_writes: list[str] = []
    fleet = FakeFleet(submission.inventory)
    with pytest.raises(BucketError) as error:
        submit(make_cluster(fleet, Ledger(WatchedStore(ledger.store, on_write))), submission, may_wait=True)
    assert explain(error.value) == ("the bucket fails: gs://b did not answer within 20 s", 1)
    assert capsys.readouterr().err == "", "only the error is printed"
    assert fleet.commands == []


def test_a_package_that_cannot_be_uploaded_ends_the_job(submission: Submission, ledger: Ledger) -> None:
    class FullBucket(FolderBucket):
        def upload(self, *_: Any) -> None:
            raise BucketError("No space left on device")

    cluster = make_cluster(FakeFleet(submission.inventory), ledger)
    cluster.bucket = FullBucket(Path(submission.inventory.operator_bucket))
    message = "the package could not be put into the bucket: No space left on device"
    with pytest.raises(OpsError, match=f"^{message}$"):
        submit(cluster, submission, may_wait=True)
    assert state_and_error(ledger) == ("FAILED", message)
    assert ledger.queue().entries == []


def test_an_id_is_used_once(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(make_cluster(fleet, ledger), submission, may_wait=True)
    before = ledger.job("job01")
    for _ in range(2):  # while it holds its hosts, and afterwards
        with pytest.raises(UsageError, match="job id 'job01' was used before, and an id is used once"):
            submit(make_cluster(fleet, ledger), submission, may_wait=True)
        assert ledger.job("job01") == before
        ledger.change_queue(lambda queue: replace(queue, entries=[]))


def test_jobs_wait_on_a_busy_cluster_by_priority(
    submission: Submission, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet(submission.inventory, ready_answer(10**10))
    cluster = make_cluster(fleet, ledger)
    submit(cluster, submission, may_wait=True)
    fleet.sent.clear()
    assert [e.jobId for e in submit(cluster, with_id(submission, "job02"), may_wait=True)] == ["job01"]
    assert [e.jobId for e in submit(cluster, with_id(submission, "job03", 5), may_wait=True)] == ["job01"]
    assert [e.jobId for e in ledger.queue().ahead_of("job02")] == ["job01", "job03"]
    files = unpack(fleet.sent["ps-0"])
    assert {"etc/scaletier/host.json", "opt/scaletier/.new/hosts/VERSION"} <= files.keys()
    assert not [name for name in files if "/jobs/job" in name], "hosts fetch the package when its turn comes"
    queued_job = stored_job(ledger, "job02")
    assert (queued_job.state, queued_job.lease.free) == (JobState.QUEUED, True), "the queue monitor starts it"
    capsys.readouterr()
    assert runner.run(cluster, with_id(submission, "job04"), may_wait=True, follow=False) == 0
    message = "job04 is QUEUED behind job01, job03, job02: fab logs all --job job04 --follow, fab describe job04\n"
    assert capsys.readouterr().out == message
    ledger.change_queue(lambda queue: queue.without(queue.entries[0]))
    assert [entry.jobId for entry in ledger.queue().entries if entry.has_hosts] == ["job03"]


def test_max_wait_time_is_in_the_queue_entry(submission: Submission, ledger: Ledger) -> None:
    with_limit = replace(submission, job=replace(submission.job, policy={**submission.job.policy, "maxWaitTime": 60.0}))
    submit(make_cluster(FakeFleet(submission.inventory), ledger), with_limit, may_wait=True)
    assert ledger.queue().entries[0].maxWaitTime == 60.0


@pytest.mark.parametrize(
    ("others", "rest"), [(("job03",), "job03 has or wants some"), (("job03", "job04"), "job03, job04 have or want some")]
)
def test_no_queue_names_all_jobs_ahead(submission: Submission, ledger: Ledger, others: tuple[str, ...], rest: str) -> None:
    cluster = make_cluster(FakeFleet(submission.inventory), ledger)
    for job_id in ("job01", *others):
        submit(cluster, with_id(submission, job_id), may_wait=True)
    with pytest.raises(UsageError, match=rf"are job job01's, which is .*\); {rest}, too: follow it with fab logs"):
        submit(cluster, with_id(submission, "job02"), may_wait=False)


def test_no_queue_changes_nothing_on_a_busy_cluster(submission: Submission, ledger: Ledger) -> None:
    fleet = FakeFleet(submission.inventory)
    submit(make_cluster(fleet, ledger), submission, may_wait=True)
    fleet.commands.clear()
    before = ledger.store.scan("*/*.json"), ledger.store.scan("jobs/*/*.json")
    message = (
        r"^hosts that it needs are job job01's, which is PREPARING \(started by \S+@\S+ at \S+\): "
        r"follow it with fab logs all --job job01 --follow; without --no-queue the job waits for its turn$"
    )
    with pytest.raises(UsageError, match=message):
        submit(make_cluster(fleet, ledger), with_id(submission, "job02"), may_wait=False)
    assert fleet.commands == []
    assert (ledger.store.scan("*/*.json"), ledger.store.scan("jobs/*/*.json")) == before


def leave_claim(ledger: Ledger, submission: Submission, job_id: str, with_record: bool = True) -> Submitter:
    """Write the leftovers of a fab train that was killed after its claim, or during it."""
    record = replace(submission.record(), jobId=job_id)
    submitter = Submitter(ledger, record, "ann@laptop/1")
    if with_record:
        submitter.claim(may_wait=False)
    else:
        ledger.change_queue(
            lambda queue: queue.added(
                QueueEntry(job_id, [], candidates=record.candidates, submission_id="ann@laptop/1", createTime=record.createTime)
            )
        )
    return submitter


@pytest.mark.parametrize("with_record", [True, False])
def test_leftovers_of_a_killed_fab_train_are_cleared(
    submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, with_record: bool
) -> None:
    leave_claim(ledger, submission, "job00", with_record)
    clock = Clock(100.0)
    monkeypatch.setattr(module, "time", clock)
    assert submit(make_cluster(FakeFleet(submission.inventory), ledger), submission, may_wait=False) == []
    assert 30 <= clock.now - 100 < 35
    assert (stored_job(ledger, "job00").state, stored_job(ledger, "job00").errorMessage) == ("FAILED", NOT_HANDED_OVER)
    assert [entry.jobId for entry in ledger.queue().entries] == ["job01"]


def test_a_live_fab_train_keeps_its_hosts(submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    other = leave_claim(ledger, submission, "job00")
    clock = Clock(100.0, lambda: other.renew() if clock.now >= 103 else None)
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(UsageError, match=r"^hosts that it needs are job job00's, which is QUEUED"):
        submit(make_cluster(FakeFleet(submission.inventory), ledger), submission, may_wait=False)
    assert clock.now == 103
    assert ledger.job("job01") is None
    assert [entry.jobId for entry in ledger.queue().entries] == ["job00"]


def ready_answer(free_bytes: int, missing: str = "") -> Callable[[str, str], CommandResult | None]:
    return lambda name, command: (
        CommandResult(name, 0, f"ready\n{free_bytes}\n{free_bytes}\n{missing}\n") if "; df " in command else None
    )


def test_a_preparing_host_is_waited_for(submission: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_POLL_SECONDS", 0.0)
    checks_of: list[str] = []

    def answer(name: str, command: str) -> CommandResult | None:
        if "; df " not in command:
            return None
        checks_of.append(name)
        still_preparing = name == "worker-0" and checks_of.count(name) < 3
        return CommandResult(name, 0, "preparing: runtime\n") if still_preparing else ready_answer(10**10)(name, command)

    train.check_hosts(make_cluster(FakeFleet(submission.inventory, answer)), submission)
    assert checks_of.count("worker-0") == 3
    assert {checks_of.count(name) for name in submission.inventory.names if name != "worker-0"} == {1}


@pytest.mark.parametrize(
    ("host_state", "message"),
    [
        ("failed: image: it has no curl", "worker-0 could not be set up: image: it has no curl"),
        ("older than this scaletier", "worker-0 is older than this scaletier: run pulumi up"),
        ("preparing: runtime", "worker-0 is not ready after 0 s: preparing: runtime"),
    ],
)
def test_an_unusable_host_is_named(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, host_state: str, message: str
) -> None:
    monkeypatch.setattr(train, "_READY_SECONDS", 0.0)

    def answer(name: str, command: str) -> CommandResult | None:
        is_checked = name == "worker-0" and "; df " in command
        return CommandResult(name, 0, f"{host_state}\n") if is_checked else ready_answer(10**10)(name, command)

    with pytest.raises(SeveralHostsError, match=message):
        train.check_hosts(make_cluster(FakeFleet(submission.inventory, answer)), submission)


def test_hosts_are_checked_before_any_change(submission: Submission, ledger: Ledger, bucket: Bucket) -> None:
    fleet = FakeFleet(submission.inventory, ready_answer(10**10))
    train.check_hosts(make_cluster(fleet), submission)
    _, version = host_stream.code(ROOT)
    for host, files in host_files.render(submission.inventory).items():
        wakes = f"root-helper wake {host_stream.wake_digest(version, files)} "
        assert sum(wakes in command for name, command in fleet.commands if name == host) == (host in submission.subset.names)
    assert bucket.walk("") == {}
    needed = 100_000_000 + 5 * len(submission.package.archive)
    train._check_host("ps-0", {"/bucket": needed}, [], submission)
    with pytest.raises(
        UsageError, match=r"^ps-0 has only 100\.0 MB free in /bucket, .*: make room \(fab shell ps-0\), or give"
    ):
        train._check_host("ps-0", {"/": 10**12, "/bucket": needed - 1}, [], submission)
    with pytest.raises(UsageError, match=r"ps-0 has only 50.0 MB free in /var/lib/scaletier, a job needs 100"):
        train.check_hosts(make_cluster(FakeFleet(submission.inventory, ready_answer(50_000_000))), submission)
    with_import = replace(submission, package=replace(submission.package, imports={"pandas": "tiny/task.py:3"}))
    with pytest.raises(UsageError, match=r"tiny/task.py:3 imports pandas, which neither the package tiny nor the hosts have"):
        train.check_hosts(make_cluster(FakeFleet(submission.inventory, ready_answer(10**10, "pandas"))), with_import)
    fleet.commands.clear()
    train.check_hosts(make_cluster(fleet), with_import)
    asked = [name for name, command in fleet.commands if "pandas" in command]
    assert asked == ["ps-0"], "one host imports the modules"
    put_job(ledger, submission.record())
    with pytest.raises(UsageError, match="job id 'job01' was used before"):
        train.check_hosts(make_cluster(fleet), submission)


def master_only(submission: Submission) -> Submission:
    """Return a job of one replica, for which the master's or a worker's host is a candidate."""
    return replace(submission, job=build_job(JobFlags("job01", scale_tier="BASIC"), submission.inventory, "tiny"))


def test_a_part_of_the_cluster_uses_no_other_host(submission: Submission, ledger: Ledger) -> None:
    fleet, part = FakeFleet(submission.inventory), master_only(submission)
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job00", ["master-0"])))
    assert submit(make_cluster(fleet, ledger), part, may_wait=False) == []
    assert list(fleet.sent) == ["worker-0"]
    assert (stored_job(ledger).state, stored_job(ledger).placement) == ("PREPARING", {"master-0": "worker-0"})
    assert stored_job(ledger).manifest["cluster"]["replicas"] == {"master": 1}
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan.replicas == ["master-0"]
    config = json.loads(plan.with_hosts(stored_job(ledger).placement).tasks["master-0"].tfConfig)
    assert config["cluster"] == {"chief": ["10.0.0.64:2222"]}


def test_a_queued_part_is_pushed_to_all_candidates(submission: Submission, ledger: Ledger) -> None:
    fleet, part = FakeFleet(submission.inventory), master_only(submission)
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job00", ["master-0", "worker-0", "worker-1"])))
    assert [entry.jobId for entry in submit(make_cluster(fleet, ledger), part, may_wait=True)] == ["job00"]
    assert sorted(fleet.sent) == ["master-0", "worker-0", "worker-1"]
    assert (stored_job(ledger).state, stored_job(ledger).placement) == ("QUEUED", {})


def test_an_unreachable_candidate_is_replaced_by_another(submission: Submission, capsys: pytest.CaptureFixture[str]) -> None:
    def answer_without(*unreachable: str) -> Any:
        ready = ready_answer(10**10)

        def answer(name: str, command: str) -> CommandResult | None:
            if name in unreachable:
                raise HostError(name, "does not answer")
            return None if command == "connect" else ready(name, command)

        return answer

    part = master_only(submission)
    checked_submission = train.check_hosts(
        make_cluster(FakeFleet(submission.inventory, answer_without("master-0", "ps-0"))), part
    )
    assert checked_submission.candidates == {"master-0": ["worker-0", "worker-1"]}
    assert checked_submission.record().candidates == checked_submission.candidates
    assert "master-0 does not answer: the job does not use this host" in capsys.readouterr().err
    unreachable = answer_without("master-0", "worker-0", "worker-1")
    with pytest.raises(SeveralHostsError, match=r"master-0 does not answer.*run pulumi up, which brings back what is missing"):
        train.check_hosts(make_cluster(FakeFleet(submission.inventory, unreachable)), part)
    with pytest.raises(SeveralHostsError, match="ps-0 does not answer"):
        train.check_hosts(make_cluster(FakeFleet(submission.inventory, answer_without("ps-0"))), submission)


def test_stopped_hosts_are_started_on_request(submission: Submission, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_hosts, started = {"ps-0", "worker-1"}, []
    ready = ready_answer(10**10)

    def answer(name: str, command: str) -> CommandResult | None:
        if name in stopped_hosts:
            raise HostError(name, "does not answer")
        return None if command == "connect" else ready(name, command)

    def start(name: str) -> str:
        started.append(name)
        stopped_hosts.remove(name)
        return ""

    hosts = tuple(replace(host, start=f"{host.name}/start") for host in submission.inventory.hosts)
    inventory = replace(
        submission.inventory,
        hosts=hosts,
        power=PowerAccess(url="http://x/", operator_url="http://y/", token="http://t", token_command="true", preempted=""),
    )
    startable = replace(submission, inventory=inventory)
    with pytest.raises(
        SeveralHostsError,
        match=r"ps-0 does not answer; .*: fab train --start-hosts \(or startHosts: true in config.yaml\) starts those that",
    ):
        train.check_hosts(make_cluster(FakeFleet(inventory, answer), ledger), startable)
    monkeypatch.setattr(power_on, "_build_start_request", lambda _: start)
    with_start = replace(startable, job=replace(submission.job, start_hosts=True))
    assert train.check_hosts(make_cluster(FakeFleet(inventory, answer), ledger), with_start).excluded == frozenset()
    assert sorted(started) == ["ps-0", "worker-1"]
    stopped_hosts.update(("ps-0", "worker-1", "evaluator-0"))
    only_two = tuple(replace(host, start="" if host.name == "evaluator-0" else host.start) for host in hosts)
    partly = replace(inventory, hosts=only_two)
    monkeypatch.setattr(train, "start_and_wait", lambda _, names: {name: HostError(name, "is slow") for name in names[1:]})
    with pytest.raises(SeveralHostsError) as error:
        train.check_hosts(make_cluster(FakeFleet(partly, answer), ledger), replace(with_start, inventory=partly))
    assert {name: str(reason) for name, reason in error.value.failures.items()} == {
        "worker-1": "worker-1 is slow",
        "evaluator-0": "evaluator-0 does not answer",
    }
    assert error.value.advice == ADVICE
    monkeypatch.setattr(train, "start_and_wait", power_on.start_and_wait)
    stopped_hosts.clear()
    stopped_hosts.add("ps-0")
    put_job(ledger, JobRecord(with_start.job.id))
    with pytest.raises(UsageError, match="was used before"):
        train.check_hosts(make_cluster(FakeFleet(inventory, answer), ledger), with_start)
    assert len(started) == 2, "no host is started for an invalid job"


def test_two_running_jobs_cannot_share_an_output(submission: Submission, ledger: Ledger) -> None:
    def job(job_id: str, job_dir: str, **flags: str) -> Submission:
        job_flags = JobFlags(job_id, job_dir=job_dir, **flags)  # type: ignore[arg-type]
        return replace(submission, job=build_job(job_flags, submission.inventory, "tiny"))

    fleet = FakeFleet(submission.inventory, ready_answer(10**10))
    first = job("job00", "/bucket/old/output", scale_tier="BASIC")
    submit(make_cluster(FakeFleet(submission.inventory), ledger), first, may_wait=False)
    for folder in ("/bucket/old/output/", "/bucket/old/output/more", "/bucket/old"):
        with pytest.raises(UsageError, match="job job00, which is PREPARING, writes to /bucket/old/output, and this job would"):
            train.check_hosts(make_cluster(fleet, ledger), job("job01", folder, scale_tier="BASIC"))
    train.check_hosts(make_cluster(fleet, ledger), job("job01", "/bucket/old2/output", scale_tier="BASIC"))
    # A job that needs the same host runs after it, and may continue in its output.
    train.check_hosts(make_cluster(fleet, ledger), job("job01", "/bucket/old/output"))


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ("/b/x", "/b/x/", True),
        ("/b/x", "/b/x/y", True),
        ("/b/x/y", "/b//x", True),
        ("/b/x", "/b/xy", False),
        ("/b/x", "/b/y", False),
        ("", "", False),
        (".", "", False),
        ("", ".", False),
    ],
)
def test_folders_overlap_if_one_is_in_the_other(one: str, other: str, overlaps: bool) -> None:
    assert train.overlap(one, other) is overlaps


def test_trials_need_an_empty_output(submission: Submission, ledger: Ledger, bucket: Bucket) -> None:
    submission = replace(submission, job=build_job(JobFlags("job01", job_dir="/bucket/mine"), submission.inventory, "tiny"))
    tuned = replace(submission, job=replace(submission.job, study=Study([])))
    cluster = make_cluster(FakeFleet(submission.inventory, ready_answer(10**10)), ledger)
    train.check_hosts(cluster, tuned)
    bucket.upload("mine/1/model", b"1")
    train.check_hosts(cluster, submission)
    message = "--job-dir /bucket/mine is not empty, and trials must find nothing of others: give another"
    with pytest.raises(UsageError, match=f"^{message}$"):
        train.check_hosts(cluster, tuned)


def test_a_tuning_job_resumes_from_another_ones_trials(submission: Submission, ledger: Ledger) -> None:
    cluster = make_cluster(FakeFleet(submission.inventory), ledger)
    parameter = Parameter("x", ParameterType.INTEGER, 1, 9)
    for study in (None, Study([parameter])):
        same = replace(submission, job=replace(submission.job, study=study))
        assert train.add_earlier_trials(cluster, same) is same
    put_job(ledger, JobRecord("old").ended("why"))
    resuming = Study([parameter], resumePreviousJobId="old", maxTrials=3)
    tuned = replace(submission, job=replace(submission.job, study=resuming))
    with pytest.raises(UsageError, match="resumePreviousJobId old tuned no hyperparameters"):
        train.add_earlier_trials(cluster, tuned)
    ledger.create_plan(Plan("old", ["master-0"], "m", [], {}, study=Study([parameter])))
    trial = Trial(1, {"x": "3"}, "master-0", state=TrialState.SUCCEEDED, finalMetric=Measurement(5, 0.5))
    ledger.create_trial("old", trial)
    resumed = train.add_earlier_trials(cluster, tuned)
    assert resumed == replace(tuned, job=replace(tuned.job, study=replace(resuming, earlier=[EarlierTrial({"x": "3"}, 0.5)])))


def test_a_started_job_is_noted_or_followed(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = replace(submission, job=replace(submission.job, notes=("region is ignored", "more")))
    followed: list[tuple[str, bool]] = []
    monkeypatch.setattr(train, "check_hosts", lambda _, submission: submission)
    monkeypatch.setattr(module, "submit", lambda *_: [])
    monkeypatch.setattr(runner, "watch", lambda _, job, plain: followed.append((job.jobId, plain)) or 7)
    cluster: Any = SimpleNamespace(inventory=submission.inventory)
    assert runner.run(cluster, noted, may_wait=True, follow=False) == 0
    line = "job01 is started: fab logs all --job job01 --follow, fab describe job01\n"
    assert capsys.readouterr() == (line, "region is ignored\nmore\n")
    assert runner.run(cluster, submission, may_wait=True, follow=True) == 7
    assert runner.run(cluster, submission, may_wait=True, follow=True, plain=False) == 7
    assert followed == [("job01", True), ("job01", False)]


def test_the_shipped_trainer_needs_data(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ROOT", tmp_path)
    (tmp_path / ".cache/mnist").mkdir(parents=True)
    inventory = replace(inventory, operator_bucket=str(tmp_path))
    fleet = FakeFleet(inventory, ready_answer(10**10))
    with pytest.raises(UsageError, match="there is no mnist to train on: run make data"):
        train.check_hosts(make_cluster(fleet), train.prepare(inventory, JobFlags("job01"), str(SHIPPED)))
    prepared = train.prepare(inventory, JobFlags("job01", args="--train-data=x --eval-data=y"), str(SHIPPED))
    assert prepared.data == {}
    train.check_hosts(make_cluster(fleet), prepared)
    (tmp_path / ".cache/mnist/train-0.tfrecord").write_bytes(b"")
    assert list(train.prepare(inventory, JobFlags("job01"), None).data) == ["train-0.tfrecord"]


def test_arguments_that_are_no_utf_8_are_sent_unchanged(submission: Submission, ledger: Ledger) -> None:
    job = build_job(JobFlags("job01", more_args=["\udcff"]), submission.inventory, "tiny")
    submit(make_cluster(FakeFleet(submission.inventory), ledger), replace(submission, job=job), may_wait=True)
    assert stored_job(ledger).trainingInput["args"] == ["\ufffd"]
    plan = ledger.plan("job01")
    assert plan is not None
    assert plan.args == ["\udcff"]


@pytest.mark.parametrize("final_state", ["SUCCEEDED", "FAILED", "CANCELLED"])
def test_the_exit_code_of_a_followed_job(
    submission: Submission,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    final_state: str,
) -> None:
    from ops.screen import logs

    final_record = JobRecord("job01", JobState(final_state), errorMessage="worker-1 ran out of memory.\nmore")
    plain_lines: list[bool] = []
    monkeypatch.setattr(logs, "follow_job", lambda *args: plain_lines.append(args[-1]) or final_record)
    monkeypatch.setattr(runner.outcome, "describe_output", lambda *_: ["what is there", "what is beside it"])
    monkeypatch.setattr(runner.outcome, "describe_unsaved_of", lambda *_: ["what is beside it"])
    cluster: Any = SimpleNamespace(inventory=submission.inventory)
    assert runner.watch(cluster, submission.record()) == (0 if final_state == "SUCCEEDED" else 1)
    assert plain_lines == [True]
    first, following = capsys.readouterr().err.split("\n", 1)
    first_line = f"{first}\n"
    assert following == "what is beside it\n"
    if final_state == "SUCCEEDED":
        assert first_line == "job01 SUCCEEDED: what is there\n"
    else:
        hint = "; fab bundle job01 collects the evidence in one file" if final_state == "FAILED" else ""
        assert first_line == f"error: job01 {final_state}: worker-1 ran out of memory (fab describe job01{hint})\n"
    monkeypatch.setattr(runner.outcome, "describe_output", lambda *_: [])
    timed = {"startTime": "2026-01-31T12:00:00.000Z", "endTime": "2026-01-31T12:00:02.500Z"}
    runner._report_end(cluster, replace(final_record, errorMessage="", **timed))  # type: ignore[arg-type]
    err = capsys.readouterr().err.splitlines()[0]
    assert err.removeprefix("error: ").partition(" (")[0] == f"job01 {final_state} after 2.5 s"
    monkeypatch.setattr(logs, "follow_job", lambda *_: None)
    with pytest.raises(OpsError, match=r"^job job01 has no record any more: fab jobs lists the others$"):
        runner.watch(cluster, submission.record())


def test_ctrl_c_leaves_the_job_running(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ops.screen import logs

    def follow(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "follow_plain", follow)
    cluster: Any = SimpleNamespace(inventory=submission.inventory)
    assert runner.watch(cluster, submission.record()) == 130
    hint = "fab logs all --job job01 --follow comes back to it, fab cancel job01 stops it"
    assert capsys.readouterr().err == f"\njob01 continues, or waits for its turn: {hint}\n"


@pytest.mark.parametrize("plain", [True, False])
def test_ctrl_c_reports_the_state_of_the_job(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plain: bool
) -> None:
    from ops.logs.follow import Follower
    from ops.screen import job, logs

    running = replace(submission.record(), state=JobState.RUNNING)

    def events(_: Follower) -> Iterator[Any]:
        yield running if not plain else [running]
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "batches" if plain else "events", events)
    monkeypatch.setattr(logs.terminal, "supports_screen", lambda: True)
    monkeypatch.setattr(logs, "_writer", lambda *_, **__: print)
    monkeypatch.setattr(job, "Screen", lambda: nullcontext(SimpleNamespace(lines=9, show=print)))
    cluster: Any = SimpleNamespace(inventory=submission.inventory, fleet=None, ledger=None, bucket=None)
    assert runner.watch(cluster, submission.record(), plain) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("job01 is still RUNNING: fab logs all --job job01 --follow ")
