"""A replica's reports and reads: heartbeats first, its own lost writes are recognized, late answers ignored."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from shared_fakes import Clock, Flaky
from test_agent_supervisor import Host

from hosts.agent.reporter import HostFunctions, Reporter
from jobs import paths
from jobs.bucket import BucketError, Conflict
from jobs.folder_bucket import FolderBucket
from jobs.lease import Lease
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.queue import QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord, UnsavedFiles
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState

NAMES = ["master-0", "worker-0"]
PLAN = Plan("job01", NAMES, "task", [], {}, heartbeatSeconds=4.0, leaseSeconds=9.0)
NOW = "2026-01-31T12:00:00.000Z"


class Replica:
    """One replica: its host with a fake trainer, and its reporter."""

    def __init__(
        self,
        root: Path,
        name: str = "master-0",
        incarnation: str = "a",
        version: str | None = None,
        plan: Plan = PLAN,
        host_functions: HostFunctions = HostFunctions(),  # noqa: B008  immutable
        notify: Callable[[JobRecord], Notification | None] = lambda _: None,
    ) -> None:
        self.host = Host(name, plan)
        self.clock: Clock = self.host.clock
        self.store = Flaky(FolderBucket(root))
        self.ledger = Ledger(self.store, sleep=lambda _: None)
        self.name = name
        self.reporter = Reporter(
            self.host.supervisor, incarnation, self.ledger, self.clock, lambda: NOW, version, host_functions, notify
        )

    def cycles(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.reporter.run_cycle()
            self.host.supervisor.step()
            self.clock.sleep(seconds)

    @property
    def written(self) -> ReplicaRecord:
        return self.ledger.replicas("job01", [self.name])[self.name]

    @property
    def job(self) -> JobRecord:
        stored = self.ledger.job("job01")
        return stored.record

    def write(self, job: JobRecord) -> None:
        stored = self.ledger.job("job01")
        assert stored is not None
        self.ledger.change_job(stored, job)


@pytest.fixture
def root(ledger: Ledger, tmp_path: Path) -> Path:
    ledger.create_job(JobRecord("job01", state=JobState.PREPARING, hosts=NAMES))
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job01", NAMES)))
    return tmp_path


def test_the_heartbeat_comes_first(root: Path) -> None:
    replica = Replica(root)
    calls: list[tuple[str, str]] = []
    replica.store.before = lambda method, name: calls.append((method, name))
    reporter = replica.reporter
    assert (reporter.finished, reporter.due_at_once, reporter.another_leads, reporter.job) == (False, False, False, None)
    replica.reporter.run_cycle()
    assert calls[:2] == [("create", paths.replica("job01", "master-0")), ("read", paths.job("job01"))]


def test_a_record_is_written_when_it_changes_or_its_heartbeat_is_due(root: Path) -> None:
    replica = Replica(root)
    beats = []
    for second in range(13):
        replica.reporter.publish()
        beats.append(replica.written.heartbeatSeq)
        if second == 5:
            replica.host.supervisor.set_facts({"a": 1})
            assert replica.reporter.unpublished
        replica.clock.sleep(1.0)
    assert beats == [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    assert (replica.written.incarnation, replica.written.heartbeatTime, replica.written.facts) == ("a", NOW, {"a": 1})


def test_a_heartbeat_has_the_time_that_the_trainer_has_run(root: Path) -> None:
    replica = Replica(root)
    replica.cycles(3)
    replica.clock.sleep(1e5)
    replica.reporter.publish()
    assert replica.written.state == "RUNNING"
    assert replica.written.runSeconds == replica.host.supervisor.run_seconds > 1e5


def test_the_connections_of_a_silent_trainer_are_recorded(root: Path) -> None:
    plan = replace(PLAN, addresses={"h7": "10.0.0.7", "h8": "10.0.0.8"}, hosts={"master-0": "h7", "worker-0": "h8"})
    host_functions = HostFunctions(connections=lambda peers: [f"connecting to {name}" for name in peers.values()])
    replica = Replica(root, plan=plan, host_functions=host_functions)
    replica.cycles(12)
    assert replica.written.connections == ["connecting to master-0", "connecting to worker-0"]
    for _ in range(12):
        replica.host.child.lines += 1
        replica.cycles()
    assert replica.written.connections == []


def test_a_write_whose_answer_was_lost_is_overwritten(root: Path) -> None:
    replica = Replica(root)
    for failure in ("after", "before", "after"):
        replica.store.fail = [failure]
        with pytest.raises(BucketError):
            replica.reporter.publish()
        replica.reporter.publish()
        assert not replica.reporter.unpublished
        replica.clock.sleep(4.0)
    assert replica.written.heartbeatSeq == 6


def test_a_later_incarnation_continues_from_the_earlier_record(root: Path) -> None:
    former = Replica(root, incarnation="a")
    former.reporter.publish()
    later = Replica(root, incarnation="b", version=former.ledger.replica_version("job01", "master-0"))
    later.reporter.publish()
    assert later.written.incarnation == "b"
    late = Replica(root, incarnation="c", version="what was there before")
    late.reporter.publish()  # over a write of an earlier incarnation
    assert late.written.incarnation == "c"


def test_the_chief_leads_and_the_trainer_starts(root: Path) -> None:
    replica = Replica(root)
    replica.cycles(2)
    assert (replica.job.lease.holder, len(replica.host.children)) == ("master-0/a", 1)
    assert not replica.reporter.another_leads
    other = Replica(root, "worker-0")
    other.cycles(2)
    replica.cycles(2)
    assert replica.job.state == "RUNNING"
    assert ("INFO", "job RUNNING") in replica.host.messages
    other.cycles()
    assert other.reporter.another_leads
    assert other.reporter.job == replica.job


def test_a_round_after_a_change_is_due_at_once(root: Path) -> None:
    replica, other = Replica(root), Replica(root, "worker-0")
    other.cycles()
    other.reporter.publish()
    replica.cycles()
    due = []
    for _ in range(3):
        replica.reporter.run_cycle()
        due.append(replica.reporter.due_at_once)
    assert due == [True, False, False]


def test_a_late_answer_of_an_older_epoch_is_ignored(root: Path) -> None:
    replica = Replica(root, "worker-0")
    replica.write(replace(replica.job, attempt=1).with_holder("master-0/x").with_holder("master-0/y"))
    replica.cycles()
    assert replica.reporter.job == replica.job
    old = replace(replica.job, state=JobState.FAILED, lease=replace(replica.job.lease, epoch=1))
    folder = FolderBucket(root)
    item = folder.read(paths.job("job01"))
    folder.replace(paths.job("job01"), old.to_json(), item.version)
    replica.cycles(2)
    assert (replica.reporter.job.state, replica.reporter.job.lease.epoch) == ("PREPARING", 2)
    assert replica.host.child.stops == []


def test_a_replaced_leader_obeys_the_new_one(root: Path) -> None:
    replica = Replica(root)
    replica.cycles(2)

    def replace_leader(method: str, name: str) -> None:
        if (method, name) == ("replace", paths.job("job01")):
            replica.store.before = lambda method, name: None
            replica.write(replica.job.with_holder("worker-0/x").ended("said by another"))

    replica.store.before = replace_leader
    replica.clock.sleep(5.0)
    replica.cycles(2)
    assert (replica.job.lease.holder, replica.job.errorMessage) == ("worker-0/x", "said by another")
    assert replica.host.child.stops == [PLAN.stopSeconds]


def test_the_end_of_a_job_frees_its_hosts_and_all_finish(root: Path) -> None:
    replica, other = Replica(root), Replica(root, "worker-0")
    for _ in range(4):
        replica.cycles()
        other.cycles()
    assert replica.job.state == "RUNNING"
    replica.host.ends(0)
    replica.cycles(2)
    assert (replica.job.state, replica.reporter.finished) == ("SUCCEEDED", False)
    assert replica.ledger.queue().entries != []  # the other still runs
    other.cycles(2)
    other.host.ends(143)
    assert not other.reporter.finished
    other.cycles()
    replica.cycles()
    assert (other.reporter.finished, replica.reporter.finished) == (True, True)
    assert replica.ledger.queue().entries == []
    assert [r["exitCode"] for r in replica.job.replicas] == [0, 143]


def test_a_pending_restart_is_dropped_once_the_job_ended(root: Path) -> None:
    """The leader's trainer was killed and waits for the restart of all when the chief succeeds."""
    plan = replace(PLAN, restartPolicy="all")
    leader, chief = Replica(root, "worker-0", plan=plan), Replica(root, plan=plan)
    leader.cycles(3)
    for _ in range(3):
        chief.cycles()
        leader.cycles()
    assert (leader.job.state, leader.job.lease.is_assigned_to("worker-0")) == ("RUNNING", True)
    leader.host.ends(-9)
    leader.reporter.run_cycle()
    assert leader.job.attempt == 1
    assert [line for line in leader.host.messages if "attempt" in line[1] or "killed" in line[1]] == [
        ("INFO", "job RUNNING, attempt 1"),
        ("WARNING", "worker 0 was killed (signal 9 (SIGKILL))"),
    ]
    chief.host.ends(0)
    chief.reporter.run_cycle()

    def step_other_thread(method: str, name: str) -> None:
        leader.host.supervisor.step()  # the other thread never waits

    leader.store.before = lambda method, name: step_other_thread(method, name) if name == paths.QUEUE else None
    leader.reporter.run_cycle()
    assert (leader.job.state, leader.reporter.finished, leader.ledger.queue().entries) == ("SUCCEEDED", True, [])
    assert len(leader.host.children) == 1


