"""A simulated cluster: hosts with the real agent, submitters, cancellers, and the invariants."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import StringIO
from typing import Any
from unittest.mock import patch

from shared_fakes import FakeJobFiles
from simulated import Faults, Interrupted, Killed, Process, SimulatedStore, Violation, World

from hosts.agent.agent import Agent
from hosts.agent.replica_rules import Exit
from hosts.agent.reporter import HostFunctions
from hosts.agent.supervisor import Assignment, Supervisor
from jobs import paths, records
from jobs.bucket import BucketError, Conflict
from jobs.host_power import HostStarter
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER
from jobs.records import JobRecord, Plan, ReplicaRecord, Task
from jobs.serialization import RecordError
from jobs.states import JobState
from ops.submit.claim import BusyError, CancelledError, Canceller, DuplicateIdError, LeaseLostError, Submitter

POLL = 2.0
LEASE = 8.0
RULES: dict[str, Any] = {
    "heartbeatSeconds": 4.0,
    "leaseSeconds": LEASE,
    "lostAfterSeconds": 20.0,
    "preparingSeconds": 120.0,
    "maxWaitTime": 300.0,
    "stopSeconds": 2.0,
}
FAULTS_END = 150.0
OPERATOR_DELAY = 600.0
"""Seconds after the last fault, by which a job that waits for an operator would be FAILED."""
TIME_LIMIT = 4000.0
_KILLED, _STOPPED = -9, (-15, 143, 0)

# Records are immutable and read often: cached parsing takes a third of the time.
_PARSED = {kind: staticmethod(lru_cache(maxsize=4096)(kind.from_json)) for kind in (JobRecord, ReplicaRecord, Plan, Queue)}


@contextmanager
def _simulate_environment() -> Iterator[None]:
    """Patch what differs from a real host during a schedule: fix wall-clock times and mute the journal."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(records, "now", lambda: "2026-01-31T00:00:00.000Z"))
        stack.enter_context(redirect_stderr(StringIO()))
        for kind, parse in _PARSED.items():
            stack.enter_context(patch.object(kind, "from_json", parse))
        yield


@dataclass
class JobFacts:
    """The externally known facts of one job."""

    work: float
    fails: bool
    rules: dict[str, Any]
    acknowledged: bool = False
    cancelled: bool = False
    ends: bool = False
    again: int = 0
    done: set[str] = field(default_factory=set)
    ended: JobState | None = None
    message: str = ""


class Trainer:
    """A trainer: the chief's ends with its work, others also or when stopped. Some request a restart."""

    def __init__(self, host: Host, job: Assignment) -> None:
        self.host, self.job_id, self.name = host, job.plan.jobId, job.name
        self.pid, self.lines, self.tail, self.stopping = 1, 0, "", False
        self.first_error = self.progress = None
        world = host.cluster.world
        job_facts = host.cluster.facts[self.job_id]
        ends = job.name == job.plan.chief or (job_facts.ends and not job.plan.is_parameter_server(job.name))
        self.ends_at = world.time + job_facts.work * world.random.choice((0.5, 1, 2)) if ends else float("inf")
        self.code = world.random.choice((1, 137, 255)) if job_facts.fails else 0
        if job_facts.again > 0 and not job_facts.fails and ends:
            job_facts.again, self.code = job_facts.again - 1, 42
        self.stop_at: float | None = None
        self.killed = False

    def stop(self, seconds: float) -> None:
        world = self.host.cluster.world
        self.stopping = True
        self.stop_at = world.time + world.random.choice((0.1, seconds))

    def poll(self) -> Exit | None:
        time, job_facts = self.host.cluster.world.time, self.host.cluster.facts[self.job_id]
        self.lines += 1
        if self.killed:
            code = _KILLED
        elif self.stop_at is not None and time >= self.stop_at:
            code = self.host.cluster.world.random.choice(_STOPPED)
        elif time >= self.ends_at:
            code = self.code
            job_facts.done |= {self.name} if code == 0 else set()
        else:
            return None
        self.host.trainer = None
        return Exit(code)

    def due(self) -> float:
        ends = self.ends_at if self.stop_at is None else min(self.ends_at, self.stop_at)
        return max(ends - self.host.cluster.world.time, 0.0)


