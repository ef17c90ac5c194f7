"""The lines of a replica's log, in the words of Cloud ML's MNIST sample, and the evaluations' times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# An evaluation may take one part in this many of the time, as in the sample.
_EVAL_SHARE = 20.0


def train_line(
    replica: str,
    step: int,
    loss: float,
    metrics: Mapping[str, float],
    seconds: float,
    global_rate: float,
    local_rate: float,
) -> str:
    """Return a line about training, with rates in steps/s since the previous line.

    It is `Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s`.
    `seconds` are since the replica began to train.
    """
    rates = f"{global_rate:.1f} global steps/s, {local_rate:.1f} local steps/s"
    return f"Train [{replica}], step {step}: {_figures(loss, metrics)} ({seconds:.3f} sec) {rates}"


def eval_line(step: int, loss: float, metrics: Mapping[str, float]) -> str:
    """Return a line such as `Eval, step 990: loss: 0.400, accuracy: 0.890`."""
    return f"Eval, step {step}: {_figures(loss, metrics)}"


def final_line(steps: int, loss: float, metrics: Mapping[str, float]) -> str:
    """Return a line such as `Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935`."""
    return f"Final metrics after {steps} steps, {_figures(loss, metrics)}"


def _figures(loss: float, metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:.3f}" for name, value in {"loss": loss, **metrics}.items())


@dataclass
class EvalInterval:
    """Seconds between evaluations, growing so that they take no more than a twentieth of the time."""

    seconds: float
    last: float | None = None

    def due(self, now: float) -> bool:
        """Return True once `seconds` have passed since the last evaluation's end, or the first call.

        `now` is in seconds.
        """
        if self.last is None:
            self.last = now
        return now - self.last >= self.seconds

    def record(self, start: float, end: float) -> str | None:
        """Note an evaluation; return a line about a new interval, or None if it stays."""
        self.last = end
        before, needed = self.seconds, (end - start) * _EVAL_SHARE
        if needed <= before:
            return None
        self.seconds = needed
        return f"Adjusting eval interval from {before:.2f}s to {needed:.2f}s"