def test_the_leader_logs_a_failure_as_an_error(root: Path) -> None:
    replica = Replica(root, plan=replace(PLAN, replicas=["master-0"]))
    replica.cycles(3)
    replica.host.ends(3)
    replica.cycles(3)
    assert [line for line in replica.host.messages if line[1].startswith("job")] == [
        ("INFO", "job RUNNING"),
        ("ERROR", "job FAILED"),
    ]


def test_the_leader_obeys_a_request_to_cancel(root: Path) -> None:
    replica = Replica(root)
    replica.cycles(2)
    replica.ledger.request_cancel("job01", b"{}")
    replica.cycles(2)
    assert (replica.job.state, replica.host.child.stops) == ("CANCELLING", [PLAN.stopSeconds])


def test_a_missing_job_is_an_error_that_does_not_stop_the_heartbeat(root: Path) -> None:
    replica = Replica(root)
    (root / paths.job("job01")).unlink()
    with pytest.raises(RecordError, match=r"jobs/job01/job\.json is gone"):
        replica.reporter.run_cycle()
    assert (replica.written.state, replica.written.heartbeatSeq) == (ReplicaState.PREPARING, 1)


def test_the_record_of_a_deleted_job_is_not_recreated(root: Path) -> None:
    replica = Replica(root)
    replica.reporter.publish()
    shutil.rmtree(root / "jobs" / "job01")
    replica.host.supervisor.set_unsaved(UnsavedFiles())
    with pytest.raises(RecordError, match=r"jobs/job01/job\.json is gone"):
        replica.reporter.run_cycle()
    assert not (root / "jobs" / "job01").exists()
    assert not replica.reporter.unpublished, "a unit that is being stopped does not wait for it"


