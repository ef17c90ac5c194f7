"""A submission, killed at any moment: with a folder, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from replicahosts import Clock, Flaky

from jobs import paths
from jobs.bucket import BucketError
from jobs.folder import FolderBucket
from jobs.host_start import HostStarter
from jobs.lease import ChangeTimer, Lease
from jobs.ledger import Ledger, Stored
from jobs.queue import QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER, QueueMonitor
from jobs.records import JobRecord, Plan
from jobs.states import JobState
from ops.submit.submitter import BusyError, CancelledError, Canceller, OvertakenError, Submitter, UsedBeforeError

HOSTS = ["master-0", "worker-0"]
LEASE = 15.0
SUBMITTERS = 30.0


class Killed(BaseException):
    """An exception that no `except Exception` catches."""


class Bucket:
    """The bucket, who submits, and who tends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.ledger = Ledger(FolderBucket(root), sleep=lambda _: None)
        self.monitor = QueueMonitor(self.ledger, ChangeTimer(self.clock), "monitor", LEASE)

    def submitter(self, me: str = "fab 1", job_id: str = "job01", max_wait: float | None = None, **job: object) -> Submitter:
        self.store = Flaky(FolderBucket(self.root))
        record = JobRecord(job_id, hosts=HOSTS, createTime="2026-01-31T12:00:00Z", submittedBy="me", **job)  # type: ignore[arg-type]
        return Submitter(Ledger(self.store, sleep=lambda _: None), record, me, max_wait)

    def claimed(self, me: str = "fab 1", job_id: str = "job01") -> Submitter:
        submitter = self.submitter(me, job_id)
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
        return [(entry.jobId, entry.held) for entry in self.ledger.queue().entries]

    def tend(self, seconds: float) -> None:
        """Look every second for so long."""
        for _ in range(int(seconds)):
            self.monitor.run_once()
            self.clock.pass_(1.0)
        self.monitor.run_once()


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_a_job_from_its_claim_until_it_is_handed_over(bucket: Bucket) -> None:
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


def test_an_id_that_was_used_before_changes_nothing(bucket: Bucket) -> None:
    bucket.claimed()
    before = bucket.job()
    with pytest.raises(UsedBeforeError):
        bucket.claimed("fab 2")
    bucket.submitter().give_up("no")  # of another life: it has nothing to give up
    assert bucket.job() == before
    assert bucket.queue() == []
    with pytest.raises(UsedBeforeError):
        bucket.claimed("fab 2")
    assert (bucket.job(), bucket.queue()) == (before, [])


def test_who_may_not_wait_leaves_no_trace(bucket: Bucket) -> None:
    bucket.submitter().claim(may_wait=False)
    with pytest.raises(BusyError, match="job01") as caught:
        bucket.submitter("fab 2", "job02").claim(may_wait=False)
    assert [entry.jobId for entry in caught.value.ahead] == ["job01"]
    assert bucket.queue() == [("job01", True)]
    assert bucket.ledger.job("job02") is None


def test_who_may_wait_is_told_for_whom(bucket: Bucket) -> None:
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
def test_killed_at_any_step_it_is_ended_after_its_lease_and_not_before(bucket: Bucket, last: str) -> None:
    submitter = bucket.submitter()

    def killed(method: str, name: str) -> None:
        if last == "queue" and method == "create" and name == paths.job("job01"):
            raise Killed

    store = bucket.store
    store.before = killed
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
    bucket.tend(SUBMITTERS - 1)
    assert ("job01", True) in bucket.queue()
    assert last == "queue" or not bucket.job().final
    bucket.tend(1)
    assert ("job01", True) not in bucket.queue()
    assert (bucket.job().state, bucket.job().errorMessage) == ("FAILED", NOT_HANDED_OVER)
    assert bucket.job().lease.holder == "monitor"
    # It was only suspended, and goes on.
    store.before = lambda method, name: None
    if last == "queue":
        with pytest.raises(OvertakenError, match="FAILED"):
            submitter.claim(may_wait=True)
    else:
        for step in (submitter.prepare, submitter.hand_over, submitter.renew):
            with pytest.raises(OvertakenError, match="FAILED") as caught:
                step()
            assert caught.value.record == bucket.job()
        before = bucket.job()
        submitter.give_up("too late")
        assert bucket.job() == before


