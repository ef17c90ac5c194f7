"""The cycles of one host: it claims its job, tends the queue, and ends when no job needs it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_fakes import Clock, FakeJobFiles, Flaky
from test_agent_supervisor import Child

from hosts.agent.agent import Agent
from hosts.agent.reporter import HostFunctions
from hosts.agent.supervisor import Assignment
from jobs import folder_bucket, paths
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.queue_monitor import PAUSE_SECONDS
from jobs.records import JobRecord, Plan, ReplicaRecord, Task, UnsavedFiles
from jobs.states import JobState, ReplicaState

NOW = "2026-01-31T12:00:00.000Z"
LEASE = 9.0


class Host(FakeJobFiles):
    """The agent of one host, with a trainer that ends when the test says so, and all of its files."""

    def __init__(self, root: Path, incarnation: str = "a") -> None:
        self.root, self.clock, self._state = root, Clock(), root / "state"
        self.store = Flaky(FolderBucket(root))
        self.ledger = Ledger(self.store, sleep=lambda _: None)
        self.children: list[Child] = []
        self.messages: list[str] = []
        self.prepares: list[str] = []
        self.new_facts: dict[str, Any] | None = None
        self.is_archived = True
        self.unsaved_files: UnsavedFiles | None = UnsavedFiles()
        self.kept_jobs: list[str] | None = None
        self.diagnosed: list[tuple[str, int | None, str]] = []
        self.plan: Plan
        self.damage = ""
        self.early_connections = 0
        self.secret_files: list[Path] = []
        self.removable_secrets: list[Path] = []
        self.incarnation = incarnation
        self.agent = self.new_agent()

    def new_agent(self, idle_seconds: float = 0.0) -> Agent:
        return Agent(
            "master-0",
            self.incarnation,
            self.ledger,
            self,
            self.spawn,
            self.clock,
            lambda: NOW,
            1.0,
            LEASE,
            idle_seconds=idle_seconds,
        )

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        if self.damage:
            raise BucketError(self.damage)
        self.prepares.append(plan.jobId)
        self.plan = plan
        (self._state / "logs" / plan.jobId).mkdir(parents=True, exist_ok=True)
        return super().prepare(plan, replica)

    def facts(self) -> dict[str, Any] | None:
        new_facts, self.new_facts = self.new_facts, None
        return new_facts

    def diagnose(self, job: JobRecord, record: ReplicaRecord, end_seen: str) -> None:
        self.diagnosed.append((job.jobId, record.exitCode, end_seen))

    def unsaved(self, record: ReplicaRecord) -> UnsavedFiles | None:
        return self.unsaved_files

    def secrets(self) -> list[Path]:
        return list(self.secret_files)

    def tidy(self, job_ids: Collection[str], secrets: Iterable[Path]) -> None:
        self.kept_jobs = sorted(job_ids)
        self.removable_secrets = list(secrets)

    def connect_early(self) -> None:
        self.early_connections += 1

    def finish(self) -> bool:
        return self.is_archived

    def write_message(self, message: str, severity: str = "INFO") -> None:
        self.messages.append(message)

    def spawn(self, assignment: Assignment) -> Child:
        self.children.append(Child(len(self.children)))
        return self.children[-1]

    def cycles(self, count: int = 1) -> None:
        for _ in range(count):
            self.agent.run_cycle()
            if self.agent.supervisor:
                self.agent.supervisor.step()
            self.clock.sleep(1.0)

    def run_to_end(self, before_each: Sequence[Callable[[], None]] = ()) -> list[float]:
        """Run cycles until the agent is finished; call one of the functions before each; return the waits."""
        waits: list[float] = []
        while not self.agent.finished:
            if len(waits) < len(before_each):
                before_each[len(waits)]()
            waits.append(self.agent.run_cycle())
            self.clock.sleep(waits[-1])
        return waits

    def job(self, job_id: str = "job01") -> JobRecord:
        stored = self.ledger.job(job_id)
        return stored.record

    def submit(self, job_id: str = "job01", hosts: tuple[str, ...] = ("master-0",), **changes: Any) -> None:
        record = JobRecord(job_id, hosts=list(hosts), createTime=NOW)
        self.ledger.create_job(replace(record, **changes))
        self.ledger.create_plan(Plan(job_id, list(hosts), "task", [], {}))
        self.ledger.change_queue(lambda queue: queue.added(QueueEntry(job_id, list(hosts))))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_a_job_is_finished(host: Host) -> None:
    host.cycles()
    assert host.agent.finished
    assert host.agent.status == "no job has this host"


def test_a_record_of_an_earlier_job_of_this_id_is_not_continued(host: Host) -> None:
    host.submit()
    done = ReplicaRecord(
        "master-0", state=ReplicaState.EXITED, exitCode=0, restarts=3, jobCreateTime="2026-01-30T12:00:00.000Z"
    )
    host.ledger.write_replica("job01", done, None)
    host.cycles(3)
    record = host.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.state, record.restarts, record.jobCreateTime, host.job().state) == ("RUNNING", 0, NOW, "RUNNING")


@pytest.mark.parametrize(
    ("state", "plan", "end"),
    [
        (JobState.RUNNING, "as written", JobState.FAILED),
        (JobState.CANCELLING, "as written", JobState.CANCELLED),
        (JobState.PREPARING, "missing", JobState.FAILED),
        (JobState.PREPARING, "corrupt", JobState.FAILED),
    ],
)
def test_a_host_without_a_job_ends_one_whose_hosts_never_return(host: Host, state: JobState, plan: str, end: JobState) -> None:
    host.submit(hosts=("worker-0",), state=state, lease=JobRecord("x").with_holder("worker-0/1").lease)
    file = host.root / paths.plan("job01")
    written = Plan("job01", ["worker-0"], "task", [], {}, lostAfterSeconds=20.0, maxWaitTime=30.0)
    file.unlink() if plan == "missing" else file.write_bytes(b"{" if plan == "corrupt" else written.to_json())
    waits = host.run_to_end()
    assert (host.job().state, host.job().lostReplicas, host.ledger.queue().entries) == (end, ["worker-0"], [])
    assert set(waits[:-1]) == {PAUSE_SECONDS}, "requests to the bucket cost money"


@pytest.mark.parametrize("record", ["missing", "unreadable", "final", "its submitter's"])
def test_a_host_without_a_job_removes_what_others_left_in_the_queue(host: Host, record: str) -> None:
    state = JobState.FAILED if record == "final" else JobState.QUEUED
    host.submit(hosts=("worker-0",), state=state, lease=JobRecord("x").with_holder("fab 1", record == "its submitter's").lease)
    file = host.root / paths.job("job01")
    if record in ("missing", "unreadable"):
        file.unlink() if record == "missing" else file.write_bytes(b"{")
    host.run_to_end()
    assert host.ledger.queue().entries == []


def test_a_host_without_a_job_is_finished_once_the_leaders_of_others_are_alive(host: Host) -> None:
    for number in range(2):
        lease = JobRecord("x").with_holder(f"worker-{number}/1").lease
        host.submit(f"job0{number}", (f"worker-{number}",), state=JobState.RUNNING, lease=lease)

    def renew(number: int) -> None:
        stored = host.ledger.job(f"job0{number}")
        host.ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))

    polls = [lambda: None, lambda: renew(0), lambda: None, lambda: renew(1)]
    assert len(host.run_to_end(polls)) == len(polls)
    assert [host.job(f"job0{number}").state for number in range(2)] == ["RUNNING"] * 2


def test_a_host_is_the_replica_of_its_queue_entry(host: Host) -> None:
    candidates = {"master-0": ["worker-7"], "worker-0": ["worker-8", "master-0"]}
    host.ledger.create_job(JobRecord("job01", candidates=candidates))
    tasks = {name: Task(f'{{"cluster": {{"worker": ["{name}:2222"]}}}}') for name in candidates}
    addresses = {"worker-7": "10.0.0.7", "master-0": "10.0.0.1"}
    host.ledger.create_plan(Plan("job01", list(candidates), "task", [], tasks, addresses=addresses))
    host.ledger.change_queue(
        lambda queue: queue.added(QueueEntry("job00", ["worker-8"])).added(QueueEntry("job01", [], candidates=candidates))
    )
    host.cycles(30)  # the host worker-7 never appears, so this replica has the lease
    assert host.agent.supervisor.record.name == "worker-0"
    assert set(host.ledger.replicas("job01", candidates)) == {"worker-0"}
    job = host.job()
    assert (job.state, job.placement) == ("PREPARING", {"master-0": "worker-7", "worker-0": "master-0"})
    assert job.lease.holder == "worker-0/a"
    assert host.plan.tasks["worker-0"].tfConfig == '{"cluster": {"worker": ["10.0.0.1:2222"]}}'


def test_a_host_drops_a_job_that_runs_on_other_hosts(host: Host) -> None:
    host.submit()
    either = {"master-0": ["worker-7", "master-0"]}
    host.ledger.change_queue(
        lambda queue: queue.added(QueueEntry("job00", ["worker-7"])).added(QueueEntry("job02", [], candidates=either))
    )
    host.agent.run_cycle()
    assert host.kept_jobs == ["job01", "job02"]
    host.ledger.free_hosts("job00")
    host.ledger.free_hosts("job01")
    other = Host(host.root)
    other.run_to_end()
    assert (other.kept_jobs, other.agent.finished) == ([], True)


def test_a_host_runs_its_jobs_one_after_another_and_finishes(host: Host) -> None:
    host.submit()
    host.submit("job02")
    for job_id in ("job01", "job02"):
        host.cycles(4)
        assert host.agent.status == f"job {job_id} RUNNING, trainer RUNNING, restarts 0"
        host.children[-1].code = 0
        host.cycles(4)
        assert host.job(job_id).state == "SUCCEEDED"
    host.cycles(2)
    assert host.agent.finished
    assert (host.prepares, len(host.children), host.ledger.queue().entries) == (["job01", "job02"], 2, [])


def test_a_host_waits_while_another_job_has_it(host: Host) -> None:
    host.submit(hosts=("worker-0",))
    host.submit("job02", ("worker-0", "master-0"))
    host.cycles(9)
    assert (host.agent.finished, host.prepares) == (False, [])


@pytest.mark.parametrize("missing", ["plan", "handed over", "job"])
def test_a_job_is_not_claimed_before_it_is_complete(host: Host, missing: str) -> None:
    host.submit(lease=JobRecord("x").with_holder("fab 1", submitter=True).lease)
    if missing != "handed over":
        (host.root / (paths.plan("job01") if missing == "plan" else paths.job("job01"))).unlink()
    host.cycles(4)
    assert (host.agent.finished, host.prepares) == (False, [])


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_an_ended_job_is_unchanged_and_its_hosts_are_freed(host: Host, state: JobState) -> None:
    host.submit(state=state)
    before = host.job()
    host.cycles(int(LEASE))
    assert not host.agent.finished  # its last leader still has the time of a lease
    host.cycles(8)
    assert host.agent.finished
    assert (host.job(), host.prepares, host.ledger.queue().entries) == (before, [], [])


def test_an_agent_continues_the_record_of_its_earlier_incarnation(tmp_path: Path) -> None:
    former = Host(tmp_path)
    former.submit()
    former.cycles(4)
    later = Host(tmp_path, "b")
    later.cycles(4)
    assert "the replica or its host was stopped" in later.messages
    record = later.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.incarnation, record.restarts, record.state, len(later.children)) == ("b", 1, "RUNNING", 1)
    assert later.job().lease.holder == "master-0/b"


def test_a_garbled_record_of_an_earlier_incarnation_is_overwritten(host: Host) -> None:
    host.submit()
    garbled = host.root / paths.replica("job01", "master-0")
    garbled.parent.mkdir(parents=True)
    garbled.write_bytes(b"{")
    host.cycles(3)
    assert ReplicaRecord.from_json(garbled.read_bytes()).state == "RUNNING"


def test_a_failing_bucket_is_logged_once_and_its_recovery_too(host: Host) -> None:
    host.submit()
    host.cycles(2)

    def fails(method: str, name: str) -> None:
        raise BucketError("no route to the bucket")

    host.store.before = fails
    host.cycles(9)
    host.store.before = lambda method, name: None
    host.cycles(2)
    assert [line for line in host.messages if "cycle" in line] == [
        "a cycle of the agent failed, trying again: no route to the bucket",
        "the agent's cycles succeed again",
    ]


def test_a_full_bucket_loses_no_record_and_its_warning_has_a_remedy(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    host.submit()
    host.cycles(4)
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    with monkeypatch.context() as full:
        full.setattr(folder_bucket.os, "fsync", fails)
        host.children[-1].code = 3
        host.cycles(9)
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before
    remedy = "fab doctor names the full disk or bucket, and the jobs that use most of the bucket"
    error = f"[Errno 28] {host.root}: No space left on device: {remedy}"
    assert [line for line in host.messages if "cycle" in line] == [f"a cycle of the agent failed, trying again: {error}"]
    host.cycles(4)
    assert (host.job().state, host.ledger.queue().entries) == ("FAILED", [])


def test_a_job_s_log_has_no_recovery_from_what_failed_before_it(host: Host) -> None:
    host.submit()
    plan = host.root / paths.plan("job01")
    content = plan.read_bytes()
    plan.write_bytes(b"{")
    host.cycles(3)
    assert host.agent.status.startswith("no job is here: ")
    plan.write_bytes(content)
    host.cycles(3)
    assert host.agent.status.startswith("job job01 ")
    assert [line for line in host.messages if "cycle" in line] == []


def test_a_job_that_cannot_be_read_is_ended_by_its_own_hosts(host: Host) -> None:
    host.submit()
    host.submit("job02")
    host.cycles(3)
    (host.root / paths.job("job01")).write_bytes(b"{")
    host.cycles(int(2 * LEASE))
    assert host.children[0].stops == []  # it may still be repaired
    host.cycles(2)
    assert len(host.children[0].stops) == 1
    host.children[0].code = 143
    host.cycles(int(3 * LEASE))
    assert host.prepares == ["job01", "job02"]
    assert host.job("job02").state == "RUNNING"


@pytest.mark.parametrize("content", [b"{", None])
def test_a_job_with_a_corrupt_plan_is_ended_and_frees_its_host(
    host: Host, content: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    host.submit()
    host.submit("job02")
    plan = host.root / paths.plan("job01")
    plan.unlink() if content is None else plan.write_bytes(content)
    assert host.agent.run_cycle() == 1.0
    host.cycles(int(2 * LEASE))
    assert host.job().state == "QUEUED"  # it may still be repaired
    why = "plan.json is no JSON" if content else "jobs/job01/plan.json is not there, or knows no master-0"
    assert host.agent.status.startswith(f"no job is here: {why}")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"<4>agent: {why}")
    assert line.endswith("; trying again")
    host.cycles(int(3 * LEASE))
    assert host.job().state == "FAILED"
    assert host.job().errorMessage.startswith(
        "master-0 cannot start it: plan.json is no JSON" if content else "master-0 cannot"
    )
    assert host.prepares == ["job02"]


def test_a_job_whose_package_cannot_be_fetched_is_ended(host: Host) -> None:
    host.damage = "the package is damaged"
    host.submit()
    host.cycles(int(Plan.preparingSeconds))
    assert host.job().state == "QUEUED"
    host.cycles(5)
    assert (host.job().state, host.job().errorMessage) == ("FAILED", "master-0 cannot start it: the package is damaged")


def test_the_next_job_waits_for_the_version_that_fab_pushed(host: Host) -> None:
    current = [True]
    host.agent._is_current_version = lambda: current[0]
    host.submit()
    host.submit("job02")
    host.cycles(4)
    current[0] = False
    host.children[-1].code = 0
    host.cycles(6)
    assert (host.job().state, host.job("job02").state) == ("SUCCEEDED", "QUEUED")
    assert host.agent.finished
    assert host.ledger.queue().holder("master-0") is not None


def test_a_job_that_can_be_read_again_is_not_ended(host: Host) -> None:
    host.submit()
    host.cycles(3)
    job = host.root / paths.job("job01")
    for _ in range(3):
        content = job.read_bytes()
        job.write_bytes(b"{")
        host.cycles(int(LEASE))
        job.write_bytes(content)
        host.cycles()
    assert host.children[0].stops == []


def test_a_unit_stopped_while_it_claims_a_job_starts_no_trainer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.submit()
    prepare = host.prepare

    def prepare_and_stop(plan: Plan, replica: str) -> Assignment:
        host.agent.terminate()
        return prepare(plan, replica)

    monkeypatch.setattr(host, "prepare", prepare_and_stop)
    host.cycles(3)
    assert (host.agent.finished, host.prepares, host.children) == (True, ["job01"], [])


def test_the_queue_is_monitored_by_leaders_and_hosts_without_a_job(host: Host) -> None:
    reads: list[str] = []
    host.store.before = lambda method, name: reads.append(name) if (method, name) == ("read", paths.QUEUE) else None
    host.submit(hosts=("master-0", "worker-0"))
    host.cycles(2)

    def queue_reads() -> int:
        reads.clear()
        host.cycles(20)
        return len(reads)

    assert queue_reads() > 0, "it leads"
    stored = host.ledger.job("job01")
    host.ledger.change_job(stored, stored.record.with_holder("worker-0/1"))
    host.cycles()
    for _ in range(20):
        stored = host.ledger.job("job01")
        host.ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))
        reads.clear()
        host.cycles()
        assert reads == [], "another replica leads"
    host.agent.terminate()
    assert queue_reads() == 0


def test_a_host_is_idle_for_a_time_before_it_finishes(host: Host) -> None:
    host.agent = agent = host.new_agent(idle_seconds=60.0)
    host.submit()
    host.cycles(3)
    host.clock.sleep(100.0)
    host.children[-1].code = 0
    host.cycles(8)
    assert (host.job().state, agent.supervisor, agent.finished) == ("SUCCEEDED", None, False)
    assert agent.watched == paths.QUEUE
    host.cycles(50)
    assert not agent.finished
    host.cycles(12)
    assert agent.finished, "the time counts from the job's end"


def test_secrets_that_come_after_the_queue_was_read_are_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.secret_files, read = [Path("job01.json")], host.ledger.queue

    def queue() -> Queue:
        host.secret_files.append(Path("job02.json"))
        return read()

    monkeypatch.setattr(host.ledger, "queue", queue)
    host.cycles()
    assert host.removable_secrets == [Path("job01.json")]


def test_a_host_that_monitors_others_is_idle_for_a_time_too(host: Host) -> None:
    host.agent = host.new_agent(idle_seconds=60.0)
    lease = JobRecord("x").with_holder("worker-0/1").lease
    host.submit(hosts=("worker-0",), state=JobState.RUNNING, lease=lease)

    def renew() -> None:
        stored = host.ledger.job("job01")
        host.ledger.change_job(stored, replace(stored.record, lease=stored.record.lease.renewed()))

    began = host.clock()
    host.run_to_end([renew] * 100)
    assert 60.0 <= host.clock() - began < 60.0 + 2 * PAUSE_SECONDS


def test_a_host_is_quick_to_see_the_hand_over_of_a_job(host: Host) -> None:
    host.agent = host.new_agent(idle_seconds=60.0)
    host.cycles(20)
    submitted = JobRecord("job01", createTime=NOW).lease.with_holder("ann/1", submitter=True)
    host.submit(lease=submitted)
    assert [host.agent.run_cycle() for _ in range(2)] == [1 / 40] * 2
    assert (host.early_connections, host.agent.supervisor) == (2, None)
    assert host.agent.watched == paths.job("job01")
    host.clock.sleep(11.0)
    assert host.agent.run_cycle() == 1.0, "it takes long"
    stored = host.ledger.job("job01")
    host.ledger.change_job(stored, stored.record.with_holder(""))
    host.cycles()
    assert host.agent.watched == paths.job("job01")


def test_rounds_are_faster_for_seconds_after_a_job(host: Host) -> None:
    host.submit()
    host.submit("job00", hosts=("worker-0",))
    host.submit("job02", hosts=("worker-0", "master-0"))
    host.cycles(4)
    host.clock.sleep(60.0)
    host.cycles(2)
    host.children[-1].code = 0
    host.cycles(4)
    assert (host.job().state, host.agent.supervisor, host.agent.finished) == ("SUCCEEDED", None, False)
    assert host.agent.run_cycle() == 0.25
    host.clock.sleep(10.0)
    assert host.agent.run_cycle() == 1.0


def test_an_unreadable_job_without_a_leader_does_not_block_its_host(host: Host) -> None:
    host.submit()
    (host.root / paths.job("job01")).write_bytes(b"{")
    host.cycles(int(2 * LEASE))
    assert host.ledger.queue().entries == []
    assert host.agent.finished


def test_the_facts_of_the_host_are_recorded(host: Host) -> None:
    host.submit()
    host.new_facts = {"data": {"files": 1}}
    host.cycles(5)
    assert host.job().manifest["data"] == {"files": 1}


def test_a_stopped_unit_reports_its_replica_and_leaves_the_job(host: Host) -> None:
    host.submit()
    host.cycles(4)
    host.agent.terminate()
    host.is_archived = False
    host.cycles(2)
    assert (len(host.children[0].stops), host.agent.finished) == (1, False)
    host.children[0].code = 143
    host.cycles(3)
    assert not host.agent.finished  # its log is not in the bucket yet
    host.is_archived = True
    host.cycles(2)
    assert host.agent.finished
    record = host.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.state, record.exitCode, host.job().state) == (ReplicaState.EXITED, 143, "RUNNING")
    assert (record.preempted, "this host is preempted" in host.messages) == (False, False)
    assert host.ledger.queue().entries != []


def test_a_unit_stopped_before_it_found_a_job_finishes(host: Host) -> None:
    host.submit()
    host.agent.terminate()
    host.cycles()
    assert (host.agent.finished, host.prepares) == (True, [])


def test_rounds_are_faster_while_a_job_starts_or_ends(host: Host) -> None:
    assert host.agent.run_cycle() == 0.25
    host.submit(hosts=("master-0", "worker-0"))
    host.cycles()
    assert host.agent.run_cycle() in (0.0, 1.0)
    host.cycles(3)
    assert host.agent.run_cycle() == 1.0
    host.ledger.request_cancel("job01", b"{}")
    waits = [host.agent.run_cycle() for _ in range(2)]
    assert waits == [0.0, 0.25]


def test_a_host_that_cannot_start_a_job_leaves_it_to_its_leader(host: Host) -> None:
    host.damage = "the disk is full"
    host.submit(hosts=("worker-0", "master-0"), state=JobState.RUNNING)

    def renew_lease() -> None:
        stored = host.ledger.job("job01")
        record = stored.record
        lease = record.lease.renewed() if record.lease.holder else record.lease.with_holder("worker-0/1")
        host.ledger.change_job(stored, replace(record, lease=lease))

    for _ in range(0, 2 * int(Plan.preparingSeconds), 4):
        renew_lease()
        host.cycles()
        host.clock.sleep(3.0)
    assert (host.job().state, host.job().lease.holder) == ("RUNNING", "worker-0/1")
    assert host.agent.status == "no job is here: the disk is full"
    host.cycles(int(LEASE) + 2)
    assert (host.job().state, host.job().errorMessage) == ("FAILED", "master-0 cannot start it: the disk is full")


@pytest.mark.parametrize("preempted", [True, False])
def test_a_stopped_unit_records_whether_its_host_is_preempted(tmp_path: Path, preempted: bool) -> None:
    host, queries = Host(tmp_path), []

    def ask() -> bool:
        queries.append(1)
        return preempted

    host_functions = HostFunctions(preempted=ask)
    host.agent = Agent("master-0", "a", host.ledger, host, host.spawn, host.clock, lambda: NOW, 1.0, LEASE, host_functions)
    host.submit()
    host.cycles(3)
    assert queries == []
    host.agent.terminate()
    host.cycles(2)
    assert not host.agent.finished
    host.children[-1].code = 143
    host.cycles(2)
    assert (host.agent.finished, len(queries)) == (True, 1)
    record = host.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.state, record.preempted) == ("EXITED", preempted)
    assert ("this host is preempted" in host.messages) is preempted


def test_a_failed_job_is_diagnosed_before_its_files_are_removed(host: Host) -> None:
    host.submit()
    host.submit("job02")
    host.cycles(4)
    host.children[-1].code = 3
    host.is_archived = False
    host.cycles(5)
    assert host.job().state == "FAILED"
    assert set(host.diagnosed) == {("job01", 3, NOW)}
    assert host.kept_jobs == ["job01", "job02"]
    assert host.prepares == ["job01"]
    host.is_archived = True
    host.cycles(6)
    assert host.prepares == ["job01", "job02"]
    host.children[-1].code = 0
    host.cycles(6)
    assert host.job("job02").state == "SUCCEEDED"
    assert set(host.diagnosed) == {("job01", 3, NOW)}


def test_unsaved_files_are_recorded_before_the_host_continues(host: Host) -> None:
    host.unsaved_files = None
    host.submit()
    host.submit("job02")
    host.cycles(4)
    host.children[-1].code = 0
    host.cycles(6)
    assert (host.job().state, host.prepares) == ("SUCCEEDED", ["job01"])
    assert host.ledger.queue().holder("master-0").jobId == "job02", "the queue does not wait"  # type: ignore[union-attr]
    host.unsaved_files = UnsavedFiles(True, ["model"], 1, 7)
    assert [host.agent.run_cycle(), host.agent.run_cycle()] == [0.0, 0.0], "each is reported at once, as a person waits for it"
    host.cycles(1)
    assert host.ledger.replicas("job01", ["master-0"])["master-0"].unsaved == host.unsaved_files
    assert host.prepares == ["job01", "job02"]


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_restarted_host_finishes_its_part_of_a_job_that_has_ended(tmp_path: Path, is_queued: bool) -> None:
    former = Host(tmp_path)
    former.submit()
    former.submit("job02")
    former.is_archived, former.unsaved_files = False, None
    former.cycles(4)
    former.children[-1].code = 3
    former.cycles(4)
    assert (former.job().state, former.ledger.queue().entry("job01")) == ("FAILED", None)
    if is_queued:  # its leader had not yet removed it
        entries = [QueueEntry("job01", ["master-0"], has_hosts=True), QueueEntry("job02", ["master-0"])]
        former.ledger.change_queue(lambda queue: replace(queue, entries=entries))
    later = Host(tmp_path, "b")
    later.agent._now = lambda: "2026-01-31T13:00:00.000Z"
    later.is_archived = False
    later.cycles(3)
    assert (later.prepares, later.children, later.kept_jobs) == (["job01"], [], None), "its files are still needed"
    assert set(later.diagnosed) == {("job01", 3, NOW)}, "the time since the end is no difference of clocks"
    record = later.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.exitCode, record.unsaved, record.incarnation) == (3, UnsavedFiles(), "b")
    later.is_archived = True
    later.cycles(4)
    assert (later.prepares, later.job("job02").state) == (["job01", "job02"], "RUNNING")
    third = Host(tmp_path, "c")
    third.cycles(3)
    assert third.prepares == ["job02"]


@pytest.mark.parametrize(
    ("state", "code", "end"), [(ReplicaState.EXITED, 143, NOW), (ReplicaState.RUNNING, 137, "2026-01-31T11:00:00.000Z")]
)
def test_a_restarted_host_does_not_change_the_end_of_its_replica(
    tmp_path: Path, state: ReplicaState, code: int, end: str
) -> None:
    former = Host(tmp_path)
    former.submit()
    former.is_archived, former.unsaved_files = False, None
    former.cycles(4)
    former.children[-1].code = 3
    former.cycles(4)
    ended = former.ledger.replicas("job01", ["master-0"])["master-0"]
    beat = "2026-01-31T11:00:00.000Z"
    stopped = replace(ended, state=state, exitCode=143, awaits_restart=True, endTime=NOW, restarts=1, heartbeatTime=beat)
    former.ledger.write_replica("job01", stopped, former.ledger.replica_version("job01", "master-0"))
    later = Host(tmp_path, "b")
    later.agent._now = lambda: "2026-01-31T13:00:00.000Z"
    later.cycles(4)
    record = later.ledger.replicas("job01", ["master-0"])["master-0"]
    assert (record.state, record.exitCode, record.endTime, record.restarts) == (ReplicaState.EXITED, code, end, 1)


def test_a_host_does_not_finish_what_it_can_not_or_must_not(tmp_path: Path) -> None:
    """Check a job without its files, one that was deleted, a later one of its id, and one that runs elsewhere."""
    former = Host(tmp_path)
    former.submit()
    former.is_archived = False
    former.cycles(4)
    former.children[-1].code = 3
    former.cycles(4)
    former.submit("job02")
    later = Host(tmp_path, "b")
    later.damage = "the package is damaged"
    later.cycles(int(2 * LEASE) + 1)
    later.damage = ""
    assert later.job().errorMessage.startswith("The replica master 0 exited with a non-zero status of 3")
    later.cycles(4)
    assert (later.prepares, later.job("job02").state) == (["job02"], "RUNNING")
    record = later.root / paths.job("job02")
    content = later.job("job02")
    for lost in (None, b"{", replace(content, createTime="2026-02-01T12:00:00.000Z").ended("").to_json(), content.to_json()):
        later.ledger.change_queue(lambda queue: Queue())
        record.unlink(missing_ok=True) if lost is None else record.write_bytes(lost)
        third = Host(tmp_path, "c")
        third.remember(QueueEntry("job02", ["master-0"], createTime=NOW))
        third.run_to_end()
        assert (third.prepares, third.unfinished()) == ([], None)


def test_a_host_waits_for_a_trainer_that_has_not_stopped(host: Host) -> None:
    host.submit(hosts=("master-0",))
    host.cycles(4)
    stored = host.ledger.job("job01")
    host.ledger.change_job(stored, stored.record.ended("it was not meant to be"))
    host.cycles(3)
    assert (len(host.children[-1].stops), host.diagnosed) == (1, [])
    assert host.ledger.replicas("job01", ["master-0"])["master-0"].unsaved is None, "it may still write files"
    host.children[-1].code = 143
    host.cycles(3)
    assert set(host.diagnosed) == {("job01", 143, NOW)}