def test_a_later_job_of_the_same_id_is_not_mistaken_for_this_one(root: Path) -> None:
    replica = Replica(root)
    replica.host.supervisor._record = replace(replica.host.record, jobCreateTime=replica.job.createTime)
    replica.cycles(2)
    replica.host.ends(0)
    shutil.rmtree(root / "jobs" / "job01")
    replica.ledger.create_job(JobRecord("job01", state=JobState.PREPARING, createTime=NOW, lease=Lease("master-0/z", 9)))
    replica.ledger.write_replica("job01", ReplicaRecord("master-0", jobCreateTime=NOW), None)
    before = replica.job, replica.written
    with pytest.raises(RecordError, match=r"jobs/job01/job\.json is gone"):
        replica.cycles()
    assert (replica.job, replica.written) == before


def test_the_leader_ignores_records_of_an_earlier_job(root: Path) -> None:
    replica = Replica(root, "worker-0")
    replica.write(replica.job.with_holder("worker-0/z"))
    done = ReplicaRecord("master-0", state=ReplicaState.EXITED, exitCode=0, jobCreateTime=NOW)
    version = replica.ledger.write_replica("job01", done, None)
    replica.cycles(3)
    assert replica.job.state == "PREPARING"
    replica.ledger.write_replica("job01", replace(done, jobCreateTime=""), version)  # by an older version
    replica.cycles(3)
    assert replica.job.state == "SUCCEEDED"


