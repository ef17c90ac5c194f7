"""Check `fab cancel` and `fab wait`: with a live leader, without hosts, and before a job's start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import put_job
from shared_fakes import Clock

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops import client, terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, FAILED, OpsError, SeveralHostsError, UsageError
from ops.submit.claim import CancelledError, LeaseLostError, Submitter
from ops.submit.end import cancel, wait

HOSTS = ["master-0", "worker-0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock(100.0)
    monkeypatch.setattr(client, "time", fake)
    return fake


def job(state: JobState, holder: str = "master-0/1", **fields: object) -> JobRecord:
    return replace(JobRecord("job01", state, hosts=HOSTS, **fields).with_holder(holder))  # type: ignore[arg-type]


def put_jobs(ledger: Ledger, record: JobRecord) -> None:
    """Write a job that holds its hosts, and a queued one."""
    put_job(ledger, record)
    ledger.change_queue(lambda _: Queue([QueueEntry("job01", HOSTS, has_hosts=True), QueueEntry("job02", HOSTS)]))


def write_heartbeat(ledger: Ledger) -> None:
    """Write a heartbeat of the leader, which cancels the job after some heartbeats."""
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


def test_a_live_leader_ends_its_job_itself(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    clock.ticks.append(lambda: write_heartbeat(ledger))
    assert cancel(cluster, "job01") == DONE
    assert capsys.readouterr().out == "job01 CANCELLED\n"
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.lease.holder, record.record.errorMessage) == ("master-0/1", "")
    request = json.loads(ledger.store.read(paths.cancel("job01")).content)  # type: ignore[union-attr]
    assert "@" in request["requestedBy"]
    assert [entry.jobId for entry in ledger.queue().entries] == ["job01", "job02"], "the leader releases the hosts"


def test_the_replicas_waited_for_are_shown(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.RUNNING), None)
    ledger.write_replica("job01", ReplicaRecord("worker-0", ReplicaState.EXITED, exitCode=143), None)
    step, counts = terminal.ProgressLine("cancelling"), list[str]()
    began: list[str] = []
    monkeypatch.setattr(terminal, "ProgressLine", lambda what: began.append(what) or step)
    clock.ticks += [lambda: write_heartbeat(ledger), lambda: counts.append(str(step.detail))]
    assert cancel(cluster, "job01") == DONE
    assert (began, step.what) == (["cancelling job01"], "cancelling job01")
    for command in (lambda: cancel(cluster, None), lambda: wait(cluster, None, as_json=False)):
        with pytest.raises(UsageError):
            command()
        ledger.change_queue(lambda _: Queue([]))
        (tmp_path / paths.job("job01")).unlink(missing_ok=True)
    assert began[1:] == ["cancelling the job", "waiting for the job"]
    assert list(dict.fromkeys(counts)) == ["(RUNNING, waiting for master-0)", "(CANCELLING, waiting for master-0)"]


@pytest.mark.parametrize("state", [JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING])
def test_a_job_without_live_hosts_is_cancelled_after_three_leases(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, state: JobState
) -> None:
    put_jobs(ledger, job(state))
    assert cancel(cluster, "job01") == DONE
    assert 45 <= clock.now - 100 < 60, "three leases: replicas would take over before that"
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.state, record.record.errorMessage) == ("CANCELLED", "cancelled; no replica was alive")
    assert [(entry.jobId, entry.has_hosts) for entry in ledger.queue().entries] == [("job02", True)]


def test_a_queued_job_is_cancelled_at_once(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    put_job(ledger, job(JobState.QUEUED, holder=""))
    ledger.change_queue(
        lambda _: Queue([QueueEntry("job00", HOSTS, has_hosts=True), QueueEntry("job01", HOSTS), QueueEntry("job02", HOSTS)])
    )
    assert cancel(cluster, "job01", as_json=True) == DONE
    assert json.loads(capsys.readouterr().out)["state"] == "CANCELLED"
    assert clock.now == 100
    record = ledger.job("job01")
    assert record is not None
    assert (record.record.state, record.record.errorMessage) == ("CANCELLED", "")
    assert [(entry.jobId, entry.has_hosts) for entry in ledger.queue().entries] == [("job00", True), ("job02", False)]


@pytest.mark.parametrize("alive", [True, False])
def test_a_job_that_is_being_submitted_is_cancelled(cluster: ClusterClient, ledger: Ledger, clock: Clock, alive: bool) -> None:
    submitter = Submitter(ledger, JobRecord("job01", hosts=HOSTS), "ann@laptop/1")
    submitter.claim(may_wait=False)

    def renew() -> None:
        try:
            submitter.renew()
        except CancelledError:
            submitter.give_up("", cancelled=True)

    if alive:
        clock.ticks.append(renew)
    assert cancel(cluster, "job01") == DONE
    assert clock.now - 100 < 2 if alive else 30 <= clock.now - 100 < 35
    record = ledger.job("job01")
    assert record is not None
    assert record.record.state is JobState.CANCELLED
    assert ledger.queue().entries == []
    with pytest.raises((CancelledError, LeaseLostError)):
        submitter.renew()


def test_replicas_that_do_not_stop_are_an_error(cluster: ClusterClient, ledger: Ledger, clock: Clock) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    ledger.create_plan(Plan("job01", HOSTS, "task", [], {}, stopSeconds=60.0))

    def write_heartbeat() -> None:
        stored = ledger.job("job01")
        assert stored is not None
        ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))

    clock.ticks.append(write_heartbeat)
    message = r"^job job01 is RUNNING after 150 s; its replicas were asked to stop, check it with fab describe job01$"
    with pytest.raises(OpsError, match=message):
        cancel(cluster, "job01")
    assert ledger.cancel_requested("job01")


def test_a_job_that_ended_first_is_an_error(cluster: ClusterClient, ledger: Ledger, clock: Clock) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    clock.ticks.append(lambda: put_job(ledger, job(JobState.SUCCEEDED)))
    with pytest.raises(OpsError, match=r"^job job01 ended before it could be cancelled: it is SUCCEEDED$"):
        cancel(cluster, "job01")


def test_a_job_that_is_deleted_meanwhile_is_not_waited_for(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, tmp_path: Path
) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    clock.ticks.append(lambda: (tmp_path / paths.job("job01")).unlink())
    with pytest.raises(UsageError, match=r"^there is no job 'job01'; none was started yet$"):
        cancel(cluster, "job01")


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_an_ended_job_cannot_be_cancelled(cluster: ClusterClient, ledger: Ledger, state: JobState) -> None:
    put_job(ledger, job(state))
    with pytest.raises(UsageError, match=f"^job job01 is {state} already: there is nothing to cancel$"):
        cancel(cluster, "job01")
    assert not ledger.cancel_requested("job01")
    with pytest.raises(UsageError, match="there is no job 'nope'"):
        cancel(cluster, "nope")


def test_the_only_active_job_is_the_default(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"^every job has ended: nothing to cancel$"):
        cancel(cluster, None)
    put_jobs(ledger, job(JobState.RUNNING))
    with pytest.raises(UsageError, match=r"^cancel which\? There are job01, job02$"):
        cancel(cluster, None)
    assert not ledger.cancel_requested("job01")
    put_job(ledger, JobRecord("job02", hosts=HOSTS))
    ledger.change_queue(lambda _: Queue([QueueEntry("job02", HOSTS)]))
    with pytest.raises(UsageError, match=r"^there is no job ''"):
        cancel(cluster, "")
    assert not ledger.cancel_requested("job02")
    put_jobs(ledger, job(JobState.SUCCEEDED))
    assert cancel(cluster, None) == DONE
    assert capsys.readouterr().out == "job02 CANCELLED\n"


class Failing(FolderBucket):
    """Fail the next `failures_left` reads."""

    failures_left = 0
    error: Exception = BucketError("the bucket is away")

    def read(self, name: str):  # type: ignore[no-untyped-def]
        if self.failures_left > 0:
            self.failures_left -= 1
            raise self.error
        return super().read(name)


@pytest.mark.parametrize("error", [BucketError("the bucket is away"), SeveralHostsError({}, "the bucket is away")])
def test_a_bucket_that_fails_for_a_while_is_retried(
    inventory: Inventory, tmp_path: Path, clock: Clock, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Failing(tmp_path)
    store.error = error
    ledger = Ledger(store)
    cluster = ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]
    put_jobs(ledger, job(JobState.RUNNING))
    steps: list[Callable[[], None]] = [
        lambda: setattr(store, "failures_left", 5),
        lambda: None,  # it answers once
        lambda: setattr(store, "failures_left", 2),
        lambda: put_job(ledger, job(JobState.RUNNING).to(JobState.CANCELLING).to(JobState.CANCELLED)),
    ]
    clock.ticks.append(lambda: steps.pop(0)() if steps and not store.failures_left else None)
    assert wait(cluster, "job01", as_json=False) == FAILED
    note = f"the bucket does not answer ({error}); the job continues, still waiting\n"
    assert capsys.readouterr() == ("job01 CANCELLED\n", 2 * note), "one note each time"
    put_job(ledger, job(JobState.RUNNING))
    steps += [
        lambda: setattr(store, "failures_left", 5),
        lambda: put_job(ledger, job(JobState.RUNNING).to(JobState.CANCELLING).to(JobState.CANCELLED)),
    ]
    assert Client(cluster).cancel("job01").state is JobState.CANCELLED
    assert steps == []
    put_job(ledger, job(JobState.RUNNING))
    steps.append(lambda: setattr(store, "failures_left", 10**6))
    with pytest.raises(OpsError, match="the bucket is away"):
        Client(cluster).cancel("job01")


@pytest.mark.parametrize(
    ("state", "code"), [(JobState.SUCCEEDED, DONE), (JobState.FAILED, FAILED), (JobState.CANCELLED, FAILED)]
)
def test_wait_returns_the_jobs_exit_code(
    cluster: ClusterClient,
    ledger: Ledger,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
    code: int,
) -> None:
    put_job(ledger, job(JobState.QUEUED))
    states = iter([JobState.PREPARING, JobState.RUNNING, state])
    step, counts = terminal.ProgressLine("waiting"), list[str]()
    began: list[str] = []
    monkeypatch.setattr(terminal, "ProgressLine", lambda what: began.append(what) or step)
    clock.ticks += [lambda: counts.append(str(step.detail)), lambda: put_job(ledger, job(next(states)))]
    assert wait(cluster, "job01", as_json=False) == code
    assert clock.now == 103
    assert capsys.readouterr().out == f"job01 {state}\n"
    assert began == ["waiting for job01"]
    assert (step.what, counts) == ("waiting for job01", ["(QUEUED)", "(PREPARING)", "(RUNNING)"])
    assert wait(cluster, "job01", as_json=True) == code
    output = json.loads(capsys.readouterr().out)
    assert JobRecord.from_dict(output) == job(state, createTime=output["createTime"])
    put_job(ledger, job(state, errorMessage="why\nmore"))
    assert wait(cluster, "job01", as_json=False) == code
    assert capsys.readouterr().out == f"job01 {state}: why\n"
    with pytest.raises(UsageError, match="there is no job 'nope'"):
        wait(cluster, "nope", as_json=False)


def test_a_job_whose_plan_is_damaged_can_be_cancelled(
    cluster: ClusterClient, ledger: Ledger, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_jobs(ledger, job(JobState.RUNNING))
    (tmp_path / paths.plan("job01")).write_bytes(b"{")
    ledger.store.create(paths.replica("job01", "master-0"), b"{")

    def cancel_as_leader() -> None:
        stored = ledger.job("job01")
        if stored and not stored.record.final and ledger.cancel_requested("job01"):
            ledger.change_job(stored, stored.record.ended("", cancelled=True))

    clock.ticks.append(cancel_as_leader)
    assert cancel(cluster, "job01") == DONE
    assert capsys.readouterr().err.count("not read: master-0") == 1
