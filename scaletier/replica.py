"""The life of one training replica, the master or a worker: rounds of steps, and log lines."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scaletier.lines import train_line
from scaletier.local_steps import DivergedError, Round
from scaletier.period import SyncPeriod
from scaletier.step_budget import StepBudget

# The master waits for others to be prepared this long at least, and this many times as long as it took itself.
_PREPARE_SECONDS, _PREPARE_TIMES = 5.0, 4.0


@dataclass
class RoundPace:
    """A replica's rates since its last line: global and own steps a second, others' steps in each round."""

    global_rate: float
    local_rate: float
    staleness: float


class StepProgress:
    """The shared state of the replicas, each a thread of the chief's process: master and workers."""

    def __init__(self, step: int, max_steps: int, workers: int, every: int | None = None) -> None:
        self.claims = StepBudget(step, max_steps, 1 + workers, every=every)
        self.rounds = 0
        self.paces: dict[str, RoundPace] = {}
        self.failure: Exception | None = None
        self.stopped = threading.Event()
        self._unprepared = workers
        self._training: set[str] = set()
        self._lock = threading.Lock()
        self._prepared, self._started = threading.Event(), threading.Event()

    def begin(self, leads: bool, seconds: float = 0.0) -> None:
        """Return when a replica may take its first step; the master waits until all are prepared or late.

        A replica that trains slows down those that still prepare to, where they share processors.

        Args:
            leads: whether it is the master.
            seconds: how long it took to prepare; slow hosts give the others more time.
        """
        with self._lock:
            self._unprepared -= not leads
            if self._unprepared <= 0:
                self._prepared.set()
        if leads:
            self._prepared.wait(max(_PREPARE_SECONDS, _PREPARE_TIMES * seconds))
            self._started.set()
        while not (self.stopped.is_set() or self._started.wait(0.1)):
            pass

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Count a replica in while it trains."""
        self._training.add(name)
        try:
            yield
        finally:
            self._training.discard(name)

    @property
    def live(self) -> int:
        """The number of replicas that train, without those whose round is overdue; the mean is over these."""
        return max(1, len(self._training - self.claims.late()))

    def fail(self, error: Exception) -> None:
        """Stop every replica for this error; the first one counts."""
        self.failure = self.failure or error
        self.stopped.set()


@dataclass(frozen=True)
class ReplicaLoop:
    """A replica, and where its Train lines go; the one that leads is the master.

    `take(state, steps, position, live)` is a round of its: the state after it, which only `take` looks into, and what it came
    to. The steps of the period are those of each of its `devices`.
    """

    name: str
    leads: bool
    take: Callable[[Any, int, int, int], tuple[Any, Round]]
    period: SyncPeriod
    log_interval: float
    emit: Callable[[str], None]
    devices: int = 1


class Rounds:
    """A replica's rounds from `state` on, and now and then its line about those since the last one."""

    def __init__(self, replica: ReplicaLoop, state: Any, progress: StepProgress) -> None:
        self._replica, self._progress, self.state = replica, progress, state
        self._start = self._last = time.monotonic()
        self._last_step, self._steps, self._rounds, self._staleness, self._told = progress.claims.global_step, 0, 0, 0, False

    def take(self, steps: int, live: int) -> Round | None:
        """Take a round of at most this many steps of each device, or return None if none are left.

        Raises DivergedError if the loss is no number.
        """
        replica, round_result = self._replica, None
        steps = self._progress.claims.claim(replica.name, steps * replica.devices, self._progress.stopped, replica.leads)
        if not steps:
            return None
        began = time.monotonic()
        try:
            self.state, round_result = replica.take(self.state, steps, self._progress.claims.global_step, live)
        finally:
            self._progress.claims.settle(replica.name, round_result.global_step if round_result else None)
        if not math.isfinite(round_result.loss):
            where = f"of {replica.name} is {round_result.loss} at step {round_result.global_step}"
            raise DivergedError(f"the loss {where}; try a lower learning rate")
        now = time.monotonic()
        replica.period.observe(math.ceil(round_result.steps / replica.devices), now - began, round_result.compute)
        self._progress.rounds += 1
        self._steps, self._rounds = self._steps + round_result.steps, self._rounds + 1
        self._staleness += round_result.staleness
        if not self._told or now - self._last >= replica.log_interval:
            self._tell(round_result, now)
        return round_result

    def _tell(self, taken: Round, now: float) -> None:
        elapsed = max(now - self._last, 1e-6)
        pace = RoundPace((taken.global_step - self._last_step) / elapsed, self._steps / elapsed, self._staleness / self._rounds)
        rates = pace.global_rate, pace.local_rate
        line = train_line(self._replica.name, taken.global_step, taken.loss, taken.metrics, now - self._start, *rates)
        self._replica.emit(line)
        self._progress.paces[self._replica.name] = pace
        self._last, self._last_step, self._steps, self._rounds, self._staleness = now, taken.global_step, 0, 0, 0
        self._told = True


def train(replica: ReplicaLoop, state: Any, progress: StepProgress) -> Iterator[Round]:
    """Yield rounds until the job's last step, or until it is stopped.

    The first is a single step, so that an error of a host or its data shows at once.

    Raises:
        DivergedError: the loss is no number.
        tf.errors.OpError: a host is lost.
    """
    rounds = Rounds(replica, state, progress)
    with progress.training(replica.name):
        round_result = rounds.take(1, progress.live)
        while round_result and not progress.stopped.is_set():
            yield round_result
            round_result = rounds.take(replica.period.steps, progress.live)
