"""Run the rounds of a replica, choose the steps of each, and format log lines, without TensorFlow."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from scaletier.sync_period import SyncPeriod

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Metric = float | npt.NDArray[np.float32]

# A round is overdue, and may never end, after this multiple of its steps times the last round's seconds per step, at least
# after these seconds.
_OVERDUE_FACTOR, _OVERDUE_SECONDS, _POLL_SECONDS = 4.0, 2.0, 0.1
# The chief waits for the other replicas' preparation at most these seconds, or this multiple of its own, whichever is longer.
_PREPARE_SECONDS, _PREPARE_FACTOR = 5.0, 4.0
# The time between evaluations is at least this multiple of their own, as in Google's sample cloudml-samples/flowers.
_EVAL_INTERVAL_FACTOR = 20.0


class DivergedError(RuntimeError):
    """The loss or a parameter is not finite; the message is one line. Labels out of range give nan on GPUs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; try a lower learning rate, or look for nan and labels out of range in the data")


class PreemptedError(RuntimeError):
    """The chief got SIGTERM before the job's last step."""


class Round(NamedTuple):
    """The result of a replica's round.

    Attributes:
        steps: the replica's steps.
        global_step: the global step after the round.
        loss: the mean loss of the steps; with `sync` over all replicas.
        metrics: the metrics by name, each a float, or an array if the metric has several numbers.
        staleness: steps of other replicas between the round's beginning and its end.
        compute: the seconds of the steps, without the exchange.
        mean_loss: the mean loss of samples since the metrics were reset.
        local_loss: the mean loss of this replica's steps.
    """

    steps: int
    global_step: int
    loss: float
    metrics: Mapping[str, Metric] = {}
    staleness: int = 0
    compute: float = 0.0
    mean_loss: float = 0.0
    local_loss: float = 0.0


class ReplicaRates(NamedTuple):
    """A replica's rates since its last log line.

    Attributes:
        global_rate: steps of all replicas per second.
        local_rate: steps of this replica per second.
        staleness: the mean of `Round.staleness`.
    """

    global_rate: float
    local_rate: float
    staleness: float


