"""Requests to the bucket, which cost money on Google Cloud: of PREMIUM_1's 31 hosts per minute, by the hosts' own code.

Time is simulated, the trainers do nothing, and the bucket is a dictionary that counts its requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import cast

from shared_fakes import FakeJobFiles

from benchmarks.measure import MeasureError
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import BenchStack
from hosts.agent.agent import Agent
from hosts.agent.trainer import Trainer
from infra.gcp.cluster import POLL_SECONDS
from infra.scale_tiers import ScaleTier, preset
from jobs.bucket import Conflict, Item
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, Task
from jobs.states import JobState
from ops.cluster.host_files import heartbeat_seconds, idle_poll_seconds

_JOB = "counted"
_AGAINST = "the same with a poll each second, a heartbeat each 5 s, and a poll of an idle host each minute"
# A job runs by then.
_SETTLED, _MINUTE = 60.0, 60.0
_NOT_EQUAL = "without the logs' archive, the trainers' own requests and followers of the job, on both sides"


class _Bucket:
    """A store that counts its requests."""

    def __init__(self) -> None:
        self.requests = 0
        self._objects: dict[str, Item] = {}

    def read(self, name: str) -> Item | None:
        self.requests += 1
        return self._objects.get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        items = {name: self.read(name) for name in names}
        return {name: item for name, item in items.items() if item}

    def scan(self, pattern: str) -> dict[str, bytes]:
        fit = [name for name in self._objects if fnmatchcase(name, pattern)]
        self.requests += 1 + len(fit)
        return {name: self._objects[name].content for name in fit}

    def create(self, name: str, content: bytes) -> str:
        return self._write(name, content, None)

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self._write(name, content, version)

    def _write(self, name: str, content: bytes, expected: str | None) -> str:
        self.requests += 1
        current = self._objects.get(name)
        if (current and current.version) != expected:
            raise Conflict(name)
        self._objects[name] = Item(content, str(int(expected or 0) + 1))
        return self._objects[name].version


class _Trainer:
    """A trainer that never ends."""

    pid, lines, tail, stopping = 1, 0, "", False
    first_error, progress = None, None

    def poll(self) -> None:
        return None

    def stop(self, _: float) -> None:
        raise MeasureError("this trainer is never stopped")

    def due(self) -> float:
        return 1.0


class _World:
    """Hosts in simulated time, which advances from one event to the next."""

    def __init__(self, poll: float) -> None:
        self.time, self.bucket, self._count = 0.0, _Bucket(), 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._poll = poll

    def at(self, moment: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.time, _, action = heapq.heappop(self._events)
            action()
        self.time = until

    def host(self, name: str) -> None:
        """Run an agent of a host until it exits; the host's timer starts the next one."""
        ledger = Ledger(self.bucket, lambda _: None)
        agent = Agent(
            name,
            str(self._count),
            ledger,
            FakeJobFiles(),
            lambda _: cast(Trainer, _Trainer()),
            lambda: self.time,
            lambda: "",
            self._poll,
        )

        def turn() -> None:
            wait = agent.run_cycle()
            if agent.supervisor:
                agent.supervisor.step()
            if agent.finished:
                self.at(self.time + idle_poll_seconds(self._poll), lambda: self.host(name))
            else:
                self.at(self.time + wait, turn)

        self.at(self.time, turn)


@cache
def _minute(poll: float, running: bool) -> int:
    """Return the requests per minute, with or without a job on all hosts."""
    world, names = _World(poll), [host_id.name for host_id in preset(ScaleTier.PREMIUM_1).hosts]
    ledger = Ledger(world.bucket, lambda _: None)
    if running:
        ledger.change_queue(lambda _: Queue([QueueEntry(_JOB, names, has_hosts=True)]))
        tasks = {name: Task("{}", {}) for name in names}
        plan = Plan(_JOB, names, "task", [], tasks, packageSha256="0", heartbeatSeconds=heartbeat_seconds(poll))
        ledger.create_plan(plan)
        ledger.create_job(JobRecord(_JOB, JobState.PREPARING, createTime="", hosts=names))
    else:
        ledger.change_queue(lambda _: Queue([]))
    for place, name in enumerate(names):
        world.at(place / len(names) * poll, lambda name=name: world.host(name))  # type: ignore[misc]
    world.run(_SETTLED)
    before = world.bucket.requests
    # Long enough that each host has taken its turn equally often.
    minutes = 12
    world.run(_SETTLED + minutes * _MINUTE)
    if running and (job := ledger.job(_JOB)) and job.record.state is not JobState.RUNNING:
        raise MeasureError(f"the job of the count is {job.record.state}")
    return round((world.bucket.requests - before) / minutes)


def _figure(running: bool) -> Figure:
    return Figure(_minute(POLL_SECONDS, running), _minute(1.0, running))


@benchmark(
    "requests-running", what=f"requests to the bucket of 31 hosts per minute of a job; {_NOT_EQUAL}", against=_AGAINST,
    bar=0.3, aim=0.1, tier=None, unit="requests",
)  # fmt: skip
def requests_running(_: BenchStack) -> Figure:
    return _figure(running=True)


@benchmark(
    "requests-idle", what="requests to the bucket of 31 hosts per minute without a job", against=_AGAINST,
    bar=0.3, aim=0.1, tier=None, unit="requests",
)  # fmt: skip
def requests_idle(_: BenchStack) -> Figure:
    return _figure(running=False)
