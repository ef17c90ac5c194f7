"""Check a submission that is killed at any moment: with a folder as bucket and a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from shared_fakes import Clock, Flaky

from jobs import paths
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.host_power import HostStarter
from jobs.lease import ChangeTimer, Lease
from jobs.ledger import Ledger, Stored
from jobs.queue import QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER, QueueMonitor
from jobs.records import JobRecord, Plan
from jobs.states import JobState
from ops.submit.claim import BusyError, CancelledError, Canceller, DuplicateIdError, LeaseLostError, Submitter

HOSTS = ["master-0", "worker-0"]
LEASE = 15.0
SUBMITTERS = 30.0


class Killed(BaseException):
    """An exception that no `except Exception` catches."""


class Bucket:
    """The bucket, a submitter and a queue monitor."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.ledger = Ledger(FolderBucket(root), sleep=lambda _: None)
        self.monitor = QueueMonitor(self.ledger, ChangeTimer(self.clock), "monitor", LEASE)

    def submitter(
        self, holder: str = "fab 1", job_id: str = "job01", max_wait: float | None = None, **job: object
    ) -> Submitter:
        self.store = Flaky(FolderBucket(self.root))
        record = JobRecord(job_id, hosts=HOSTS, createTime="2026-01-31T12:00:00Z", submittedBy="me", **job)  # type: ignore[arg-type]
        return Submitter(Ledger(self.store, sleep=lambda _: None), record, holder, max_wait)

    def claim(self, holder: str = "fab 1", job_id: str = "job01") -> Submitter:
        submitter = self.submitter(holder, job_id)
        submitter.claim(may_wait=True)
        return submitter

    def canceller(self, job_id: str = "job01") -> Canceller:
        return Canceller(self.ledger, ChangeTimer(self.clock), "canceller", job_id, b"{}", LEASE)

    def stored(self, job_id: str = "job01") -> Stored[JobRecord]:
        stored = self.ledger.job(job_id)
        assert stored is not None
        return stored

    def job(self, job_id: str = "job01") -> JobRecord:
        return self.stored(job_id).record

    def change(self, change: Callable[[JobRecord], JobRecord], job_id: str = "job01") -> None:
        stored = self.stored(job_id)
        self.ledger.change_job(stored, change(stored.record))

    def queue(self) -> list[tuple[str, bool]]:
        return [(entry.jobId, entry.has_hosts) for entry in self.ledger.queue().entries]

    def monitor_for(self, seconds: float) -> None:
        """Run the monitor every second for `seconds`."""
        for _ in range(int(seconds)):
            self.monitor.run_once()
            self.clock.sleep(1.0)
        self.monitor.run_once()


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_a_submission_from_claim_to_hand_over(bucket: Bucket) -> None:
    submitter = bucket.submitter(priority=3, max_wait=60.0)
    assert submitter.claim(may_wait=False) == []
    assert bucket.job().lease == Lease("fab 1", 1, 0, True)
    assert bucket.ledger.queue().entries == [
        QueueEntry("job01", HOSTS, True, 3, "fab 1", "me", "2026-01-31T12:00:00Z", 60.0)
    ]  # fmt: skip
    submitter.renew()
    assert bucket.job().lease.heartbeatSeq == 1
    submitter.prepare()
    submitter.prepare()
    assert (bucket.job().state, bucket.job().lease.holder) == ("PREPARING", "fab 1")
    submitter.hand_over()
    assert (bucket.job().state, bucket.job().lease) == ("PREPARING", Lease("", 2))
    assert submitter.give_up("too late") == bucket.job()
    assert (bucket.job().state, bucket.queue()) == ("PREPARING", [("job01", True)])
    bucket.ledger.change_queue(lambda queue: replace(queue, entries=[]))
    assert submitter.ahead() == []


def test_a_used_id_changes_nothing(bucket: Bucket) -> None:
    bucket.claim()
    before = bucket.job()
    with pytest.raises(DuplicateIdError):
        bucket.claim("fab 2")
    bucket.submitter().give_up("no")  # of another process: it has nothing to give up
    assert bucket.job() == before
    assert bucket.queue() == []
    with pytest.raises(DuplicateIdError):
        bucket.claim("fab 2")
    assert (bucket.job(), bucket.queue()) == (before, [])


