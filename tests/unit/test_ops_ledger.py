"""Check the bucket's large objects, and fab's records of jobs: each error is one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from opsdata import put_job

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.cluster.bucket import SshChannel, read_whole, upload_changed
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, find_job, newest_job, replicas_of
from ops.errors import OpsError, UsageError, explain


class Session:
    """A session of ssh that returns these pieces, and records all calls."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.calls = list(pieces), list[tuple[object, ...]]()
        self.stderr: bytes | Exception = b""

    def create_session(self) -> Session:
        return self

    def exec_command(self, command: str) -> None:
        self.calls.append(("exec", command))

    def settimeout(self, seconds: float) -> None:
        self.calls.append(("timeout", seconds))

    def sendall(self, data: bytes) -> None:
        self.calls.append(("send", data))

    def recv(self, size: int) -> bytes:
        self.calls.append(("recv", size))
        return self.pieces.pop(0) if self.pieces else b""

    def recv_stderr(self, size: int) -> bytes:
        self.calls.append(("recv_stderr", size))
        if isinstance(self.stderr, Exception):
            raise self.stderr
        return self.stderr

    def close(self) -> None:
        self.calls.append(("close",))

    def calls_of(self, work: Callable[[], object]) -> list[tuple[object, ...]]:
        """Return the calls that this makes."""
        self.calls.clear()
        work()
        return list(self.calls)


def test_a_channel_sends_bursts_and_reads_lines_and_bytes() -> None:
    session = Session(b"one", b"\ntwo\nrest", b"more")
    channel = SshChannel(session, "serve it")
    assert session.calls == [("exec", "serve it")]
    data = bytes(range(250)) * 2400
    assert session.calls_of(lambda: channel.send(data)) == [
        ("timeout", 60.0),
        *(("send", data[start : start + 262_144]) for start in (0, 262_144, 524_288)),
    ]
    session.calls.clear()
    assert channel.read_line(5) == b"one"
    assert [size for what, size in session.calls if what == "recv"] == [262_144] * 2
    assert all(0 < seconds <= 5 for what, seconds in session.calls if what == "timeout")  # type: ignore[operator]
    session.calls.clear()
    assert (channel.read_line(5), channel.read(3, 7), channel.read(9, 7)) == (b"two", b"res", b"t")
    assert session.calls == [], "a line and bytes that have come are not waited for"
    assert channel.read(9, 7) == b"more"
    assert session.calls == [("timeout", 7), ("recv", 9)]
    assert session.calls_of(channel.close) == [("close",)]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (b"", "the host ended it"),
        (b"Traceback\nMemoryError: no room\n", "the host ended it: MemoryError: no room"),
        (TimeoutError(), "the host ended it"),
    ],
)
def test_the_end_of_a_channel_has_its_last_words(stderr: bytes | Exception, message: str) -> None:
    session = Session()
    channel = SshChannel(session, "serve")
    session.stderr = stderr
    session.calls.clear()
    with pytest.raises(EOFError) as error:
        channel.read(9, 7)
    assert str(error.value) == message
    assert session.calls == [("timeout", 7), ("recv", 9), ("timeout", 1.0), ("recv_stderr", 262_144)]


def test_an_ended_host_command_gives_its_reason(inventory: Inventory) -> None:
    session = Session()
    session.stderr = b"Traceback\nMemoryError: no room\n"
    fleet: Any = SimpleNamespace(any_connection=lambda: session)
    ledger = ClusterClient(replace(inventory, operator_bucket="sftp:///bucket"), fleet).ledger
    with pytest.raises(BucketError, match="broke off: the host ended it: MemoryError: no room"):
        ledger.job("job01")


@pytest.mark.parametrize(
    ("error", "message"), [(paramiko.SSHException("gone"), "gone"), (paramiko.SSHException(), "SSHException")]
)
def test_an_error_of_ssh_is_one_of_the_system(error: Exception, message: str) -> None:
    class Refusing(Session):
        def exec_command(self, command: str) -> None:
            raise error

    with pytest.raises(OSError, match=f"^{message}$"):
        SshChannel(Refusing(), "serve")


