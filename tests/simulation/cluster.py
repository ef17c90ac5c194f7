"""A simulated cluster: hosts with the real agent, submitters, cancellers, and the invariants."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

from fakesite import FakeSite
from world import Faults, Interrupted, Killed, Process, SimulatedStore, Violation, World

from hosts.agent.agent import Agent
from hosts.agent.replica_rules import Exit
from hosts.agent.reporter import HostProbes
from hosts.agent.supervisor import Assignment, Supervisor
from jobs import paths, records
from jobs.bucket import BucketError, Conflict
from jobs.host_start import HostStarter
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger
from jobs.queue import Queue
from jobs.queue_monitor import NOT_HANDED_OVER
from jobs.records import JobRecord, Plan, ReplicaRecord, Task
from jobs.serialization import RecordError
from jobs.states import JobState
from ops.submit.submitter import BusyError, CancelledError, Canceller, OvertakenError, Submitter, UsedBeforeError

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
TROUBLE_ENDS = 150.0
OPERATOR_COMES = 600.0
"""So long after the end of all trouble, that a job which waited for a person would be FAILED by then."""
WORLD_ENDS = 4000.0
_KILLED, _STOPPED = -9, (-15, 143, 0)

# Records never change, and many read the same one: parsed once, a schedule takes a third of the time.
_PARSED = {kind: staticmethod(lru_cache(maxsize=4096)(kind.from_json)) for kind in (JobRecord, ReplicaRecord, Plan, Queue)}


@contextmanager
def _simulated() -> Iterator[None]:
    """Replace what differs from a real host during a schedule: people's time stops, complaints are muted."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(records, "now", lambda: "2026-01-31T00:00:00.000Z"))
        stack.enter_context(patch.object(Agent, "_write_to_journal", staticmethod(lambda text: None)))
        for kind, parse in _PARSED.items():
            stack.enter_context(patch.object(kind, "from_json", parse))
        yield


@dataclass
class Story:
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
    """A trainer: the chief's ends with its work, others' too or when told. Some ask for another start."""

    def __init__(self, host: Host, job: Assignment) -> None:
        self.host, self.job_id, self.name = host, job.plan.jobId, job.name
        self.pid, self.lines, self.tail, self.stopping = 1, 0, "", False
        self.first_error = self.progress = None
        world = host.cluster.world
        story = host.cluster.stories[self.job_id]
        ends = job.name == job.plan.chief or (story.ends and not job.plan.is_server(job.name))
        self.ends_at = world.time + story.work * world.random.choice((0.5, 1, 2)) if ends else float("inf")
        self.code = world.random.choice((1, 137, 255)) if story.fails else 0
        if story.again > 0 and not story.fails and ends:
            story.again, self.code = story.again - 1, 42
        self.stop_at: float | None = None
        self.killed = False

    def stop(self, seconds: float) -> None:
        world = self.host.cluster.world
        self.stopping = True
        self.stop_at = world.time + world.random.choice((0.1, seconds))

    def poll(self) -> Exit | None:
        time, story = self.host.cluster.world.time, self.host.cluster.stories[self.job_id]
        self.lines += 1
        if self.killed:
            code = _KILLED
        elif self.stop_at is not None and time >= self.stop_at:
            code = self.host.cluster.world.random.choice(_STOPPED)
        elif time >= self.ends_at:
            code = self.code
            story.done |= {self.name} if code == 0 else set()
        else:
            return None
        self.host.trainer = None
        return Exit(code)

    def due(self) -> float:
        ends = self.ends_at if self.stop_at is None else min(self.ends_at, self.stop_at)
        return max(ends - self.host.cluster.world.time, 0.0)