def test_a_refused_submission_leaves_no_trace(bucket: Bucket) -> None:
    bucket.submitter().claim(may_wait=False)
    with pytest.raises(BusyError, match="job01") as caught:
        bucket.submitter("fab 2", "job02").claim(may_wait=False)
    assert [entry.jobId for entry in caught.value.ahead] == ["job01"]
    assert bucket.queue() == [("job01", True)]
    assert bucket.ledger.job("job02") is None


def test_a_queued_submission_gets_the_jobs_ahead(bucket: Bucket) -> None:
    first, second = bucket.submitter(), bucket.submitter("fab 2", "job02")
    first.claim(may_wait=True)
    assert [entry.jobId for entry in second.claim(may_wait=True)] == ["job01"]
    assert bucket.queue() == [("job01", True), ("job02", False)]
    second.hand_over()
    assert (bucket.job("job02").state, bucket.job("job02").lease.free) == ("QUEUED", True)
    first.give_up("the package is broken")
    assert (bucket.job().state, bucket.job().errorMessage) == ("FAILED", "the package is broken")
    assert (second.ahead(), bucket.queue()) == ([], [("job02", True)])


STEPS = ("queue", "job", "renewed", "prepared")


@pytest.mark.parametrize("last", STEPS)
def test_a_submission_killed_at_any_step_ends_after_its_lease(bucket: Bucket, last: str) -> None:
    submitter = bucket.submitter()

    def kill_at(method: str, name: str) -> None:
        if last == "queue" and method == "create" and name == paths.job("job01"):
            raise Killed

    store = bucket.store
    store.before = kill_at
    with suppress(Killed):
        submitter.claim(may_wait=True)
        if last != "job":
            submitter.renew()
        if last == "prepared":
            submitter.prepare()
    other = bucket.submitter("fab 2", "job02")
    other.claim(may_wait=True)
    other.give_up("")
    assert bucket.queue()[0] == ("job01", True)
    bucket.monitor_for(SUBMITTERS - 1)
    assert ("job01", True) in bucket.queue()
    assert last == "queue" or not bucket.job().final
    bucket.monitor_for(1)
    assert ("job01", True) not in bucket.queue()
    assert (bucket.job().state, bucket.job().errorMessage) == ("FAILED", NOT_HANDED_OVER)
    assert bucket.job().lease.holder == "monitor"
    # The submitter was only suspended, and continues.
    store.before = lambda method, name: None
    if last == "queue":
        with pytest.raises(LeaseLostError, match="FAILED"):
            submitter.claim(may_wait=True)
    else:
        for step in (submitter.prepare, submitter.hand_over, submitter.renew):
            with pytest.raises(LeaseLostError, match="FAILED") as caught:
                step()
            assert caught.value.record == bucket.job()
        before = bucket.job()
        submitter.give_up("too late")
        assert bucket.job() == before


def test_renewals_keep_a_submission_alive(bucket: Bucket) -> None:
    submitter = bucket.claim()
    for _ in range(5):
        bucket.monitor_for(SUBMITTERS - 1)
        submitter.renew()
    assert not bucket.job().final
    submitter.hand_over()
    bucket.monitor_for(10 * LEASE)
    assert (bucket.job().state, bucket.queue()) == ("QUEUED", [("job01", True)])  # its hosts have it, without a limit


def test_a_retry_after_a_lost_answer_succeeds(bucket: Bucket) -> None:
    submitter = bucket.submitter()
    for failure in (["after"], ["before"], ["after"]):  # of the queue once, then of the job twice
        bucket.store.fail = failure
        with pytest.raises(BucketError):
            submitter.claim(may_wait=False)
    assert submitter.claim(may_wait=False) == []
    assert bucket.queue() == [("job01", True)]
    for step in (submitter.renew, submitter.prepare, submitter.hand_over):
        bucket.store.fail = ["after"]
        with pytest.raises(BucketError):
            step()
        step()
    assert (bucket.job().state, bucket.job().lease.free) == ("PREPARING", True)