class SimulatedFiles(FakeJobFiles):
    """Files whose package cannot always be fetched."""

    def __init__(self, host: Host) -> None:
        self._simulated = host

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        self._simulated.process_sleep(0.2)
        if self._simulated.cluster.world.chance(self._simulated.cluster.world.faults.before):
            raise BucketError("the package cannot be fetched")
        return super().prepare(plan, replica)

    def remember(self, entry: QueueEntry) -> None:
        self._simulated.unfinished = entry

    def unfinished(self) -> QueueEntry | None:
        return self._simulated.unfinished

    def forget(self, job_id: str) -> None:
        self._simulated.unfinished = None

    def write_message(self, message: str, severity: str = "INFO") -> None:
        self._simulated.cluster.world.log(f"{self._simulated.name}: {message}")


@dataclass
class Host:
    """A machine with its unit, which restarts the agent after a crash, and at intervals if none runs."""

    cluster: Cluster
    name: str
    up: bool = True
    preempted: bool = False
    lives: int = 0
    trainer: Trainer | None = None
    agent: Agent | None = None
    unfinished: QueueEntry | None = None
    processes: list[Process] = field(default_factory=list)

    def start(self) -> None:
        """Start the unit's main process: one thread for the bucket, one for the trainer."""
        if not self.up or any(process.alive for process in self.processes):
            return
        self.lives += 1
        world = self.cluster.world
        name = f"{self.name}#{self.lives:x}"
        reporter = Process(world, name, self._report)
        self.reporter = reporter
        main = Process(world, f"{name}/main", self._supervise, reporter.machine)
        self.processes = [reporter, main]
        self.agent = Agent(
            self.name,
            f"{self.lives:x}",
            Ledger(SimulatedStore(reporter), reporter.sleep),
            SimulatedFiles(self),
            self._spawn,
            reporter.clock,
            reporter.now,
            POLL,
            LEASE,
            HostFunctions(preempted=lambda: self.preempted, starter=lambda: self.cluster.starter(reporter)),
        )

    def process_sleep(self, seconds: float) -> None:
        self.reporter.sleep(seconds)

    def _report(self, process: Process) -> None:
        agent = self.agent
        assert agent is not None
        try:
            while not agent.finished:
                process.sleep(agent.run_cycle())
        except Killed:
            self.cluster.world.schedule(0.0, self.die)
            raise
        self.cluster.world.schedule(self.cluster.timer, self.start)

    def _supervise(self, process: Process) -> None:
        agent = self.agent
        assert agent is not None
        try:
            while not agent.finished:
                supervisor = agent.supervisor
                wait = supervisor.step() if supervisor else 2.0
                process.sleep(min(max(wait, 0.05), 2.0))
        except Killed:
            self.cluster.world.schedule(0.0, self.die)
            raise

    def _spawn(self, job: Assignment) -> Trainer:
        if self.trainer is not None:
            raise Violation(f"{self.name} runs {self.trainer.job_id} and starts {job.plan.jobId}")
        self.cluster.check_start(self, job)
        self.trainer = Trainer(self, job)
        return self.trainer

    def die(self) -> None:
        """Kill the unit's main process with its control group; the unit restarts it."""
        for process in self.processes:
            process.kill()
        self.trainer = None
        self.cluster.world.schedule(2.0, self.start)

    def power_off(self, seconds: float) -> None:
        self.cluster.world.log(f"{self.name} loses its power for {seconds:g} s")
        self.up = False
        self.die()
        self.cluster.world.schedule(seconds, self.power_on)

    def preempt(self) -> None:
        """Stop the unit, and some seconds later the power, until the host is started."""
        if not self.up or self.preempted:
            return
        self.cluster.world.log(f"{self.name} is preempted")
        self.preempted = True
        if self.agent:
            self.agent.terminate()
        self.cluster.world.schedule(self.cluster.world.random.uniform(1, 30), self.lose_power)

    def lose_power(self) -> None:
        self.up = False
        self.die()

    def power_on(self) -> None:
        self.up, self.preempted = True, False
        self.start()


