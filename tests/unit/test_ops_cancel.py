"""`fab cancel` and `fab wait`: with a live leader, without hosts, and before a job's start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import put_job

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError
from jobs.folder import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops import client, terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, FAILED, HostsError, OpsError, UsageError
from ops.submit.end import cancel, wait
from ops.submit.submitter import CancelledError, OvertakenError, Submitter

HOSTS = ["master-0", "worker-0"]


class Clock:
    """Time in which nothing waits; `ticks` is what others do meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ticks: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for tick in self.ticks:
            tick()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client, "time", made)
    return made


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(FolderBucket(tmp_path))


@pytest.fixture
def cluster(inventory: Inventory, ledger: Ledger) -> ClusterClient:
    return ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]


def job(state: JobState, holder: str = "master-0/1", **fields: object) -> JobRecord:
    return replace(JobRecord("job01", state, hosts=HOSTS, **fields).with_holder(holder))  # type: ignore[arg-type]


def put(ledger: Ledger, record: JobRecord) -> None:
    """Write a job that has its hosts, and one behind it."""
    put_job(ledger, record)
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", HOSTS, held=True), QueueEntry("job02", HOSTS)]))


def beats(ledger: Ledger) -> None:
    """Write a heartbeat of the leader, which has seen the request after a while."""
    stored = ledger.job("job01")
    assert stored is not None
    record = stored.record
    if record.final:
        return
    if record.lease.heartbeatSeq > 60 and record.state is JobState.CANCELLING:
        record = record.to(JobState.CANCELLED)
    elif record.lease.heartbeatSeq > 3 and ledger.cancel_requested("job01") and record.state is JobState.RUNNING:
        record = record.to(JobState.CANCELLING)
    ledger.change_job(stored, replace(record, lease=record.lease.renewed()))


def test_a_leader_that_lives_ends_its_job_itself(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    put(ledger, job(JobState.RUNNING))
    clock.ticks.append(lambda: beats(ledger))
    assert cancel(cluster, "job01") == DONE
    assert capsys.readouterr().out == "job01 CANCELLED\n"
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.lease.holder, record.record.errorMessage) == ("master-0/1", "")
    asked = json.loads(ledger.store.read(paths.cancel("job01")).content)  # type: ignore[union-attr]
    assert "@" in asked["requestedBy"]
    assert [entry.jobId for entry in ledger.queue().entries] == ["job01", "job02"], "the leader gives the hosts away"


def test_who_is_waited_for_is_shown(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger, job(JobState.RUNNING))
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.RUNNING), None)
    ledger.write_replica("job01", ReplicaRecord("worker-0", ReplicaState.EXITED, exitCode=143), None)
    step, shown = terminal.Step("cancelling"), list[str]()
    monkeypatch.setattr(terminal, "Step", lambda _: step)
    clock.ticks += [lambda: beats(ledger), lambda: shown.append(str(step.count))]
    assert cancel(cluster, "job01") == DONE
    assert step.what == "cancelling job01"
    assert list(dict.fromkeys(shown)) == ["(RUNNING, waiting for master-0)", "(CANCELLING, waiting for master-0)"]


@pytest.mark.parametrize("state", [JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING])
def test_a_job_whose_hosts_are_gone(cluster: ClusterClient, ledger: Ledger, clock: Clock, state: JobState) -> None:
    put(ledger, job(state))
    assert cancel(cluster, "job01") == DONE
    assert 45 <= clock.now - 100 < 60, "three times that of a lease: its replicas would take over before"
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.state, record.record.errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert [(entry.jobId, entry.held) for entry in ledger.queue().entries] == [("job02", True)]


def test_a_queued_job_is_cancelled_at_once(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job(ledger, job(JobState.QUEUED, holder=""))
    ledger.change_queue(
        lambda _: Queue([QueueEntry("job00", HOSTS, held=True), QueueEntry("job01", HOSTS), QueueEntry("job02", HOSTS)])
    )
    assert cancel(cluster, "job01", as_json=True) == DONE
    assert json.loads(capsys.readouterr().out)["state"] == "CANCELLED"
    assert clock.now == 100
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.state, record.record.errorMessage) == ("CANCELLED", "")
    assert [(entry.jobId, entry.held) for entry in ledger.queue().entries] == [("job00", True), ("job02", False)]


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_that_is_being_submitted(cluster: ClusterClient, ledger: Ledger, clock: Clock, lives: bool) -> None:
    submitter = Submitter(ledger, JobRecord("job01", hosts=HOSTS), "ann@laptop/1")
    submitter.claim(may_wait=False)

    def renew() -> None:
        try:
            submitter.renew()
        except CancelledError:
            submitter.give_up("", cancelled=True)

    if lives:
        clock.ticks.append(renew)
    assert cancel(cluster, "job01") == DONE
    assert clock.now - 100 < 2 if lives else 30 <= clock.now - 100 < 35
    record = ledger.job("job01")
    assert record is not None
    assert record.record.state is JobState.CANCELLED
    assert ledger.queue().entries == []
    with pytest.raises((CancelledError, OvertakenError)):
        submitter.renew()