class StepBudget:
    """Count a job's steps, reserve those of each round, and note the replicas that train.

    Replicas reserve steps before a round and commit them after it, so that together they end at the last step. With `async`
    they share one budget without messages, since each replica has a thread in the chief's process. With `sync` each process has
    its own budget, and all count alike. Steps reserved by a failed or overdue round are freed. If an overdue round still
    completes, the job may exceed max_steps by that round's steps.

    At a multiple of `steps_between_evaluations` all replicas wait until the chief has evaluated the model. Else only N - 1 of
    N replicas would train meanwhile, and `fab plan --until` measures how many steps N replicas need. With `fit` they wait
    until the chief has pulled the model, so that they are at most an epoch ahead of its callbacks. The other replicas leave the
    chief at least one step of the last epoch, so that it has metrics to report.
    """

    def __init__(
        self,
        step: int,
        max_steps: int,
        replicas: int = 1,
        steps_between_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step, self.rounds, self.training, self.rates = step, 0, set[str](), dict[str, ReplicaRates]()
        self.failure: Exception | None = None
        self.stopped = False
        self._max_steps, self._replicas, self._clock = max_steps, replicas, clock
        self._steps_between_evaluations = steps_between_evaluations or max_steps
        self._reserved, self._step_seconds = dict[str, tuple[int, float]](), dict[str, float]()
        self._unprepared, self._started = replicas - 1, False
        self._shares_epochs = bool(steps_between_evaluations) and replicas > 1
        self._changed = threading.Condition()
        self.allow_until()

    def begin(self, is_chief: bool, seconds: float = 0.0) -> None:
        """Wait until a replica may take its first step; the chief waits until all replicas are prepared or late.

        A replica that trains would slow down the preparation of others on the same processors. `seconds` is the time that the
        replica's own preparation took: on slow hosts the chief waits longer.
        """
        with self._changed:
            self._unprepared -= not is_chief
            self._changed.notify_all()
            if is_chief:
                timeout = max(_PREPARE_SECONDS, _PREPARE_FACTOR * seconds)
                self._changed.wait_for(lambda: self._unprepared <= 0 or self.stopped, timeout)
                self._started = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._started or self.stopped)

    def stop(self, error: Exception | None = None) -> None:
        """Stop every replica, after an error if there is one; the first error is kept."""
        with self._changed:
            self.failure, self.stopped = self.failure or error, True
            self._changed.notify_all()

    def allow_until(self, step: int | None = None) -> None:
        """Let all replicas train until a global step; default: the next multiple of `steps_between_evaluations`."""
        with self._changed:
            interval = self._steps_between_evaluations
            self._until = min(self._max_steps, step or (self.step // interval + 1) * interval)
            self._left_to_chief = int(self._shares_epochs and self._until == self._max_steps)
            self._changed.notify_all()

    def reserve(self, name: str, steps: int, is_chief: bool = False) -> int:
        """Reserve steps for a replica's round, at most `steps`; return 0 if the job is at its last step or stopped.

        Near the end a replica gets its share of the remaining steps, so that all replicas end at about the same time. If other
        replicas have reserved all steps, wait, as a round of theirs may fail. The chief does not wait if they have reserved all
        steps up to an evaluation: it gets one more step.
        """
        with self._changed:
            self._reserved.pop(name, None)
            while self.step < self._max_steps and not self.stopped:
                late = self.overdue()
                free = self._until - self.step - sum(one for other, (one, _) in self._reserved.items() if other not in late)
                if is_chief and self._until < self._max_steps:
                    free = max(free, 1)
                if is_chief:
                    self._left_to_chief = 0
                free -= self._left_to_chief
                if free > 0:
                    granted = min(steps, max(free // self._replicas, 1))
                    self._reserved[name] = granted, self._clock()
                    return granted
                self._changed.wait(_POLL_SECONDS)
        return 0

    def commit(self, name: str, step: int | None) -> None:
        """End a replica's round. `step` is the global step after the round, None if the round failed."""
        with self._changed:
            (steps, since), now = self._reserved[name], self._clock()
            self._reserved[name] = 0, now  # until its next round
            if step is not None:
                self._step_seconds[name] = (now - since) / steps
                # Not a sum of reservations: a round may fail after the servers have counted its steps.
                self.step = max(self.step, step)
            self._changed.notify_all()

    def overdue(self) -> set[str]:
        """Return the replicas whose round is overdue, or that do other work, such as a chief that evaluates."""
        with self._changed:
            now, seconds = self._clock(), self._step_seconds
            limits = {name: _OVERDUE_FACTOR * steps * seconds.get(name, 0.0) for name, (steps, _) in self._reserved.items()}
            return {name for name, (_, since) in self._reserved.items() if now - since > max(_OVERDUE_SECONDS, limits[name])}

    @property
    def live_hosts(self) -> int:
        """The number of hosts that train now, each as one replica, without the `overdue` ones.

        With `async` each replica divides its parameter delta by this number: the servers add a mean over these hosts.
        """
        return max(1, len(self.training - self.overdue()))


@dataclass(frozen=True)
class ReplicaLoop:
    """The settings of a replica's rounds; a replica is the master or a worker.

    Attributes:
        run_round: a function `run_round(steps, live_hosts)` that runs a round, and returns its result.
        period: the steps of a round on each of `devices`, except for the first round, which has `first_steps`.
        log_functions: for each name in Train lines the function that logs them.
        is_chief: True if the budget must treat the replica as the chief; with `sync` always, as each has its own budget.
        devices: the number of devices that train in a round: the replica's own, with `sync` those of all replicas.
    """

    name: str
    run_round: Callable[[int, int], Round]
    period: SyncPeriod
    log_interval: float
    log_functions: Mapping[str, Callable[[str], None]]
    is_chief: bool = True
    devices: int = 1
    first_steps: int = 1


def run_rounds(replica: ReplicaLoop, budget: StepBudget) -> Iterator[Round]:
    """Run a replica's rounds until the job's last step or its stop; yield each. DivergedError if the loss is not finite."""
    start = last = time.monotonic()
    last_step, local_steps, rounds, staleness, period_line = budget.step, 0, 0, 0, ""
    steps, is_first = replica.first_steps, True
    budget.training.add(replica.name)
    try:
        while reserved := budget.reserve(replica.name, steps * replica.devices, replica.is_chief):
            began, result = time.monotonic(), None
            try:
                result = replica.run_round(reserved, budget.live_hosts)
                if not math.isfinite(result.loss):
                    whose = "another replica" if math.isfinite(result.local_loss) else replica.name
                    what = f"the loss of {whose} is {result.loss} at step {result.global_step}"
                    raise DivergedError(what)
                now = time.monotonic()
                replica.period.observe(math.ceil(result.steps / replica.devices), now - began, result.compute)
                steps, budget.rounds = replica.period.steps, budget.rounds + 1
                local_steps, rounds, staleness = local_steps + result.steps, rounds + 1, staleness + result.staleness
                if is_first or now - last >= replica.log_interval:
                    elapsed = max(now - last, 1e-6)
                    rates = ReplicaRates((result.global_step - last_step) / elapsed, local_steps / elapsed, staleness / rounds)
                    for name, log in replica.log_functions.items():
                        log(train_line(name, result.global_step, result.local_loss, result.metrics, now - start, *rates[:2]))
                    budget.rates[replica.name] = rates
                    last, last_step, local_steps, rounds, staleness, is_first = now, result.global_step, 0, 0, 0, False
                if replica.is_chief and replica.period.line != period_line:
                    period_line = replica.period.line
                    replica.log_functions[replica.name](period_line)
            finally:  # also if a lost host is noticed only as it logs the line
                budget.commit(replica.name, result.global_step if result else None)
            yield result
    finally:
        budget.training.discard(replica.name)


def train_line(
    replica: str, step: int, loss: float, metrics: Mapping[str, Metric], seconds: float, global_rate: float, local_rate: float
) -> str:
    """Return a Train line as in Google's sample cloudml-samples/flowers, with the loss and the metrics added.

    Rates are those since the previous line, `seconds` the time since the first step. An example:
    `Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s`.
    """
    rates = f"{_format_rate(global_rate)} global steps/s, {_format_rate(local_rate)} local steps/s"
    return f"Train [{replica}], step {step}: {_format_metrics(loss, metrics)} ({seconds:.3f} sec) {rates}"


def eval_line(step: int, loss: float, metrics: Mapping[str, Metric]) -> str:
    """Return a line such as `Eval, step 990: loss: 0.400, accuracy: 0.890`."""
    return f"Eval, step {step}: {_format_metrics(loss, metrics)}"


def final_line(steps: int, loss: float, metrics: Mapping[str, Metric]) -> str:
    """Return a line such as `Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935`."""
    return f"Final metrics after {steps} steps, {_format_metrics(loss, metrics)}"


def _format_metrics(loss: float, metrics: Mapping[str, Metric]) -> str:
    return ", ".join(f"{name}: {_format_metric(value)}" for name, value in {"loss": loss, **metrics}.items())


def _format_metric(value: Metric) -> str:
    """Format a metric, or the mean of its numbers, with three decimals, or three digits if these are zeros.

    `fab plan --until` compares metrics of lines.
    """
    value = value if isinstance(value, float) else float(value.mean())
    return f"{value:.3g}" if 0.0 < abs(value) < 0.0005 else f"{value:.3f}"


def _format_rate(value: float) -> str:
    return f"{value:.1f}" if value >= 1.0 else f"{value:.3f}"


@dataclass
class EvalInterval:
    """The seconds between evaluations, which grow so that evaluations take no more than a twentieth of the time."""

    seconds: float
    last: float | None = None

    def is_due(self, now: float) -> bool:
        if self.last is None:
            self.last = now
        return now - self.last >= self.seconds

    def record(self, start: float, end: float) -> str | None:
        """Record an evaluation; return a line about a new interval, or None if the interval stays."""
        self.last = end
        before, needed = self.seconds, (end - start) * _EVAL_INTERVAL_FACTOR
        if needed <= before:
            return None
        self.seconds = needed
        share = f"{100 / _EVAL_INTERVAL_FACTOR:.0f} % of the time"
        return f"The evaluation took {end - start:.2f} s: next in {needed:.2f} s, not {before:.2f} s, for at most {share}"
