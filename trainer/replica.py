"""The life of one training replica, the master or a worker: rounds of steps, and a line about them every second."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.elastic import Round, take_round
from trainer.lines import train_line

_START_SECONDS = 5.0


class DivergedError(RuntimeError):
    """The loss is no longer a number: the message is one line."""


class Progress:
    """What the replicas, each a thread of the chief's process, tell one another."""

    def __init__(self, step: int, replicas: int) -> None:
        self.global_step = step
        self._missing = replicas
        self._lock = threading.Lock()
        self._started = threading.Event()
        self.stopped = threading.Event()
        self.failure: Exception | None = None

    def start(self) -> None:
        """Returns once every replica has come here, or after some seconds, and at once for a replica that comes back.

        A replica that trains slows down those that still prepare to, where they share cpus.
        """
        with self._lock:
            self._missing -= 1
            if self._missing <= 0:
                self._started.set()
        self._started.wait(_START_SECONDS)
        self._started.set()

    def fail(self, error: Exception) -> None:
        """Stops every replica for this error; the first one counts."""
        self.failure = self.failure or error
        self.stopped.set()


def train(
    name: str,
    run: Callable[[Any, Any], Any],
    iterator: Any,
    values: Any,
    progress: Progress,
    log_interval: float,
    emit: Callable[[str], None],
    after_round: Callable[[Round], None] | None = None,
) -> None:
    """Rounds from `values`, float32 [P], until the job's last step, or until it is stopped; `emit` gets the Train lines.

    Raises DivergedError, and what TensorFlow raises where a host is lost.
    """
    start = time.monotonic()
    last_time, last_step, local_steps = start, progress.global_step, 0
    first = True
    while not progress.stopped.is_set():
        values, taken = take_round(run, iterator, values)
        if not taken.steps:
            return
        if not math.isfinite(taken.loss):
            raise DivergedError(f"the loss of {name} is {taken.loss} at step {taken.global_step}; try a lower --learning-rate")
        progress.global_step = max(progress.global_step, taken.global_step)
        local_steps += taken.steps
        now = time.monotonic()
        if first or now - last_time >= log_interval:
            elapsed = max(now - last_time, 1e-6)
            global_rate, local_rate = (taken.global_step - last_step) / elapsed, local_steps / elapsed
            emit(train_line(name, taken.global_step, taken.loss, taken.accuracy, now - start, global_rate, local_rate))
            last_time, last_step, local_steps, first = now, taken.global_step, 0, False
        if after_round is not None:
            after_round(taken)
