"""A simulated world for the real rules: time, a failing bucket, wrong clocks, dying processes, pauses.

Every process is a greenlet running the project's own code. Each call of the bucket and each sleep hands control to the
scheduler, which decides by its seed which process continues, and when, and what fails. One seed is one schedule, always the
same.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from typing import Any

from greenlet import greenlet

from jobs.bucket import BucketError, Conflict, Item

_EPOCH = datetime(2026, 1, 31, tzinfo=UTC)


class Violation(AssertionError):  # noqa: N818  the usual term
    """An invariant does not hold."""


class Killed(BaseException):
    """Raised in a killed process; no `except Exception` of the code under test may catch it."""


class Interrupted(BaseException):
    """Ctrl-C."""


@dataclass(frozen=True)
class Faults:
    """The probability of each fault, per call of the bucket or per yield of a process."""

    slow: float = 0.02
    before: float = 0.02
    after: float = 0.02
    late: float = 0.01
    interrupt: float = 0.004
    pause: float = 0.002
    kill: float = 0.002

    def times(self, factor: float) -> Faults:
        """Scale all probabilities; a factor of 0 disables faults."""
        return Faults(*(getattr(self, each.name) * factor for each in fields(self)))


class Machine:
    """A machine's own clocks, and pauses that stop all of its processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._offset = world.random.uniform(-600, 600)
        self._drift = world.random.uniform(0.98, 1.02)
        self._slept_through = 0.0
        self.paused_until = 0.0

    def clock(self) -> float:
        """Return its monotonic clock: it drifts, and stands still while the machine is suspended."""
        return 1000.0 + (self._world.time - self._slept_through) * self._drift

    def now(self) -> str:
        """Return its wall clock, up to ten minutes off."""
        moment = _EPOCH + timedelta(seconds=self._world.time * self._drift + self._offset)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def pause(self, name: str) -> None:
        """Pause all processes for a while, with or without the clock."""
        pause = self._world.random.choice((5.0, 20.0, 60.0, 150.0))
        suspended = self._world.chance(0.5)
        self._world.log(f"{name} is {'suspended' if suspended else 'paused'} for {pause:g} s")
        self.paused_until = self._world.time + pause
        if suspended:
            self._slept_through += pause