def test_missing_files_are_uploaded_with_their_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: 100.0))
    files = {name: tmp_path / f"{name}.txt" for name in ("a", "b", "")}
    for number, path in enumerate(files.values()):
        path.write_bytes(b"x" * (number + 1))
    (tmp_path / "bucket").mkdir()
    bucket = FolderBucket(tmp_path / "bucket")
    two = {"a": files["a"], "b": files["b"]}
    assert upload_changed(bucket, "data/x", {"a": files["a"]}, {}, "one") == ["a"]
    assert upload_changed(bucket, "data/x", two, {"a": 1}, "two") == ["b"], "absent ones"
    assert bucket.walk("data") == {"x/a": 1, "x/b": 2}
    assert capsys.readouterr().err.splitlines()[-1] == "uploading two 2 B of 2 B (0.0 s)"
    assert upload_changed(bucket, "data/x", two, {"a": 1, "b": 1}, "two") == ["b"], "partial ones"
    capsys.readouterr()
    assert upload_changed(bucket, "data/x", two, {"a": 1, "b": 2}, "none") == []
    assert capsys.readouterr().err == ""
    assert upload_changed(bucket, "data/y", {"": files[""]}, {}, "one") == [""]
    assert read_whole(bucket, "data/y") == b"xxx"
    assert read_whole(bucket, "data/z") is None


def test_an_unknown_bucket_url_is_one_line(inventory: Inventory, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is no bucket") as error:
        _ = ClusterClient(replace(inventory, operator_bucket="nope://b"), object()).ledger  # type: ignore[arg-type]
    message = "the bucket fails: 'nope://b' is no bucket: valid are a folder, file:///folder, and gs://bucket"
    assert explain(error.value) == (message, 1)
    ledger = ClusterClient(replace(inventory, operator_bucket=f"{tmp_path}/gone"), object()).ledger  # type: ignore[arg-type]
    with pytest.raises(OSError, match="is not there") as error:
        existing_job(ledger, "job01")
    assert explain(error.value) == (f"the bucket fails: {tmp_path}/gone is not there", 1)
    full = "the bucket fails: /bucket: Disk quota exceeded"  # as a host answers
    remedy = "fab doctor names the full disk or bucket, and the jobs that use most of the bucket"
    assert explain(BucketError("/bucket: Disk quota exceeded")) == (f"{full}: {remedy}", 1)


def test_an_unknown_job_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="no job 'job01'; none was started yet"):
        existing_job(ledger, "job01")
    assert newest_job(ledger) is None
    for n in range(7):
        put_job(ledger, JobRecord(f"job0{n}", createTime=f"2026-01-31T12:00:0{n}.000Z"))
    assert existing_job(ledger, "job03").jobId == "job03"
    assert newest_job(ledger) == "job06", "the last created of jobs that never started"
    with pytest.raises(UsageError, match=r"fab jobs lists job06, job05, job04, job03, job02 and 2 more"):
        existing_job(ledger, "nope")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "job.json is no JSON: Expecting property name"),
        (b"[]", r"job.json must be a JSON object, not \[\]"),
        (b'{"jobId": "job01", "state": "DANCING"}', "job.json.state is 'DANCING'; valid are QUEUED, PREPARING"),
        (
            b'{"schema": 9, "jobId": "job01", "steps": []}',
            r"job.json was written by a newer scaletier \(schema 9, this one reads 4\): bring this one up to date$",
        ),
    ],
)
def test_an_unreadable_record_is_one_line(ledger: Ledger, content: bytes, message: str) -> None:
    ledger.store.create(paths.job("job01"), content)
    for read in (find_job, existing_job):
        with pytest.raises(OpsError, match=f"^the record of job job01 cannot be read: {message}") as error:
            read(ledger, "job01")
        line, code = explain(error.value)
        assert (code, "\n" in line) == (1, False)
    assert find_job(ledger, "job02") is None