def test_signs_of_life_keep_it(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    for _ in range(5):
        bucket.tend(SUBMITTERS - 1)
        submitter.renew()
    assert not bucket.job().final
    submitter.hand_over()
    bucket.tend(10 * LEASE)
    assert (bucket.job().state, bucket.queue()) == ("QUEUED", [("job01", True)])  # it is its hosts', which may take their time


def test_an_answer_that_was_lost_is_a_success_when_it_is_tried_again(bucket: Bucket) -> None:
    submitter = bucket.submitter()
    for evil in (["after"], ["before"], ["after"]):  # of the queue, and then twice of the job
        bucket.store.fail = evil
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


def test_a_sign_of_life_of_which_nothing_was_heard_is_one_s_own(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.renew()
    submitter.prepare()
    assert (bucket.job().state, bucket.job().lease.heartbeatSeq) == ("PREPARING", 2)  # each write is one


def test_a_handing_over_of_which_nothing_was_heard_may_be_the_replicas_by_now(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    submitter.prepare()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.hand_over()
    bucket.change(lambda job: job.with_holder("master-0/1").to(JobState.RUNNING))
    before = bucket.job()
    submitter.hand_over()
    assert bucket.job() == before
    with pytest.raises(OvertakenError, match="RUNNING"):
        submitter.prepare()


def test_cancelled_while_it_is_submitted(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    canceller = bucket.canceller()
    seen = canceller.step()
    assert seen is not None
    assert seen.state == "QUEUED"  # its submitter lives, and is asked
    with pytest.raises(CancelledError):
        submitter.renew()
    submitter.give_up("", cancelled=True)
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("CANCELLED", "", [])
    assert canceller.step() == bucket.job()


def test_the_canceller_ends_what_a_silent_submitter_left(bucket: Bucket) -> None:
    submitter, canceller = bucket.submitter(), bucket.canceller()
    submitter.claim(may_wait=True)
    for _ in range(int(SUBMITTERS)):
        canceller.step()
        assert not bucket.job().final
        bucket.clock.pass_(1.0)
    ended = canceller.step()
    assert ended == bucket.job()
    assert (bucket.job().state, bucket.job().errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert bucket.queue() == []
    with pytest.raises(OvertakenError):
        submitter.prepare()


def test_the_canceller_ends_a_job_that_waits_at_once(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    submitter.hand_over()
    ended = bucket.canceller().step()
    assert ended == bucket.job()
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("CANCELLED", "", [])


def test_the_canceller_gives_replicas_three_leases(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    submitter.prepare()
    submitter.hand_over()
    bucket.change(lambda job: job.with_holder("master-0/1").to(JobState.RUNNING))
    canceller = bucket.canceller()
    for _ in range(int(3 * LEASE)):
        canceller.step()
        bucket.clock.pass_(1.0)
    assert bucket.job().state == "RUNNING"
    assert bucket.ledger.cancel_requested("job01")
    canceller.step()
    assert (bucket.job().state, bucket.job().errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert (bucket.job().lease.holder, bucket.queue()) == ("canceller", [])


def test_what_is_not_there_or_over_is_not_cancelled(bucket: Bucket) -> None:
    assert bucket.canceller().step() is None
    bucket.ledger.create_job(JobRecord("job02").ended("why"))
    before = bucket.job("job02")
    assert bucket.canceller("job02").step() == before == bucket.job("job02")


def test_a_job_waits_for_its_hosts_only_so_long(bucket: Bucket) -> None:
    first, second = bucket.submitter(), bucket.submitter("fab 2", "job02", max_wait=40.0)
    for submitter in (first, second):
        submitter.claim(may_wait=True)
        submitter.hand_over()
    bucket.tend(39)
    assert not bucket.job("job02").final
    bucket.tend(1)
    said = "it waited for its hosts for longer than maxWaitTime, 40 s"
    assert (bucket.job("job02").state, bucket.job("job02").errorMessage) == ("FAILED", said)
    assert bucket.queue() == [("job01", True)]
    assert not bucket.job().final


def test_a_waiting_cancelled_job_is_ended_by_the_monitor(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    submitter.hand_over()
    bucket.ledger.request_cancel("job01", b"{}")
    bucket.monitor.run_once()
    assert (bucket.job().state, bucket.queue()) == ("CANCELLED", [])


def test_hosts_of_a_job_that_is_over_are_given_to_the_next(bucket: Bucket) -> None:
    bucket.claimed()
    bucket.claimed("fab 2", "job02")
    bucket.change(lambda job: job.with_holder("").ended("why"))
    beats = bucket.submitter("fab 2", "job02")
    beats.claim(may_wait=True)
    bucket.tend(LEASE - 1)
    assert bucket.queue()[0] == ("job01", True)
    beats.renew()
    bucket.tend(1)
    assert bucket.queue() == [("job02", True)]


def test_a_garbled_job_does_not_hold_its_hosts(bucket: Bucket) -> None:
    bucket.claimed()
    (bucket.root / paths.job("job01")).write_bytes(b"{")
    bucket.tend(LEASE - 1)
    assert bucket.queue() == [("job01", True)]
    bucket.tend(1)
    assert bucket.queue() == []


def test_two_monitors_at_once_end_a_job_once(bucket: Bucket) -> None:
    bucket.claimed()
    store = Flaky(FolderBucket(bucket.root))
    other = QueueMonitor(Ledger(store, sleep=lambda _: None), ChangeTimer(bucket.clock), "other", LEASE)
    for _ in range(int(SUBMITTERS)):
        bucket.monitor.run_once()
        other.run_once()
        bucket.clock.pass_(1.0)

    def quicker(method: str, name: str) -> None:
        store.before = lambda method, name: None
        bucket.monitor.run_once()

    store.before = lambda method, name: quicker(method, name) if method == "replace" else None
    other.run_once()
    assert (bucket.job().lease.holder, bucket.job().lease.epoch, bucket.queue()) == ("monitor", 2, [])
    assert store.calls == []


def test_an_interrupt_after_the_hand_over_leaves_the_job_to_its_hosts(bucket: Bucket) -> None:
    submitter = bucket.claimed()
    submitter.prepare()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.hand_over()
    record = submitter.give_up("stopped", cancelled=True)
    assert record is not None
    assert (record.state, record.lease.free) == (JobState.PREPARING, True)
    assert bucket.queue() == [("job01", True)]


@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_interrupt_while_the_job_is_made_ends_it_for_good(bucket: Bucket, effect: str) -> None:
    submitter = bucket.submitter()
    bucket.store.fail = ["", effect]  # the queue is written, the job is not heard of
    with pytest.raises(BucketError):
        submitter.claim(may_wait=True)
    record = submitter.give_up("stopped", cancelled=True)
    assert record is not None
    assert record.state is JobState.CANCELLED
    assert bucket.job() == record
    assert bucket.queue() == []


def test_an_interrupt_before_anything_was_made_leaves_nothing(bucket: Bucket) -> None:
    submitter = bucket.submitter()
    bucket.store.fail = ["after"]
    with pytest.raises(BucketError):
        submitter.claim(may_wait=True)
    assert bucket.queue() == [("job01", True)]
    assert submitter.give_up("stopped", cancelled=True) is None
    assert bucket.queue() == []
    assert bucket.ledger.job("job01") is None


def handed_over(bucket: Bucket, **limits: float) -> None:
    submitter = bucket.claimed()
    bucket.ledger.create_plan(Plan("job01", HOSTS, "m", [], {}, **limits))  # type: ignore[arg-type]
    submitter.hand_over()


def test_a_job_whose_hosts_never_start_it_is_ended(bucket: Bucket) -> None:
    handed_over(bucket, preparingSeconds=100.0)
    bucket.tend(99)
    assert not bucket.job().final
    bucket.tend(1)
    said = "its hosts (master-0, worker-0) did not start it, and count as lost: none of them sent a heartbeat for 100 s"
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("FAILED", said, [])


def test_a_leaderless_job_is_ended_after_a_wait(bucket: Bucket) -> None:
    handed_over(bucket, lostAfterSeconds=20.0, maxWaitTime=100.0)
    bucket.change(lambda job: job.to(JobState.PREPARING).with_holder("master-0/1").to(JobState.RUNNING))
    bucket.tend(80)
    bucket.change(lambda job: replace(job, lease=job.lease.renewed()))  # it was only away
    bucket.tend(119)
    assert bucket.job().state == "RUNNING"
    bucket.tend(1)
    said = "its hosts (master-0, worker-0) are lost: none of them sent a heartbeat for 120 s"
    assert (bucket.job().state, bucket.job().errorMessage, bucket.queue()) == ("FAILED", said, [])
    assert (bucket.job().lease.holder, bucket.job().lostReplicas) == ("monitor", HOSTS)


def test_the_hosts_of_a_leaderless_job_are_started(bucket: Bucket) -> None:
    asked: list[str] = []

    def start(host: str) -> str:
        asked.append(host)
        return ""

    starter = HostStarter(start, HOSTS, bucket.clock, lambda work: work())
    bucket.monitor = QueueMonitor(bucket.ledger, ChangeTimer(bucket.clock), "monitor", LEASE, starter)
    submitter = bucket.claimed()
    bucket.ledger.create_plan(Plan("job01", HOSTS, "task", [], {}))
    bucket.tend(29)
    assert asked == [], "it is its submitter's"
    submitter.renew()
    submitter.prepare()
    submitter.hand_over()
    bucket.tend(29)
    assert asked == [], "they may be about to take it up"
    bucket.tend(2)
    assert asked == HOSTS
    bucket.change(lambda job: job.with_holder("worker-0/1"))
    bucket.tend(29)
    assert asked == HOSTS, "one of them leads"
    bucket.change(lambda job: job.to(JobState.CANCELLING))
    bucket.tend(40)
    bucket.change(lambda job: job.ended(""))
    bucket.tend(40)
    assert asked == HOSTS, "nobody wants them any more"
    bucket.claimed("fab 2", "job02")
    bucket.tend(40)
    assert bucket.job("job02").state == "FAILED"
    assert asked == HOSTS, "what a dead submitter left is ended, and starts no host"