def test_concurrent_writes_of_two_incarnations_do_not_loop(root: Path) -> None:
    replica = Replica(root)

    def raise_conflict(method: str, name: str) -> None:
        if method in ("create", "replace"):
            raise Conflict(name)

    replica.store.before = raise_conflict
    with pytest.raises(Conflict):
        replica.reporter.publish()


def test_progress_adds_no_writes_to_heartbeat_and_lease(root: Path) -> None:
    replica = Replica(root, plan=replace(PLAN, replicas=["master-0"]))
    writes: list[tuple[str, str]] = []
    replica.cycles(2)
    replica.store.before = lambda method, name: writes.append((method, name)) if method == "replace" else None
    replica.cycles(12)
    writes_without_progress, reported = list(writes), range(100, 112)
    writes.clear()
    for step in reported:
        replica.host.child.progress = JobProgress(step, 200, 1.0)
        replica.cycles(1)
    assert abs(len(writes) - len(writes_without_progress)) <= 1
    assert replica.written.progress.step >= reported[-1] - 4
    assert replica.job.progress.step >= reported[-1] - 4
    assert replica.job.progress.etaSeconds == 200 - replica.job.progress.step


@pytest.mark.parametrize("error", ["", "it answered 500"])
def test_the_leader_reports_the_end_once_and_keeps_the_hosts_until_then(root: Path, error: str) -> None:
    target = "POST https://example.com/…"
    results: list[Notification] = []
    notified: list[JobRecord] = []

    def notify(job: JobRecord) -> Notification | None:
        notified.append(job)
        return results[-1] if results else None

    replica = Replica(root, plan=replace(PLAN, replicas=["master-0"], notify="https://example.com/secret"), notify=notify)
    replica.write(replace(replica.job, notification=Notification(target)))
    replica.cycles(4)
    assert (replica.job.state, notified) == ("RUNNING", [])
    replica.host.ends(0)
    replica.cycles(50)
    assert (replica.job.state, replica.reporter.finished, notified) == ("SUCCEEDED", False, []), "files are looked for first"
    replica.host.supervisor.set_unsaved(UnsavedFiles())
    replica.cycles(1)
    assert (replica.job.state, replica.reporter.finished, len(replica.ledger.queue().entries)) == ("SUCCEEDED", False, 1)
    assert [r["exitCode"] for r in notified[0].replicas] == [0]
    moved = iter([True])  # by another writer in between

    def write_in_between(method: str, name: str) -> None:
        if (method, name) == ("replace", paths.job("job01")) and next(moved, False):
            replica.write(replace(replica.job, labels={"a": "b"}))

    replica.store.before = write_in_between
    results.append(Notification(target, NOW, 3, error))
    replica.cycles(1)
    assert not replica.reporter.finished
    replica.cycles(1)
    assert (replica.reporter.finished, replica.ledger.queue().entries) == (True, [])
    assert (replica.job.notification, replica.job.labels) == (Notification(target, NOW, 3, error), {"a": "b"})
    messages = [("WARNING", f"notify: {target} failed: {error}") if error else ("INFO", f"notify: {target} done")]
    assert [line for line in replica.host.messages if line[1].startswith("notify")] == messages
    later = Replica(
        root, incarnation="b", plan=replace(PLAN, replicas=["master-0"], notify="x"), notify=lambda _: pytest.fail("twice")
    )
    later.write(replace(later.job, lease=Lease()))
    later.host.supervisor.set_target_state(0, "over")
    later.cycles(2)
    assert later.reporter.finished