class Process:
    """One thread of a process: a greenlet on a machine."""

    def __init__(self, world: World, name: str, body: Callable[[Process], None], machine: Machine | None = None) -> None:
        self.world, self.name = world, name
        self.machine = machine or Machine(world)
        self.clock, self.now = self.machine.clock, self.machine.now
        self.alive = True
        self.interruptible = False
        self._pending: BaseException | None = None
        self._greenlet = greenlet(self._run, world.scheduler)
        self._body = body
        world.schedule(0.0, self)

    def _run(self) -> None:
        try:
            self._body(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001
            self.world.fail(error)
        finally:
            self.alive = False

    def sleep(self, seconds: float) -> None:
        """Yield control for at least this time; the process may be paused or killed meanwhile."""
        world, faults = self.world, self.world.faults
        if world.chance(faults.kill):
            world.log(f"{self.name} is killed")
            raise Killed
        if self.interruptible and world.chance(faults.interrupt):
            world.log(f"{self.name} is interrupted")
            self.interruptible = False
            raise Interrupted
        if world.chance(faults.pause):
            self.machine.pause(self.name)
        world.schedule(seconds, self)
        world.scheduler.switch()
        while self.machine.paused_until > world.time and not self._pending:
            world.schedule(self.machine.paused_until - world.time, self)
            world.scheduler.switch()
        if self._pending:
            error, self._pending = self._pending, None
            raise error

    def kill(self) -> None:
        """Send SIGKILL, from outside."""
        if self.alive:
            self._pending = Killed()
            self.world.schedule(0.0, self)

    def resume(self) -> None:
        if self.alive:
            self._greenlet.switch()


class World:
    """The scheduler, and the true state of the bucket."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults
        self.time = 0.0
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.scheduler = greenlet.getcurrent()  # type: ignore[attr-defined]
        self._events: list[tuple[float, int, Process | Callable[[], None]]] = []
        self._count = 0
        self._version = 0
        self._failure: BaseException | None = None
        self.trace: list[str] = []
        self.verbose = False
        self.on_write: Callable[[str, bytes | None, bytes, str], None] = lambda *_: None

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def log(self, text: str) -> None:
        if self.verbose:
            self.trace.append(f"{self.time:8.2f} {text}")

    def schedule(self, seconds: float, event: Process | Callable[[], None]) -> None:
        """Resume a process, or call a function, after a delay."""
        self._count += 1
        jitter = self.random.random() * 0.01
        heapq.heappush(self._events, (self.time + seconds + jitter, self._count, event))

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def run(self, end: float, is_done: Callable[[], bool]) -> None:
        """Run events until a condition holds or the end of time."""
        checked = 0
        while self._events and self._events[0][0] <= end:
            self.time, _, event = heapq.heappop(self._events)
            if isinstance(event, Process):
                event.resume()
            else:
                event()
            if self._failure:
                raise self._failure
            checked += 1
            if checked % 16 == 0 and is_done():
                return

    def close(self) -> None:
        """Kill the remaining processes."""
        for _, _, event in self._events:
            if isinstance(event, Process) and event.alive:
                event.alive = False
                if event._greenlet:
                    event._greenlet.throw(Killed)
        self._events.clear()

    # The true state of the bucket

    def write(self, name: str, content: bytes, expected: int | None, writer: str) -> int:
        """Write conditionally at once; `expected` is a version, or None for a missing object."""
        stored = self.objects.get(name)
        if (stored[1] if stored else None) != expected:
            if stored and stored[0] == content:
                return stored[1]
            raise Conflict(name)
        self.on_write(name, stored[0] if stored else None, content, writer)
        self._version += 1
        self.objects[name] = (content, self._version)
        return self._version


class SimulatedStore:
    """The bucket for one process: slow, failing before or after the effect, answering late or never."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    def read(self, name: str) -> Item | None:
        item: Item | None = self._call(lambda: self._item(name))
        return item

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        requested = list(names)
        items: dict[str, Item] = self._call(lambda: {n: i for n in requested if (i := self._item(n))})
        return items

    def scan(self, pattern: str) -> dict[str, bytes]:
        objects = self._world.objects
        contents: dict[str, bytes] = self._call(lambda: {n: c for n, (c, _) in sorted(objects.items()) if fnmatch(n, pattern)})
        return contents

    def create(self, name: str, content: bytes) -> str:
        return str(self._call(lambda: self._world.write(name, content, None, self._process.name), writes=True))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return str(self._call(lambda: self._world.write(name, content, int(version), self._process.name), writes=True))

    def _item(self, name: str) -> Item | None:
        stored = self._world.objects.get(name)
        return Item(stored[0], str(stored[1])) if stored else None

    def _call(self, effect: Callable[[], Any], writes: bool = False) -> Any:
        world, faults, sleep = self._world, self._world.faults, self._process.sleep
        slow = world.random.choice((1.0, 4.0, 15.0)) if world.chance(faults.slow) else 0.0
        sleep(slow + 0.002)
        if world.chance(faults.before):
            raise BucketError("the bucket fails before")
        if writes and world.chance(faults.late):
            world.schedule(world.random.choice((0.5, 5.0, 40.0)), lambda: self._late(effect))
            raise BucketError("the bucket does not answer, and does it later")
        result = effect()
        if world.chance(faults.after):
            raise BucketError("the bucket fails after")
        if slow:
            sleep(slow)
        return result

    def _late(self, effect: Callable[[], Any]) -> None:
        with contextlib.suppress(Conflict):
            effect()