def test_a_name_outside_the_jobs_is_no_job(ledger: Ledger) -> None:
    ledger.store.create("data/job.json", JobRecord("data").to_json())
    assert find_job(ledger, "../data") is None


def test_the_newest_job_is_the_last_that_started_or_holds_hosts(ledger: Ledger) -> None:
    for n, started in enumerate(("2026-01-31T12:00:00Z", "2026-01-31T12:00:05Z", None)):
        put_job(ledger, JobRecord(f"job0{n}", createTime=f"2026-01-31T12:00:0{n}.000Z", startTime=started))
    assert newest_job(ledger) == "job01", "a job that never started has no log"
    host = ["master-0"]
    ledger.change_queue(lambda _: Queue([QueueEntry("job00", host, has_hosts=True), QueueEntry("job02", host)]))
    assert newest_job(ledger) == "job00"


def test_other_jobs_with_hosts_are_noted(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    host = ["master-0"]
    for count in (1, 2, 3):
        entry = QueueEntry(f"job0{count}", host, has_hosts=True)
        put_job(ledger, JobRecord(entry.jobId))
        ledger.change_queue(lambda queue, entry=entry: queue.added(entry))  # type: ignore[misc]
        assert newest_job(ledger) == existing_job(ledger, None).jobId == entry.jobId
    assert capsys.readouterr().err == (
        "this is of job job02, the newest that has hosts; job01 has hosts, too: name one\n"
        "this is of job job03, the newest that has hosts; job01, job02 have hosts, too: name one\n"
    )


def test_replica_states_merge_own_records_and_the_leaders_view(ledger: Ledger) -> None:
    record = JobRecord(
        "job01",
        JobState.RUNNING,
        hosts=["master-0", "ps-0", "worker-0", "worker-1"],
        replicas=[
            {"name": "master-0", "state": "PREPARING"},
            {"name": "ps-0", "state": "LOST", "restarts": 1},
            {"name": "worker-0", "state": "EXITED", "exitCode": 137},
        ],
    )
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.RUNNING), None)
    ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.RUNNING, restarts=2), None)
    ledger.store.create(paths.replica("job01", "worker-0"), b"{")
    assert [(r.name, r.state, r.exitCode, r.restarts) for r in replicas_of(ledger, record)] == [
        ("master-0", "RUNNING", None, 0),
        ("ps-0", "LOST", None, 2),
        ("worker-0", "EXITED", 137, 0),
        ("worker-1", "PREPARING", None, 0),
    ]


def test_an_unreadable_record_of_a_replica_is_named_and_skipped(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["master-0", "worker-0"]
    record = JobRecord("job01", JobState.RUNNING, hosts=hosts)
    ledger.write_replica("job01", ReplicaRecord("worker-0", ReplicaState.RUNNING), None)
    ledger.store.create(paths.replica("job01", "master-0"), b"[]")
    assert [(r.name, r.state) for r in replicas_of(ledger, record)] == [("worker-0", "RUNNING")]
    assert capsys.readouterr().err == "not read: master-0: the record of a replica must be a JSON object, not []\n"
    record = replace(record, replicas=[{"name": "master-0", "state": "EXITED"}])
    notes: list[str] = []
    assert [r.state for r in replicas_of(ledger, record, notes.append)] == ["EXITED", "RUNNING"]
    assert len(notes) == 1


def test_replicas_of_an_older_record_are_read(ledger: Ledger) -> None:
    replicas = [{"name": "master-0", "exitCode": 0, "state": "EXITED"}]
    record = JobRecord.from_dict({"jobId": "old", "state": "SUCCEEDED", "replicas": replicas})
    assert [(r.name, r.state, r.exitCode) for r in replicas_of(ledger, record)] == [("master-0", "EXITED", 0)]