class HostSite(FakeSite):
    """A site whose package is not always there."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def prepare(self, plan: Plan, replica: str) -> Assignment:
        self._host.process_sleep(0.2)
        if self._host.cluster.world.chance(self._host.cluster.world.faults.before):
            raise BucketError("the package cannot be fetched")
        return super().prepare(plan, replica)

    def write_message(self, message: str, severity: str = "INFO") -> None:
        self._host.cluster.world.note(f"{self._host.name}: {message}")


@dataclass
class Host:
    """A machine with its unit, which restarts the agent when it dies, and at intervals while none runs."""

    cluster: Cluster
    name: str
    up: bool = True
    preempted: bool = False
    lives: int = 0
    trainer: Trainer | None = None
    agent: Agent | None = None
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
            HostSite(self),
            self._spawn,
            reporter.clock,
            reporter.now,
            POLL,
            LEASE,
            HostProbes(preempted=lambda: self.preempted, starter=lambda: self.cluster.starter(reporter)),
        )

    def process_sleep(self, seconds: float) -> None:
        self.reporter.sleep(seconds)

    def _report(self, process: Process) -> None:
        agent = self.agent
        assert agent is not None
        try:
            while not agent.finished:
                process.sleep(agent.round())
        except Killed:
            self.cluster.world.wake(0.0, self.die)
            raise
        self.cluster.world.wake(self.cluster.timer, self.start)

    def _supervise(self, process: Process) -> None:
        agent = self.agent
        assert agent is not None
        try:
            while not agent.finished:
                supervisor = agent.supervisor
                wait = supervisor.step() if supervisor else 2.0
                process.sleep(min(max(wait, 0.05), 2.0))
        except Killed:
            self.cluster.world.wake(0.0, self.die)
            raise

    def _spawn(self, job: Assignment) -> Trainer:
        if self.trainer is not None:
            raise Violation(f"{self.name} runs {self.trainer.job_id} and starts {job.plan.jobId}")
        self.cluster.starts(self, job)
        self.trainer = Trainer(self, job)
        return self.trainer

    def die(self) -> None:
        """Kill the unit's main process with its whole control group; the unit starts it again."""
        for process in self.processes:
            process.kill()
        self.trainer = None
        self.cluster.world.wake(2.0, self.start)

    def power_off(self, seconds: float) -> None:
        self.cluster.world.note(f"{self.name} loses its power for {seconds:g} s")
        self.up = False
        self.die()
        self.cluster.world.wake(seconds, self.power_on)

    def preempt(self) -> None:
        """Stop the unit, and some seconds later the power, until the host is started."""
        if not self.up or self.preempted:
            return
        self.cluster.world.note(f"{self.name} is preempted")
        self.preempted = True
        if self.agent:
            self.agent.terminate()
        self.cluster.world.wake(self.cluster.world.random.uniform(1, 30), self.goes_off)

    def goes_off(self) -> None:
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
        self.stories: dict[str, Story] = {}
        self.highest: Counter[str] = Counter()
        self.renewed: dict[str, float] = {}
        self.submitters: list[Process] = []
        random = world.random
        world.on_write = self.written
        size = random.choice((1, 2, 2, 3, 3, 4))
        self.hosts = [Host(self, name) for name in ("master-0", "worker-0", "ps-0", "worker-1")[:size]]
        for host in self.hosts:
            world.wake(random.uniform(0, 5), host.start)
        for number in range(random.choice((1, 1, 2, 2, 3))):
            self.submit(f"job{number}", random.uniform(0, 25))
            if world.chance(0.2):
                self.submit(f"job{number}", random.uniform(0, 25))  # the same id, by somebody else or once more
            if world.chance(0.25):
                self.cancel(f"job{number}", random.uniform(0, 60))
        if world.chance(0.3):
            world.wake(random.uniform(5, 90), lambda: random.choice(self.hosts).power_off(random.choice((10.0, 60.0, 200.0))))
        for _ in range(random.choice((0, 0, 1, 3))):
            world.wake(random.uniform(5, 90), self.kill_a_trainer)
        # Whether hosts can be started, and from when on: a spot host may not be to be had for a while.
        self.starts_from = random.choice((0.0, 0.0, 140.0)) if world.chance(0.4) else None
        if self.starts_from is not None:
            for host in random.sample(self.hosts, random.randint(1, size)):
                world.wake(random.uniform(5, 90), host.preempt)
        world.faults = world.faults.times(random.choice((0.0, 0.5, 1.0, 3.0)))
        world.wake(TROUBLE_ENDS, self.calm)

    # Who acts

    def starter(self, process: Process) -> HostStarter | None:
        """Return the client that starts hosts, if there can be one."""
        if self.starts_from is None:
            return None
        names = [host.name for host in self.hosts]
        return HostStarter(self.ask, names, process.clock, partial(self.world.wake, 1.0))

    def ask(self, name: str) -> str:
        """Answer a request to start a host."""
        host = next(host for host in self.hosts if host.name == name)
        if self.starts_from is None or self.world.time < self.starts_from:
            return "there is none to be had"
        if host.preempted and host.up:
            return "it is not off yet"
        if not host.up:
            self.world.wake(10.0, host.power_on)
        return ""

    def kill_a_trainer(self) -> None:
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
        again = random.choice((0, 0, 0, 1, 3))
        self.stories.setdefault(job_id, Story(random.uniform(2, 30), self.world.chance(0.1), rules, ends=ends, again=again))
        some = random.sample(self.hosts, random.randint(1, len(self.hosts))) if self.world.chance(0.3) else self.hosts
        names = [host.name for host in self.hosts if host in some]
        wants = self._others_too(names) if self.world.chance(0.5) else {name: [name] for name in names}

        def begin() -> None:
            number = len(self.submitters)
            self.submitters.append(Process(self.world, f"submitter{number}", lambda p: self._submit(p, job_id, wants)))

        self.world.wake(at, begin)

    def _others_too(self, names: list[str]) -> dict[str, list[str]]:
        """Return replicas' candidates of their role; for the first any host with a trainer of its kind."""
        trainers = [host.name for host in self.hosts if host.name != "ps-0"]
        workers = [name for name in trainers if name != "master-0"]
        alike = {"master-0": trainers, "ps-0": ["ps-0"]}
        return {name: [name, *(other for other in alike.get(name, workers) if other != name)] for name in names}

    def _submit(self, process: Process, job_id: str, wants: dict[str, list[str]]) -> None:
        world, story = self.world, self.stories[job_id]
        ledger = Ledger(SimulatedStore(process), process.sleep)
        names = list(wants)
        record = JobRecord(job_id, candidates=wants, priority=world.random.choice((0, 0, 0, 5)), createTime=process.now())
        submitter = Submitter(ledger, record, process.name)
        process.interruptible = True
        try:
            _persist(process, lambda: submitter.claim(may_wait=True))
            for _ in range(world.random.randint(0, 3)):
                process.sleep(2.0)
                _persist(process, submitter.renew)
            tasks = {name: Task("{}") for name in names}
            plan = Plan(job_id, names, "task", [], tasks, **RULES, **story.rules)
            _persist(process, lambda: ledger.create_plan(plan))
            ahead = _persist(process, submitter.ahead)
            if not ahead:
                _persist(process, submitter.prepare)
                process.sleep(1.0)
            _persist(process, submitter.hand_over)
        except (UsedBeforeError, BusyError, OvertakenError):
            return
        except (CancelledError, Interrupted):
            process.interruptible = False
            story.cancelled = True
            _persist(process, lambda: submitter.give_up("", cancelled=True))
            return
        finally:
            process.interruptible = False
        story.acknowledged = True
        world.note(f"{process.name} has handed {job_id} over")
        for host in self.hosts:  # fab starts the units
            if host.name in submitter.usable_hosts:
                world.wake(0.1, host.start)

    def cancel(self, job_id: str, at: float) -> None:
        def begin() -> None:
            Process(self.world, f"canceller of {job_id}", lambda process: self._cancel(process, job_id))

        self.world.wake(at, begin)

    def _cancel(self, process: Process, job_id: str) -> None:
        story = self.stories[job_id]
        canceller = Canceller(
            Ledger(SimulatedStore(process), process.sleep), ChangeTimer(process.clock), process.name, job_id, b"{}", LEASE
        )
        if paths.job(job_id) not in self.world.objects:
            return
        story.cancelled = True
        while True:
            try:
                record = canceller.step()
            except (BucketError, RecordError, Conflict):
                record = None
            if record is not None and record.final:
                return
            process.sleep(1.0)

    def calm(self) -> None:
        """Stop all faults: from now on everything must come to its end."""
        self.world.faults = self.world.faults.times(0)
        if self.starts_from is None:
            self.pulumi_up()
        else:
            self.world.wake(OPERATOR_COMES, self.pulumi_up)  # until then who lives has the others started

    def pulumi_up(self) -> None:
        """Start every host again."""
        for host in self.hosts:
            if not host.up:
                host.power_on()

    # What must never happen

    def written(self, name: str, before: bytes | None, after: bytes, who: str) -> None:
        """Look at every write as it takes effect."""
        world = self.world
        if name == paths.QUEUE:
            queue = Queue.from_json(after)
            holders = Counter(host for entry in queue.entries if entry.held for host in entry.hosts)
            if twice := [host for host, count in holders.items() if count > 1]:
                raise Violation(f"{twice[0]} is held by two jobs: {queue}")
            if world.verbose:
                world.note(f"{who}: queue {[(e.jobId, 'held' if e.held else 'waits') for e in queue.entries]}")
        elif name.endswith("/job.json"):
            self._job_written(JobRecord.from_json(before) if before else None, JobRecord.from_json(after), who)

    def _job_written(self, old: JobRecord | None, new: JobRecord, who: str) -> None:
        story = self.stories[new.jobId]
        if self.world.verbose:
            self.world.note(f"{who}: {new.jobId} {new.state} {new.lease} {new.errorMessage}")
        if old is not None:
            if old.final and new.state is not old.state:
                raise Violation(f"{who} moves {new.jobId} from {old.state}, which is final, to {new.state}")
            if new.lease.epoch < old.lease.epoch:
                raise Violation(f"{who} writes {new.jobId} in epoch {new.lease.epoch} over {old.lease.epoch}")
            if new.lease.epoch == old.lease.epoch and new.lease.holder != old.lease.holder:
                raise Violation(f"two hold the lease of {new.jobId} in epoch {new.lease.epoch}")
            me = self._as_holder(who, new)
            if new.lease.epoch == old.lease.epoch and old.lease.holder not in ("", me):
                raise Violation(f"{who} writes {new.jobId} under the lease of {old.lease.holder}")
            silent = self.world.time - self.renewed.get(new.jobId, 0.0)
            another = old.lease.holder.partition("/")[0] not in ("", me.partition("/")[0])
            if new.lease.epoch > old.lease.epoch and another and silent < LEASE * 0.95:
                raise Violation(f"{who} takes the lease of {old.lease.holder}, which was renewed {silent:.2f} s ago")
        self.renewed[new.jobId] = self.world.time
        if new.final and story.ended is None:
            story.ended, story.message = new.state, new.errorMessage
            if new.state is JobState.SUCCEEDED and (missing := self._deciding(new.jobId) - story.done):
                raise Violation(f"{new.jobId} SUCCEEDED without {sorted(missing)}")
            if story.acknowledged and new.errorMessage == NOT_HANDED_OVER:
                raise Violation(f"{new.jobId} was handed over, and is ended as if it had not been")

    def _deciding(self, job_id: str) -> set[str]:
        """Return the replicas whose success is the job's."""
        plan = Plan.from_json(self.world.objects[paths.plan(job_id)][0])
        return {name for name in plan.replicas if plan.decides(name)}

    def _as_holder(self, who: str, job: JobRecord) -> str:
        """Return a process's name in a lease: for a host, the job's replica that it is."""
        host, _, incarnation = who.partition("#")
        queue = Queue.from_json(self.world.objects[paths.QUEUE][0])
        holder = queue.entry(job.jobId) or job
        replica = next((replica for replica, its in holder.placement.items() if its == host), host)
        return f"{replica}/{incarnation}" if incarnation else who

    def starts(self, host: Host, job: Assignment) -> None:
        """Check the start of a trainer: its job has this host, and is not over as far as the host has read."""
        supervisor = host.agent.supervisor if host.agent else None
        reporter = host.agent._reporter if host.agent else None
        seen = reporter.job if reporter else None
        if isinstance(supervisor, Supervisor) and seen is not None and seen.final:
            raise Violation(f"{host.name} starts {seen.jobId}, of which it knows that it is {seen.state}")
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

    def over(self) -> bool:
        """Return True when nothing is left to happen."""
        if self.world.time < TROUBLE_ENDS or any(host.trainer for host in self.hosts):
            return False
        if any(process.alive for process in self.submitters):
            return False
        if paths.QUEUE in self.world.objects and Queue.from_json(self.world.objects[paths.QUEUE][0]).entries:
            return False
        return all(story.ended or not self._exists(job_id) for job_id, story in self.stories.items())

    def _exists(self, job_id: str) -> bool:
        return paths.job(job_id) in self.world.objects

    def check_end(self) -> None:
        """Check the invariants that hold once all faults are over."""
        for job_id, story in self.stories.items():
            if self._exists(job_id) and not story.ended:
                raise Violation(f"{job_id} never ends: {self.world.objects[paths.job(job_id)][0]!r}")
            if story.acknowledged and not self._exists(job_id):
                raise Violation(f"{job_id} was handed over and is lost")
            if story.ended is JobState.CANCELLED and not story.cancelled:
                raise Violation(f"{job_id} is CANCELLED, and nobody asked for it")
            if self.starts_from is not None and "no heartbeat" in story.message:
                raise Violation(f"{job_id} FAILED for want of hosts that can be started: {story.message}")
            excuses = ("lost", "not up", "was started again", "times in a row", "restarts")
            unexcused = not any(word in story.message for word in excuses)
            if story.ended is JobState.FAILED and story.acknowledged and not story.fails and unexcused:
                raise Violation(f"{job_id} FAILED without a reason: {story.message}")
        if paths.QUEUE in self.world.objects:
            entries = Queue.from_json(self.world.objects[paths.QUEUE][0]).entries
            if entries:
                raise Violation(f"the cluster is blocked by {[entry.jobId for entry in entries]}")
        if running := [host.name for host in self.hosts if host.trainer]:
            raise Violation(f"a trainer outlives its job on {running}")


def _persist(process: Process, work: Any) -> Any:
    """Retry on a bucket that fails for a moment, as fab does."""
    while True:
        try:
            return work()
        except (BucketError, Conflict):
            process.sleep(1.0)


def play(seed: int, trace: list[str] | None = None) -> World:
    """Play one schedule from its beginning to its end; Violation if an invariant does not hold."""
    random.seed(seed)  # for what the code under test leaves to chance
    world = World(seed, Faults())
    if trace is not None:
        world.verbose, world.trace = True, trace
    with _simulated():
        cluster = Cluster(world)
        try:
            world.run(WORLD_ENDS, cluster.over)
            cluster.check_end()
        except Violation as violation:
            raise Violation(f"seed {seed}, at {world.time:.2f} s: {violation}") from None
        finally:
            world.close()
    return world


def fingerprint(world: World) -> str:
    """Return a digest of a schedule's result, which shows that a seed replays."""
    return json.dumps({name: [content.decode(), version] for name, (content, version) in sorted(world.objects.items())})