def test_replicas_that_live_but_do_not_stop_are_told_of(cluster: ClusterClient, ledger: Ledger, clock: Clock) -> None:
    put(ledger, job(JobState.RUNNING))
    ledger.create_plan(Plan("job01", HOSTS, "task", [], {}, stopSeconds=60.0))

    def beat() -> None:
        stored = ledger.job("job01")
        assert stored is not None
        ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))

    clock.ticks.append(beat)
    says = r"^job job01 is RUNNING after 150 s; its replicas were asked to stop, look again with fab describe job01$"
    with pytest.raises(OpsError, match=says):
        cancel(cluster, "job01")
    assert ledger.cancel_requested("job01")


def test_a_job_that_ended_before_it_was_cancelled(cluster: ClusterClient, ledger: Ledger, clock: Clock) -> None:
    put(ledger, job(JobState.RUNNING))
    clock.ticks.append(lambda: put_job(ledger, job(JobState.SUCCEEDED)))
    with pytest.raises(OpsError, match=r"^job job01 ended before it could be cancelled: it is SUCCEEDED$"):
        cancel(cluster, "job01")


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_has_ended_is_no_job_to_cancel(cluster: ClusterClient, ledger: Ledger, state: JobState) -> None:
    put_job(ledger, job(state))
    with pytest.raises(UsageError, match=f"^job job01 is {state} already: there is nothing to cancel$"):
        cancel(cluster, "job01")
    assert not ledger.cancel_requested("job01")
    with pytest.raises(UsageError, match="there is no job 'nope'"):
        cancel(cluster, "nope")


def test_the_only_job_that_goes_on_needs_no_name(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"^every job has ended: nothing to cancel$"):
        cancel(cluster, None)
    put(ledger, job(JobState.RUNNING))
    with pytest.raises(UsageError, match=r"^cancel which\? There are job01, job02$"):
        cancel(cluster, None)
    assert not ledger.cancel_requested("job01")
    put_job(ledger, JobRecord("job02", hosts=HOSTS))
    ledger.change_queue(lambda _: Queue([QueueEntry("job02", HOSTS)]))
    assert cancel(cluster, None) == DONE
    assert capsys.readouterr().out == "job02 CANCELLED\n"


class Failing(FolderBucket):
    """A bucket that does not answer for a while."""

    away = 0
    error: Exception = BucketError("the bucket is away")

    def read(self, name: str):  # type: ignore[no-untyped-def]
        if self.away > 0:
            self.away -= 1
            raise self.error
        return super().read(name)


@pytest.mark.parametrize("error", [BucketError("the bucket is away"), HostsError({}, "the bucket is away")])
def test_a_bucket_that_fails_for_a_while_is_waited_for(
    inventory: Inventory, tmp_path: Path, clock: Clock, error: Exception
) -> None:
    store = Failing(tmp_path)
    store.error = error
    ledger = Ledger(store)
    cluster = ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]
    put(ledger, job(JobState.RUNNING))
    todo: list[Callable[[], None]] = [
        lambda: setattr(store, "away", 5),
        lambda: put_job(ledger, job(JobState.RUNNING).to(JobState.CANCELLING).to(JobState.CANCELLED)),
    ]
    clock.ticks.append(lambda: todo.pop(0)() if todo and not store.away else None)
    assert wait(cluster, "job01", as_json=False) == FAILED
    put_job(ledger, job(JobState.RUNNING))
    todo += [
        lambda: setattr(store, "away", 5),
        lambda: put_job(ledger, job(JobState.RUNNING).to(JobState.CANCELLING).to(JobState.CANCELLED)),
    ]
    assert Client(cluster).cancel("job01").state is JobState.CANCELLED
    assert todo == []
    put_job(ledger, job(JobState.RUNNING))
    todo.append(lambda: setattr(store, "away", 10**6))
    with pytest.raises(OpsError, match="the bucket is away"):
        Client(cluster).cancel("job01")


@pytest.mark.parametrize(
    ("state", "code"), [(JobState.SUCCEEDED, DONE), (JobState.FAILED, FAILED), (JobState.CANCELLED, FAILED)]
)
def test_waiting_for_a_job(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str], state: JobState, code: int
) -> None:
    put_job(ledger, job(JobState.QUEUED))
    states = iter([JobState.PREPARING, JobState.RUNNING, state])
    clock.ticks.append(lambda: put_job(ledger, job(next(states))))
    assert wait(cluster, "job01", as_json=False) == code
    assert clock.now == 103
    assert capsys.readouterr().out == f"job01 {state}\n"
    assert wait(cluster, "job01", as_json=True) == code
    shown = json.loads(capsys.readouterr().out)
    assert JobRecord.from_dict(shown) == job(state, createTime=shown["createTime"])
    with pytest.raises(UsageError, match="there is no job 'nope'"):
        wait(cluster, "nope", as_json=False)


def test_a_job_whose_plan_is_damaged_can_be_cancelled(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, tmp_path: Path
) -> None:
    put(ledger, job(JobState.RUNNING))
    (tmp_path / paths.plan("job01")).write_bytes(b"{")

    def leader() -> None:
        stored = ledger.job("job01")
        if stored and not stored.record.final and ledger.cancel_requested("job01"):
            ledger.change_job(stored, stored.record.ended("", cancelled=True))

    clock.ticks.append(leader)
    assert cancel(cluster, "job01") == DONE