def test_a_renewal_with_a_lost_answer_is_recognized(bucket: Bucket) -> None:
    submitter = bucket.claim()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.renew()
    submitter.prepare()
    assert (bucket.job().state, bucket.job().lease.heartbeatSeq) == ("PREPARING", 2)  # each write counts


def test_a_hand_over_with_a_lost_answer_leaves_the_replicas_job(bucket: Bucket) -> None:
    submitter = bucket.claim()
    submitter.prepare()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.hand_over()
    bucket.change(lambda job: job.with_holder("master-0/1").to(JobState.RUNNING))
    before = bucket.job()
    submitter.hand_over()
    assert bucket.job() == before
    with pytest.raises(LeaseLostError, match="RUNNING"):
        submitter.prepare()


def test_a_cancelled_submission_gives_up(bucket: Bucket) -> None:
    submitter = bucket.claim()
    canceller = bucket.canceller()
    record = canceller.step()
    assert record is not None
    assert record.state == "QUEUED"  # its submitter is alive, and must end it
    with pytest.raises(CancelledError):
        submitter.renew()
    submitter.give_up("", cancelled=True)
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("CANCELLED", "", [])
    assert canceller.step() == bucket.job()


def test_the_canceller_ends_a_silent_submission(bucket: Bucket) -> None:
    submitter, canceller = bucket.submitter(), bucket.canceller()
    submitter.claim(may_wait=True)
    requests: list[str] = []
    bucket.ledger.request_cancel = lambda job_id, _: requests.append(job_id)  # type: ignore[method-assign]
    for _ in range(int(SUBMITTERS)):
        canceller.step()
        assert not bucket.job().final
        bucket.clock.sleep(1.0)
    ended = canceller.step()
    assert ended == bucket.job()
    assert (bucket.job().state, bucket.job().errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert (bucket.queue(), requests) == ([], ["job01"])
    with pytest.raises(LeaseLostError):
        submitter.prepare()


def test_the_canceller_ends_a_queued_job_at_once(bucket: Bucket) -> None:
    submitter = bucket.claim()
    submitter.hand_over()
    ended = bucket.canceller().step()
    assert ended == bucket.job()
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("CANCELLED", "", [])


def test_the_canceller_gives_replicas_three_leases(bucket: Bucket) -> None:
    submitter = bucket.claim()
    submitter.prepare()
    submitter.hand_over()
    bucket.change(lambda job: job.with_holder("master-0/1").to(JobState.RUNNING))
    canceller = bucket.canceller()
    for _ in range(int(3 * LEASE)):
        canceller.step()
        bucket.clock.sleep(1.0)
    assert bucket.job().state == "RUNNING"
    assert bucket.ledger.cancel_requested("job01")
    canceller.step()
    assert (bucket.job().state, bucket.job().errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert (bucket.job().lease.holder, bucket.queue()) == ("canceller", [])


def test_a_missing_or_ended_job_is_not_cancelled(bucket: Bucket) -> None:
    assert bucket.canceller().step() is None
    bucket.ledger.create_job(JobRecord("job02").ended("why"))
    before = bucket.job("job02")
    assert bucket.canceller("job02").step() == before == bucket.job("job02")


def test_a_job_waits_at_most_max_wait_time(bucket: Bucket) -> None:
    first, second = bucket.submitter(), bucket.submitter("fab 2", "job02", max_wait=40.0)
    for submitter in (first, second):
        submitter.claim(may_wait=True)
        submitter.hand_over()
    bucket.monitor_for(39)
    assert not bucket.job("job02").final
    bucket.monitor_for(1)
    message = "it waited for its hosts for longer than maxWaitTime, 40 s"
    assert (bucket.job("job02").state, bucket.job("job02").errorMessage) == ("CANCELLED", message)
    assert bucket.queue() == [("job01", True)]
    assert not bucket.job().final


def test_a_waiting_cancelled_job_is_ended_by_the_monitor(bucket: Bucket) -> None:
    submitter = bucket.claim()
    submitter.hand_over()
    bucket.ledger.request_cancel("job01", b"{}")
    bucket.monitor.run_once()
    assert (bucket.job().state, bucket.queue()) == ("CANCELLED", [])


def test_hosts_of_an_ended_job_go_to_the_next(bucket: Bucket) -> None:
    bucket.claim()
    bucket.claim("fab 2", "job02")
    bucket.change(lambda job: job.with_holder("").ended("why"))
    other_submitter = bucket.submitter("fab 2", "job02")
    other_submitter.claim(may_wait=True)
    bucket.monitor_for(LEASE - 1)
    assert bucket.queue()[0] == ("job01", True)
    other_submitter.renew()
    bucket.monitor_for(1)
    assert bucket.queue() == [("job02", True)]


def test_a_damaged_job_releases_its_hosts(bucket: Bucket) -> None:
    bucket.claim()
    (bucket.root / paths.job("job01")).write_bytes(b"{")
    bucket.monitor_for(LEASE - 1)
    assert bucket.queue() == [("job01", True)]
    bucket.monitor_for(1)
    assert bucket.queue() == []


def test_two_concurrent_monitors_end_a_job_once(bucket: Bucket) -> None:
    bucket.claim()
    store = Flaky(FolderBucket(bucket.root))
    other = QueueMonitor(Ledger(store, sleep=lambda _: None), ChangeTimer(bucket.clock), "other", LEASE)
    for _ in range(int(SUBMITTERS)):
        bucket.monitor.run_once()
        other.run_once()
        bucket.clock.sleep(1.0)

    def end_first(method: str, name: str) -> None:
        store.before = lambda method, name: None
        bucket.monitor.run_once()

    store.before = lambda method, name: end_first(method, name) if method == "replace" else None
    other.run_once()
    assert (bucket.job().lease.holder, bucket.job().lease.epoch, bucket.queue()) == ("monitor", 2, [])
    assert store.calls == []


def test_an_interrupt_after_the_hand_over_leaves_the_job_to_its_hosts(bucket: Bucket) -> None:
    submitter = bucket.claim()
    submitter.prepare()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.hand_over()
    record = submitter.give_up("stopped", cancelled=True)
    assert record is not None
    assert (record.state, record.lease.free) == (JobState.PREPARING, True)
    assert bucket.queue() == [("job01", True)]


@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_interrupt_during_the_creation_ends_the_job(bucket: Bucket, effect: str) -> None:
    submitter = bucket.submitter()
    bucket.store.fail = ["", effect]  # the queue is written, the answer for the job is lost
    with pytest.raises(BucketError):
        submitter.claim(may_wait=True)
    record = submitter.give_up("stopped", cancelled=True)
    assert record is not None
    assert record.state is JobState.CANCELLED
    assert bucket.job() == record
    assert bucket.queue() == []


def test_an_interrupt_before_the_creation_leaves_nothing(bucket: Bucket) -> None:
    submitter = bucket.submitter()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.claim(may_wait=True)
    assert bucket.queue() == [("job01", True)]
    assert submitter.give_up("stopped", cancelled=True) is None
    assert bucket.queue() == []
    assert bucket.ledger.job("job01") is None


def hand_over(bucket: Bucket, **limits: float) -> None:
    submitter = bucket.claim()
    bucket.ledger.create_plan(Plan("job01", HOSTS, "m", [], {}, **limits))  # type: ignore[arg-type]
    submitter.hand_over()


def test_a_job_whose_hosts_never_start_it_is_ended(bucket: Bucket) -> None:
    hand_over(bucket, preparingSeconds=100.0)
    bucket.monitor_for(99)
    assert not bucket.job().final
    bucket.monitor_for(1)
    message = "its hosts (master-0, worker-0) did not start it, and count as lost: none of them sent a heartbeat for 100 s"
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("FAILED", message, [])


def test_a_job_is_given_at_least_the_time_of_a_lease(bucket: Bucket) -> None:
    hand_over(bucket, preparingSeconds=5.0)
    bucket.monitor_for(LEASE - 1)
    assert not bucket.job().final
    bucket.monitor_for(1)
    assert bucket.job().errorMessage.endswith("did not start it, and count as lost: none of them sent a heartbeat for 5 s")


def test_the_record_of_a_job_whose_submitter_died_before_it_wrote_one(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.queue_monitor.now", lambda: "2026-01-31T13:00:00Z")
    monkeypatch.setattr("jobs.records.now", lambda: "2026-01-31T13:00:00Z")
    old, candidates = QueueEntry("old", ["x"]), {"master-0": ["master-0", "worker-0"]}
    entry = QueueEntry(
        "job01", [], submission_id="fab 1", submittedBy="me", createTime="2026-01-31T12:00:00Z", candidates=candidates
    )
    queue = bucket.ledger.change_queue(lambda queue: queue.added(old).added(entry))
    assert queue.entries == [replace(old, has_hosts=True), replace(entry, hosts=["master-0"], has_hosts=True)]
    bucket.monitor_for(SUBMITTERS - 1)
    assert bucket.ledger.job("job01") is bucket.ledger.job("old") is None
    bucket.monitor_for(1)
    end = {"state": JobState.FAILED, "errorMessage": NOT_HANDED_OVER, "endTime": "2026-01-31T13:00:00Z"}
    lease = Lease("monitor", 1)
    assert bucket.job() == JobRecord(
        "job01", lease=lease, hosts=["master-0"], candidates=candidates, createTime=entry.createTime, submittedBy="me", **end
    )  # type: ignore[arg-type]
    assert bucket.job("old") == JobRecord("old", lease=lease, hosts=["x"], createTime="2026-01-31T13:00:00Z", **end)  # type: ignore[arg-type]
    assert bucket.queue() == []


def test_the_monitor_polls_every_three_seconds(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.clock.now = 0.0
    times = list[float]()
    monkeypatch.setattr(bucket.monitor, "run_once", lambda: times.append(bucket.clock.now))
    for _ in range(26):
        bucket.monitor.run_if_due()
        bucket.clock.sleep(0.25)
    assert times == [0.0, 3.0, 6.0]


def test_a_leaderless_job_is_ended_after_a_wait(bucket: Bucket) -> None:
    hand_over(bucket, lostAfterSeconds=20.0, maxWaitTime=100.0)
    bucket.change(lambda job: job.to(JobState.PREPARING).with_holder("master-0/1").to(JobState.RUNNING))
    bucket.monitor_for(80)
    bucket.change(lambda job: replace(job, lease=job.lease.renewed()))  # the leader answers again
    bucket.monitor_for(119)
    assert bucket.job().state == "RUNNING"
    bucket.monitor_for(1)
    message = "its hosts (master-0, worker-0) are lost: none of them sent a heartbeat for 120 s"
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("FAILED", message, [])
    assert (bucket.job().lease.holder, bucket.job().lostReplicas) == ("monitor", HOSTS)


def test_the_hosts_of_a_leaderless_job_are_started(bucket: Bucket) -> None:
    started: list[str] = []

    def start(host: str) -> str:
        started.append(host)
        return ""

    starter = HostStarter(start, HOSTS, bucket.clock, lambda work: work())
    bucket.monitor = QueueMonitor(bucket.ledger, ChangeTimer(bucket.clock), "monitor", LEASE, starter)
    submitter = bucket.claim()
    bucket.ledger.create_plan(Plan("job01", HOSTS, "task", [], {}))
    bucket.monitor_for(29)
    assert started == [], "the submitter still holds the job"
    submitter.renew()
    submitter.prepare()
    submitter.hand_over()
    bucket.monitor_for(29)
    assert started == [], "the hosts may be about to claim it"
    bucket.monitor_for(2)
    assert started == HOSTS
    bucket.change(lambda job: job.with_holder("worker-0/1"))
    bucket.monitor_for(29)
    assert started == HOSTS, "one of them is the leader"
    bucket.change(lambda job: job.to(JobState.CANCELLING))
    bucket.monitor_for(40)
    bucket.change(lambda job: job.ended(""))
    bucket.monitor_for(40)
    assert started == HOSTS, "the job needs no hosts any more"
    bucket.claim("fab 2", "job02")
    bucket.monitor_for(40)
    assert bucket.job("job02").state == "FAILED"
    assert started == HOSTS, "a job of a dead submitter is ended, and starts no host"
