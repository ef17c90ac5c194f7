"""The typed records in the bucket: conditional writes, and garbled files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from shared_fakes import Flaky

from jobs import paths
from jobs.bucket import BucketError, Conflict
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger, Stored, Trials
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.serialization import NewerSchemaError, RecordError
from jobs.states import JobState
from jobs.study import Trial, TrialState


@pytest.fixture
def store(tmp_path: Path) -> Flaky:
    return Flaky(FolderBucket(tmp_path))


@pytest.fixture
def ledger(store: Flaky) -> Ledger:
    return Ledger(store, sleep=lambda _: None)


def write(root: Path, name: str, content: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


def job(job_id: str, created: str, state: JobState, *hosts: str, priority: int = 0) -> JobRecord:
    return JobRecord(job_id, state=state, hosts=list(hosts), createTime=created, priority=priority)


def test_a_job_is_changed_only_from_the_version_that_was_read(ledger: Ledger) -> None:
    assert ledger.job("job01") is None
    first = ledger.create_job(JobRecord("job01"))
    assert ledger.job("job01") == first
    with pytest.raises(Conflict):
        ledger.create_job(JobRecord("job01", labels={"other": "one"}))
    second = ledger.change_job(first, first.record.to(JobState.PREPARING))
    assert ledger.job("job01") == second
    with pytest.raises(Conflict):
        ledger.change_job(first, first.record.to(JobState.FAILED))
    assert ledger.job("job01") == second


def test_a_garbled_job_is_an_error_and_is_skipped_in_the_list(ledger: Ledger, tmp_path: Path) -> None:
    for n in (1, 3, 2):
        ledger.create_job(job(f"job{n}", f"2026-01-0{n}T00:00:00Z", JobState.QUEUED))
    write(tmp_path, "jobs/bad/job.json", b'{"jobId": "bad", "state": 1}')
    write(tmp_path, "jobs/cut/job.json", b"")
    with pytest.raises(RecordError, match=r"job\.json\.state is 1; valid are"):
        ledger.job("bad")
    records, errors = ledger.jobs()
    assert [record.jobId for record in records] == ["job3", "job2", "job1"]
    assert {job_id: str(error).partition(";")[0] for job_id, error in errors.items()} == {
        "bad": "job.json.state is 1",
        "cut": "job.json is no JSON: Expecting value: line 1 column 1 (char 0)",
    }


def test_a_plan_is_written_once(ledger: Ledger) -> None:
    plan = Plan("job01", ["master-0"], "m", [], {})
    assert ledger.plan("job01") is None
    ledger.create_plan(plan)
    ledger.create_plan(plan)
    with pytest.raises(Conflict):
        ledger.create_plan(replace(plan, module="other"))
    assert ledger.plan("job01") == plan


def test_a_replica_overwrites_only_its_own_record(ledger: Ledger, tmp_path: Path) -> None:
    record = ReplicaRecord("ps-0", incarnation="a")
    assert ledger.replica_version("job01", "ps-0") is None
    first = ledger.write_replica("job01", record, None)
    with pytest.raises(Conflict):
        ledger.write_replica("job01", replace(record, incarnation="b"), None)
    second = ledger.write_replica("job01", replace(record, heartbeatSeq=1), first)
    with pytest.raises(Conflict):
        ledger.write_replica("job01", replace(record, incarnation="b"), first)
    assert ledger.replica_version("job01", "ps-0") == second
    write(tmp_path, paths.replica("job01", "ps-1"), b"{")
    assert ledger.replica_version("job01", "ps-1") is not None
    assert ledger.replicas("job01", ["ps-0", "ps-1", "ps-2"]) == {"ps-0": replace(record, heartbeatSeq=1)}
    assert str(ledger.replicas_named("job01", ["ps-1"])["ps-1"]).startswith("the record of a replica is no JSON: ")
    write(tmp_path, paths.replica("job01", "ps-1"), b'{"schema": 5, "name": "ps-1", "state": "RUNNING"}')
    with pytest.raises(NewerSchemaError, match="the record of a replica was written by a newer scaletier"):
        ledger.replicas("job01", ["ps-0", "ps-1"])


def test_a_second_cancel_request_changes_nothing(ledger: Ledger) -> None:
    assert not ledger.cancel_requested("job01")
    ledger.request_cancel("job01", b"first")
    ledger.request_cancel("job01", b"second")
    assert ledger.cancel_requested("job01")
    item = ledger.store.read(paths.cancel("job01"))
    assert item.content == b"first"


def test_a_change_applies_to_the_newest_queue(ledger: Ledger, store: Flaky, tmp_path: Path) -> None:
    other = Ledger(FolderBucket(tmp_path))
    rivals = [QueueEntry("b", ["w"]), QueueEntry("c", ["x"])]

    def add_rival(method: str, name: str) -> None:
        if method in ("create", "replace") and rivals:
            rival = rivals.pop(0)
            other.change_queue(lambda queue: queue.added(rival))

    store.before = add_rival
    after = ledger.change_queue(lambda queue: queue.added(QueueEntry("a", ["m"])))
    assert [entry.jobId for entry in after.entries] == ["b", "c", "a"]
    assert ledger.queue() == after
    store.calls.clear()
    assert ledger.change_queue(lambda queue: queue) == after
    assert store.calls == []


def test_endless_conflicts_on_the_queue_are_an_error(ledger: Ledger, store: Flaky) -> None:
    def raise_conflict(method: str, name: str) -> None:
        if method in ("create", "replace"):
            raise Conflict(name)

    store.before = raise_conflict
    with pytest.raises(Conflict):
        ledger.change_queue(lambda queue: queue.added(QueueEntry("a", ["m"])))


@pytest.mark.parametrize(
    "garbled", [b"", b"{", b'{"entries": [{"jobId": 1}]}', b'{"schema":2,"entries":3}', b'{"schema":"newer"}x']
)
def test_a_garbled_queue_is_rebuilt_from_the_jobs(ledger: Ledger, tmp_path: Path, garbled: bytes) -> None:
    for record in (
        job("done", "2026-01-01T00:00:00Z", JobState.SUCCEEDED, "m"),
        job("later", "2026-01-04T00:00:00Z", JobState.QUEUED, "m"),
        job("urgent", "2026-01-05T00:00:00Z", JobState.QUEUED, "m", "w", priority=5),
        job("runs", "2026-01-02T00:00:00Z", JobState.RUNNING, "m"),
        job("free", "2026-01-06T00:00:00Z", JobState.QUEUED, "x"),
    ):
        ledger.create_job(record)
    write(tmp_path, paths.QUEUE, garbled)
    queue = ledger.queue()
    assert [(e.jobId, e.has_hosts, e.priority) for e in queue.entries] == [
        ("runs", True, 0), ("later", False, 0), ("urgent", False, 5), ("free", True, 0),
    ]  # fmt: skip
    assert (queue.entries[2].hosts, queue.entries[2].createTime) == (["m", "w"], "2026-01-05T00:00:00Z")
    assert (tmp_path / paths.QUEUE).read_bytes() == garbled
    after = ledger.change_queue(lambda queue: queue.without(queue.entries[0]))
    assert Queue.from_json((tmp_path / paths.QUEUE).read_bytes()) == after
    assert [(e.jobId, e.has_hosts) for e in after.entries] == [("later", False), ("urgent", True), ("free", True)]


def test_a_newer_queue_is_unchanged(ledger: Ledger, tmp_path: Path) -> None:
    newer = b'{"schema":99,"entries":{}}'
    write(tmp_path, paths.QUEUE, newer)
    for call in (ledger.queue, lambda: ledger.change_queue(lambda queue: queue.added(QueueEntry("a", ["m"])))):
        with pytest.raises(RecordError, match="newer scaletier"):
            call()
    assert (tmp_path / paths.QUEUE).read_bytes() == newer


def test_a_rebuilt_queue_has_its_submitters_and_assigns_no_host_twice(ledger: Ledger, tmp_path: Path) -> None:
    either = {"master-0": ["m", "w"]}
    waits = JobRecord("waits", candidates=either, createTime="2026-01-02T00:00:00Z").with_holder("ann/1", submitter=True)
    ledger.create_job(waits)
    for name, number in (("first", 3), ("second", 4)):
        ledger.create_job(
            JobRecord(name, JobState.RUNNING, candidates=either, hosts=["m"], createTime=f"2026-01-0{number}T00:00:00Z")
        )
    write(tmp_path, paths.QUEUE, b"{")
    queue = ledger.queue()
    assert [(entry.jobId, entry.hosts, entry.submission_id) for entry in queue.entries] == [
        ("waits", ["w"], "ann/1"),
        ("first", ["m"], ""),
        ("second", [], ""),
    ]


@pytest.fixture
def trials(ledger: Ledger) -> Trials:
    return Trials(ledger, "job01")


def create_trials(ledger: Ledger, *numbers: int, state: TrialState = TrialState.SUCCEEDED) -> list[Trial]:
    records = [Trial(number, {}, "ps-0", state=state, startTime="") for number in numbers]
    return [ledger.create_trial("job01", record).record for record in records]


def test_trials_are_read_once_they_are_final(
    ledger: Ledger, trials: Trials, store: Flaky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[list[int]]()
    numbered = ledger.trials_numbered

    def record_numbers(job_id: str, numbers: Iterable[int]) -> dict[int, Stored[Trial] | RecordError]:
        reads.append(list(numbers))
        return numbered(job_id, reads[-1])

    monkeypatch.setattr(ledger, "trials_numbered", record_numbers)
    assert (trials.read(), trials.next_number, reads) == ([], 1, [[1]])
    records = create_trials(ledger, 1, 3, 4) + create_trials(ledger, 2, state=TrialState.RUNNING)
    write(tmp_path, paths.trial("job01", 5), b"{")
    write(tmp_path, paths.trial("job01", 6), records[0].to_json())
    reads.clear()
    assert trials.read() == sorted(records, key=lambda trial: trial.trialId)
    assert reads == [[1], [2, 3], [4, 5, 6, 7], [7, 8, 9, 10, 11, 12, 13, 14]]
    assert trials.next_number == 7
    assert trials.bad[5].startswith("the record of a trial is no JSON: ")
    assert trials.bad[6] == "the record of trial 6 says that it is that of trial 1"
    reads.clear()
    write(tmp_path, paths.trial("job01", 2), b"{")
    assert [trial.trialId for trial in trials.read()] == [1, 3, 4]
    assert (reads, set(trials.bad)) == ([[2, 7]], {2, 5, 6})


def test_a_trial_is_changed_only_from_the_version_that_was_read(ledger: Ledger) -> None:
    assert ledger.trial("job01", 1) is None
    create_trials(ledger, 1, state=TrialState.RUNNING)
    first = ledger.trial("job01", 1)
    assert first
    with pytest.raises(Conflict):
        ledger.create_trial("job01", replace(first.record, replica="ps-1"))
    second = ledger.change_trial("job01", first, replace(first.record, state=TrialState.FAILED))
    assert ledger.trial("job01", 1) == second
    with pytest.raises(Conflict):
        ledger.change_trial("job01", first, replace(first.record, replica="ps-1"))


def test_several_jobs_are_read_with_one_call(ledger: Ledger, tmp_path: Path) -> None:
    stored = ledger.create_job(JobRecord("job01"))
    ledger.create_job(JobRecord("job02"))
    write(tmp_path, paths.job("job03"), (tmp_path / paths.job("job01")).read_bytes())
    records = ledger.jobs_named(name for name in ("job01", "job03", "job04"))
    assert records["job01"] == stored
    assert str(records["job03"]) == "job.json says that it is that of job 'job01'"
    assert list(records) == ["job01", "job03"]


def test_freeing_the_hosts_of_a_job_assigns_them_to_the_next(ledger: Ledger, store: Flaky) -> None:
    ledger.change_queue(lambda queue: queue.added(QueueEntry("a", ["m"])).added(QueueEntry("b", ["m"])))
    ledger.free_hosts("a")
    assert ledger.queue().entries == [QueueEntry("b", ["m"], has_hosts=True)]
    store.calls.clear()
    ledger.free_hosts("a")
    assert store.calls == []


def test_an_unreadable_folder_is_not_an_empty_one(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.create_job(JobRecord("job01"))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(BucketError, match="Permission denied"):
        ledger.jobs()
