"""Steps of a job to a target, by its replicas: a pure model of two numbers; see docs/plan.md.

Source: McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", equation 2.11: a job that takes S
steps of batches of E/S samples has (S/S_min - 1)(E/E_min - 1) = 1. N replicas, each with a batch of its own, count as one with
a batch N times as large: then S = S_min + noise/N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jobs.progress import MetricPoint
from ops.errors import UsageError
from ops.plan.scaling import Prediction

REPLICAS = "1,2,5"
_MOST_REPLICAS = 16
# Parts of the names of Keras's losses and metrics of which less is better.
_SMALLER = re.compile(
    r"loss|error|entropy|perplexity|divergence|hinge|poisson|log_?cosh|(^|[^a-z])(mae|mape|r?msl?e)([^a-z]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class AccuracyTarget:
    """A metric of the Eval lines and its target value: an upper limit if less of it is better."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    @property
    def smaller(self) -> bool:
        """True if less is better, by the metric's name."""
        return bool(_SMALLER.search(self.metric))

    def reached(self, value: float) -> bool:
        return value <= self.value if self.smaller else value >= self.value


@dataclass(frozen=True)
class Crossing:
    """The `step`, of all replicas together, at which a target is reached, between `before` and `after`."""

    step: float
    before: MetricPoint
    after: MetricPoint


@dataclass(frozen=True)
class StepsModel:
    """Each of n replicas takes `least` + `noise` / n steps to the target; neither number is below 0."""

    least: float
    noise: float

    def steps(self, replicas: int) -> float:
        """Return the steps of all replicas together."""
        return self.least * replicas + self.noise

    def seconds(self, replicas: int, rate: float) -> float:
        """Return the seconds to the target if the replicas together take `rate` steps/s."""
        return self.steps(replicas) / rate


@dataclass(frozen=True)
class TargetModel:
    """The law of jobs by one strategy, measured with at most `most` replicas, from a plan's `until`."""

    target: AccuracyTarget
    strategy: str
    law: StepsModel
    most: int
    until: Mapping[str, Any]

    @classmethod
    def of(cls, until: Mapping[str, Any]) -> TargetModel:
        """Parse a plan's `until`."""
        law = StepsModel(until["leastSteps"], until["noiseSteps"])
        most = max(run["replicas"] for run in until["runs"])
        return cls(AccuracyTarget(until["metric"], until["value"]), until["strategy"], law, most, until)

    def by(self, strategy: str) -> TargetModel | None:
        """Return this for the strategy that was measured, else None."""
        return self if strategy == self.strategy else None

    def seconds(self, prediction: Prediction) -> float:
        """Return the seconds to the target at a predicted rate."""
        return self.law.seconds(prediction.replicas, prediction.rate)

    def speed_up(self, prediction: Prediction) -> float:
        """Return how many times as long one process on the master's machine takes to the target."""
        return self.law.seconds(1, prediction.alone) / self.seconds(prediction)


def parse_target(text: str) -> AccuracyTarget:
    """Parse `accuracy=0.97`."""
    metric, equals, number = (part.strip() for part in text.rpartition("="))
    if not equals or not metric:
        raise UsageError(f"--until {text!r} is not of the form METRIC=VALUE, such as accuracy=0.97 or loss=0.2")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--until {text!r}: {number!r} is no finite number")
    return AccuracyTarget(metric, value)


def parse_replicas(text: str) -> list[int]:
    """Parse `1,2,5`, and sort it."""
    words = [word.strip() for word in text.split(",")]
    wrong = next(
        (word for word in words if not (word.isascii() and word.isdecimal() and 0 < int(word) <= _MOST_REPLICAS)), None
    )
    if wrong is not None:
        raise UsageError(f"--replicas {text!r}: {wrong!r} is no whole number from 1 to {_MOST_REPLICAS}")
    counts = sorted({int(word) for word in words})
    if len(counts) < 2:
        raise UsageError(f"--replicas {text!r}: at least two different numbers are needed, such as {REPLICAS}")
    return counts


def crossing(goal: AccuracyTarget, evaluations: Sequence[MetricPoint]) -> Crossing | None:
    """Return when the evaluations first reach the target, interpolated between two of them.

    Returns:
        None if they do not reach it, or if the first one is there already, since when is then unknown.
    """
    points = [point for point in evaluations if goal.metric in point.values]
    for lower, upper in pairwise(points):
        low, high = lower.values[goal.metric], upper.values[goal.metric]
        if goal.reached(low):
            return None
        if goal.reached(high):
            part = (goal.value - low) / (high - low)
            return Crossing(lower.step + part * (upper.step - lower.step), lower, upper)
    return None


def nearest(goal: AccuracyTarget, evaluations: Sequence[MetricPoint]) -> MetricPoint | None:
    """Return the evaluation nearest to a target that none reached, or None if none has the metric."""
    points = [point for point in evaluations if goal.metric in point.values]
    best = min if goal.smaller else max
    return best(points, key=lambda point: point.values[goal.metric], default=None)


def fit(points: Sequence[tuple[int, float]]) -> StepsModel:
    """Fit the law to measurements: pairs of replicas and steps of them all together.

    Non-negative least squares of the relative error of the steps. At least two numbers of replicas must differ.
    """
    # Each measurement says p * least + q * noise = 1.
    rows = [(count / steps, 1 / steps) for count, steps in points]
    p, q = sum(p for p, _ in rows), sum(q for _, q in rows)
    pp, pq, qq = sum(p * p for p, _ in rows), sum(p * q for p, q in rows), sum(q * q for _, q in rows)
    determinant = pp * qq - pq * pq
    if determinant > 0:
        law = StepsModel((p * qq - q * pq) / determinant, (q * pp - p * pq) / determinant)
        if law.least >= 0 and law.noise >= 0:
            return law
    # If one of the two would be negative, the best fit has it at 0.
    return min(
        (StepsModel(p / pp, 0.0), StepsModel(0.0, q / qq)),
        key=lambda law: sum((law.least * p + law.noise * q - 1) ** 2 for p, q in rows),
    )


def largest_error(law: StepsModel, points: Sequence[tuple[int, float]]) -> float:
    """Return the largest deviation of the law from a measurement, in percent."""
    return max(100 * abs(law.steps(count) / steps - 1) for count, steps in points)
