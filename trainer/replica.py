"""The life of one training replica, the master or a worker: rounds of steps, and a line about them every second."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.downpour import Round, Run, State, take_round
from trainer.lines import train_line
from trainer.period import Period

_WARMSTART_STEPS = 50
_WARMSTART_SECONDS = 1.5


class DivergedError(RuntimeError):
    """The loss is no longer a number: the message is one line."""


@dataclass
class Pace:
    """How a replica is doing, since its last line: global and own steps a second, and steps of others in each round."""

    global_rate: float
    local_rate: float
    staleness: float


@dataclass
class Progress:
    """What the replicas, each a thread of the chief's process, tell one another."""

    global_step: int
    failure: Exception | None = None
    rounds: int = 0
    paces: dict[str, Pace] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    _training: set[str] = field(default_factory=set)
    _open: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def training(self, name: str, first: bool) -> Iterator[None]:
        """Counts a replica in for as long as it trains. All but the first wait until that has warmed the parameters up."""
        while not (first or self.stopped.is_set() or self._open.wait(0.1)):
            pass
        self._training.add(name)
        try:
            yield
        finally:
            self._training.discard(name)

    @property
    def share(self) -> float:
        """What a replica's steps count for: they are averaged over those that train."""
        return 1.0 / max(1, len(self._training))

    def tell(self, taken: Round, warmed: bool) -> None:
        """Takes note of a replica's round, and lets the others begin where the first has warmed up."""
        self.global_step = max(self.global_step, taken.global_step)
        self.rounds += 1
        if warmed or taken.global_step >= _WARMSTART_STEPS:
            self._open.set()

    def fail(self, error: Exception) -> None:
        """Stops every replica for this error; the first one counts."""
        self.failure = self.failure or error
        self.stopped.set()


@dataclass(frozen=True)
class Replica:
    """A replica, and where its Train lines go."""

    name: str
    run: Run
    iterator: Any
    period: Period
    log_interval: float
    emit: Callable[[str], None]


def prepare(replica: Replica, zeros: tuple[Any, ...]) -> State:
    """A round of no steps: it brings the graph to the replica's host and reads the variables, of the shapes of `zeros`."""
    state, _ = take_round(replica.run, replica.iterator, State(zeros, zeros), 0, 0.0)
    return State(state.values, zeros)


def train(replica: Replica, state: State, progress: Progress, after_round: Callable[[Round], None] | None = None) -> None:
    """Rounds until the job's last step, or until it is stopped.

    Raises DivergedError, and what TensorFlow raises where a host is lost.
    """
    name, period, emit = replica.name, replica.period, replica.emit
    start = last = time.monotonic()
    last_step, local_steps, rounds, staleness, told = progress.global_step, 0, 0, 0, period.told
    while not progress.stopped.is_set():
        began = time.monotonic()
        # The first round is a single step: who waits for a sign of life gets it soon.
        steps = period.steps if local_steps or last > start else 1
        state, taken = take_round(replica.run, replica.iterator, state, steps, progress.share)
        if not taken.steps:
            return
        if not math.isfinite(taken.loss):
            raise DivergedError(f"the loss of {name} is {taken.loss} at step {taken.global_step}; try a lower --learning-rate")
        now = time.monotonic()
        period.observe(taken.steps, now - began, taken.compute)
        progress.tell(taken, now - start > _WARMSTART_SECONDS)
        local_steps, rounds, staleness = local_steps + taken.steps, rounds + 1, staleness + taken.staleness
        if (local_steps == taken.steps and last == start) or now - last >= replica.log_interval:
            elapsed = max(now - last, 1e-6)
            pace = Pace((taken.global_step - last_step) / elapsed, local_steps / elapsed, staleness / rounds)
            rates = pace.global_rate, pace.local_rate
            emit(train_line(name, taken.global_step, taken.loss, taken.accuracy, now - start, *rates))
            progress.paces[name] = pace
            last, last_step, local_steps, rounds, staleness = now, taken.global_step, 0, 0, 0
            if after_round is not None and period.told != told:
                told = period.told
                emit(told)
        if after_round is not None:
            after_round(taken)