class Cluster:
    """The state of one schedule, and its invariants."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.timer = 60.0
        self.facts: dict[str, JobFacts] = {}
        self.highest: Counter[str] = Counter()
        self.renewed: dict[str, float] = {}
        self.submitters: list[Process] = []
        random = world.random
        world.on_write = self.check_write
        size = random.choice((1, 2, 2, 3, 3, 4))
        self.hosts = [Host(self, name) for name in ("master-0", "worker-0", "ps-0", "worker-1")[:size]]
        for host in self.hosts:
            world.schedule(random.uniform(0, 5), host.start)
        for number in range(random.choice((1, 1, 2, 2, 3))):
            self.submit(f"job{number}", random.uniform(0, 25))
            if world.chance(0.2):
                self.submit(f"job{number}", random.uniform(0, 25))  # the same id, by another user or repeated
            if world.chance(0.25):
                self.cancel(f"job{number}", random.uniform(0, 60))
        if world.chance(0.3):
            world.schedule(
                random.uniform(5, 90), lambda: random.choice(self.hosts).power_off(random.choice((10.0, 60.0, 200.0)))
            )
        for _ in range(random.choice((0, 0, 1, 3))):
            world.schedule(random.uniform(5, 90), self.kill_trainer)
        # Whether and from when on hosts can be started: spot hosts can be unavailable for a while.
        self.starts_from = random.choice((0.0, 0.0, 140.0)) if world.chance(0.4) else None
        if self.starts_from is not None:
            for host in random.sample(self.hosts, random.randint(1, size)):
                world.schedule(random.uniform(5, 90), host.preempt)
        world.faults = world.faults.times(random.choice((0.0, 0.5, 1.0, 3.0)))
        world.schedule(FAULTS_END, self.stop_faults)

    # Actors

    def starter(self, process: Process) -> HostStarter | None:
        """Return the client that starts hosts, or None if hosts cannot be started."""
        if self.starts_from is None:
            return None
        names = [host.name for host in self.hosts]
        return HostStarter(self.request_start, names, process.clock, partial(self.world.schedule, 1.0))

    def request_start(self, name: str) -> str:
        """Answer a request to start a host."""
        host = next(host for host in self.hosts if host.name == name)
        if self.starts_from is None or self.world.time < self.starts_from:
            return "no spot host is available"
        if host.preempted and host.up:
            return "it is not stopped yet"
        if not host.up:
            self.world.schedule(10.0, host.power_on)
        return ""

    def kill_trainer(self) -> None:
        """Send SIGKILL to a trainer, which its supervisor detects by itself."""
        if running := [host.trainer for host in self.hosts if host.trainer]:
            self.world.random.choice(running).killed = True

    def submit(self, job_id: str, at: float) -> None:
        random = self.world.random
        rules = {
            "restartPolicy": random.choice(("replica", "replica", "all")),
            "optionalRoles": random.choice(([], ["worker"], ["worker", "ps"])),
            "maxRestarts": random.choice((1, 5)),
            "stallTimeout": random.choice((None, None, 60.0)),
            "gracePeriod": random.choice((0.0, 5.0, 30.0)),
        }
        if random.random() < 0.3:
            rules |= {"successPolicy": "all", "optionalRoles": []}
        ends = "successPolicy" in rules or random.random() < 0.3
        restart_requests = random.choice((0, 0, 0, 1, 3))
        self.facts.setdefault(
            job_id, JobFacts(random.uniform(2, 30), self.world.chance(0.1), rules, ends=ends, again=restart_requests)
        )
        chosen = random.sample(self.hosts, random.randint(1, len(self.hosts))) if self.world.chance(0.3) else self.hosts
        names = [host.name for host in self.hosts if host in chosen]
        candidates = self._candidates_by_role(names) if self.world.chance(0.5) else {name: [name] for name in names}

        def start_process() -> None:
            number = len(self.submitters)
            self.submitters.append(Process(self.world, f"submitter{number}", lambda p: self._submit(p, job_id, candidates)))

        self.world.schedule(at, start_process)

    def _candidates_by_role(self, names: list[str]) -> dict[str, list[str]]:
        """Return each replica's candidates by role; for the first any host that trains."""
        trainers = [host.name for host in self.hosts if host.name != "ps-0"]
        workers = [name for name in trainers if name != "master-0"]
        hosts_by_role = {"master-0": trainers, "ps-0": ["ps-0"]}
        return {name: [name, *(other for other in hosts_by_role.get(name, workers) if other != name)] for name in names}

    def _submit(self, process: Process, job_id: str, candidates: dict[str, list[str]]) -> None:
        world, job_facts = self.world, self.facts[job_id]
        ledger = Ledger(SimulatedStore(process), process.sleep)
        names = list(candidates)
        record = JobRecord(job_id, candidates=candidates, priority=world.random.choice((0, 0, 0, 5)), createTime=process.now())
        submitter = Submitter(ledger, record, process.name)
        process.interruptible = True
        try:
            _persist(process, lambda: submitter.claim(may_wait=True))
            for _ in range(world.random.randint(0, 3)):
                process.sleep(2.0)
                _persist(process, submitter.renew)
            tasks = {name: Task("{}") for name in names}
            plan = Plan(job_id, names, "task", [], tasks, **RULES, **job_facts.rules)
            _persist(process, lambda: ledger.create_plan(plan))
            ahead = _persist(process, submitter.ahead)
            if not ahead:
                _persist(process, submitter.prepare)
                process.sleep(1.0)
            _persist(process, submitter.hand_over)
        except (DuplicateIdError, BusyError, LeaseLostError):
            return
        except (CancelledError, Interrupted):
            process.interruptible = False
            job_facts.cancelled = True
            _persist(process, lambda: submitter.give_up("", cancelled=True))
            return
        finally:
            process.interruptible = False
        job_facts.acknowledged = True
        world.log(f"{process.name} has handed off {job_id}")
        for host in self.hosts:  # fab starts the units
            if host.name in submitter.usable_hosts:
                world.schedule(0.1, host.start)

    def cancel(self, job_id: str, at: float) -> None:
        def start_process() -> None:
            Process(self.world, f"canceller of {job_id}", lambda process: self._cancel(process, job_id))

        self.world.schedule(at, start_process)

    def _cancel(self, process: Process, job_id: str) -> None:
        job_facts = self.facts[job_id]
        canceller = Canceller(
            Ledger(SimulatedStore(process), process.sleep), ChangeTimer(process.clock), process.name, job_id, b"{}", LEASE
        )
        if paths.job(job_id) not in self.world.objects:
            return
        job_facts.cancelled = True
        while True:
            try:
                record = canceller.step()
            except (BucketError, RecordError, Conflict):
                record = None
            if record is not None and record.final:
                return
            process.sleep(1.0)

    def stop_faults(self) -> None:
        """Stop all faults: from now on every job must end."""
        self.world.faults = self.world.faults.times(0)
        if self.starts_from is None:
            self.start_all_hosts()
        else:
            self.world.schedule(OPERATOR_DELAY, self.start_all_hosts)  # until then running hosts start the others

    def start_all_hosts(self) -> None:
        """Start every stopped host."""
        for host in self.hosts:
            if not host.up:
                host.power_on()

    # Invariants

    def check_write(self, name: str, before: bytes | None, after: bytes, writer: str) -> None:
        """Check each write when it takes effect."""
        world = self.world
        if name == paths.QUEUE:
            queue = Queue.from_json(after)
            holders = Counter(host for entry in queue.entries if entry.has_hosts for host in entry.hosts)
            if shared_hosts := [host for host, count in holders.items() if count > 1]:
                raise Violation(f"{shared_hosts[0]} is held by two jobs: {queue}")
            if world.verbose:
                world.log(f"{writer}: queue {[(e.jobId, 'held' if e.has_hosts else 'waits') for e in queue.entries]}")
        elif name.endswith("/job.json"):
            self._check_job_write(JobRecord.from_json(before) if before else None, JobRecord.from_json(after), writer)

    def _check_job_write(self, old: JobRecord | None, new: JobRecord, writer: str) -> None:
        job_facts = self.facts[new.jobId]
        if self.world.verbose:
            self.world.log(f"{writer}: {new.jobId} {new.state} {new.lease} {new.errorMessage}")
        if old is not None:
            if old.final and new.state is not old.state:
                raise Violation(f"{writer} moves {new.jobId} from {old.state}, which is final, to {new.state}")
            if new.lease.epoch < old.lease.epoch:
                raise Violation(f"{writer} writes {new.jobId} in epoch {new.lease.epoch} over {old.lease.epoch}")
            if new.lease.epoch == old.lease.epoch and new.lease.holder != old.lease.holder:
                raise Violation(f"two hold the lease of {new.jobId} in epoch {new.lease.epoch}")
            holder_name = self._holder_name(writer, new)
            if new.lease.epoch == old.lease.epoch and old.lease.holder not in ("", holder_name):
                raise Violation(f"{writer} writes {new.jobId} under the lease of {old.lease.holder}")
            silent = self.world.time - self.renewed.get(new.jobId, 0.0)
            is_other_holder = old.lease.holder.partition("/")[0] not in ("", holder_name.partition("/")[0])
            if new.lease.epoch > old.lease.epoch and is_other_holder and silent < LEASE * 0.95:
                raise Violation(f"{writer} takes the lease of {old.lease.holder}, which was renewed {silent:.2f} s ago")
        self.renewed[new.jobId] = self.world.time
        if new.final and job_facts.ended is None:
            job_facts.ended, job_facts.message = new.state, new.errorMessage
            if new.state is JobState.SUCCEEDED and (missing := self._replicas_for_success(new.jobId) - job_facts.done):
                raise Violation(f"{new.jobId} SUCCEEDED without {sorted(missing)}")
            if job_facts.acknowledged and new.errorMessage == NOT_HANDED_OVER:
                raise Violation(f"{new.jobId} was handed off, but ended as if it was not")

    def _replicas_for_success(self, job_id: str) -> set[str]:
        """Return the replicas that count for the job's success."""
        plan = Plan.from_json(self.world.objects[paths.plan(job_id)][0])
        return {name for name in plan.replicas if plan.counts_for_success(name)}

    def _holder_name(self, writer: str, job: JobRecord) -> str:
        """Return a process's name in a lease: for a host, the name of its replica."""
        host, _, incarnation = writer.partition("#")
        queue = Queue.from_json(self.world.objects[paths.QUEUE][0])
        holder = queue.entry(job.jobId) or job
        replica = next((replica for replica, its in holder.placement.items() if its == host), host)
        return f"{replica}/{incarnation}" if incarnation else writer

    def check_start(self, host: Host, job: Assignment) -> None:
        """Check the start of a trainer: its job holds this host and has not ended by the host's last read."""
        supervisor = host.agent.supervisor if host.agent else None
        reporter = host.agent._reporter if host.agent else None
        last_job = reporter.job if reporter else None
        if isinstance(supervisor, Supervisor) and last_job is not None and last_job.final:
            raise Violation(f"{host.name} starts {last_job.jobId}, which it has read as {last_job.state}")
        attempt = max(supervisor._attempt, 0) if supervisor else 0
        key = f"{host.name} {job.plan.jobId}"
        if attempt < self.highest[key]:
            raise Violation(f"{host.name} starts attempt {attempt} of {job.plan.jobId} after {self.highest[key]}")
        self.highest[key] = attempt
        queue = Queue.from_json(self.world.objects[paths.QUEUE][0])
        holder = queue.holder(host.name)
        record = JobRecord.from_json(self.world.objects[paths.job(job.plan.jobId)][0])
        if (holder is None or holder.jobId != job.plan.jobId) and not record.final:
            raise Violation(f"{host.name} starts {job.plan.jobId}, which does not hold it")
        if not record.final and record.placement.get(job.name) not in (None, host.name):
            raise Violation(f"{host.name} starts {job.name} of {job.plan.jobId}, which is {record.placement}")
        for other in self.hosts:
            if other is not host and other.trainer and (other.trainer.job_id, other.trainer.name) == (job.plan.jobId, job.name):
                raise Violation(f"{host.name} starts {job.name} of {job.plan.jobId}, which runs on {other.name}")

    def is_over(self) -> bool:
        """Return True once no event can follow."""
        if self.world.time < FAULTS_END or any(host.trainer for host in self.hosts):
            return False
        if any(process.alive for process in self.submitters):
            return False
        if paths.QUEUE in self.world.objects and Queue.from_json(self.world.objects[paths.QUEUE][0]).entries:
            return False
        return all(job_facts.ended or not self._exists(job_id) for job_id, job_facts in self.facts.items())

    def _exists(self, job_id: str) -> bool:
        return paths.job(job_id) in self.world.objects

    def check_end(self) -> None:
        """Check the invariants that hold once all faults are over."""
        for job_id, job_facts in self.facts.items():
            if self._exists(job_id) and not job_facts.ended:
                raise Violation(f"{job_id} never ends: {self.world.objects[paths.job(job_id)][0]!r}")
            if job_facts.acknowledged and not self._exists(job_id):
                raise Violation(f"{job_id} was handed off and is lost")
            if job_facts.ended is JobState.CANCELLED and not job_facts.cancelled:
                raise Violation(f"{job_id} is CANCELLED without a request")
            if self.starts_from is not None and "no heartbeat" in job_facts.message:
                raise Violation(f"{job_id} FAILED for missing hosts that can be started: {job_facts.message}")
            valid_reasons = ("lost", "did not start", "was started again", "times in a row", "restarts")
            unexplained = not any(word in job_facts.message for word in valid_reasons)
            if job_facts.ended is JobState.FAILED and job_facts.acknowledged and not job_facts.fails and unexplained:
                raise Violation(f"{job_id} FAILED without a reason: {job_facts.message}")
        if paths.QUEUE in self.world.objects:
            entries = Queue.from_json(self.world.objects[paths.QUEUE][0]).entries
            if entries:
                raise Violation(f"the cluster is blocked by {[entry.jobId for entry in entries]}")
        if running := [host.name for host in self.hosts if host.trainer]:
            raise Violation(f"a trainer outlives its job on {running}")


def _persist(process: Process, work: Any) -> Any:
    """Retry while the bucket fails temporarily, as fab does."""
    while True:
        try:
            return work()
        except (BucketError, Conflict):
            process.sleep(1.0)


def play(seed: int, trace: list[str] | None = None) -> World:
    """Play one schedule to its end; raise Violation if an invariant does not hold."""
    random.seed(seed)  # for random choices of the code under test
    world = World(seed, Faults())
    if trace is not None:
        world.verbose, world.trace = True, trace
    with _simulate_environment():
        cluster = Cluster(world)
        try:
            world.run(TIME_LIMIT, cluster.is_over)
            cluster.check_end()
        except Violation as violation:
            raise Violation(f"seed {seed}, at {world.time:.2f} s: {violation}") from None
        finally:
            world.close()
    return world


def fingerprint(world: World) -> str:
    """Return a digest of a schedule's result, which shows that a seed replays."""
    return json.dumps({name: [content.decode(), version] for name, (content, version) in sorted(world.objects.items())})
