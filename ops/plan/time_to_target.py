"""Model how many steps a job with N replicas takes to reach a target, with two parameters; see docs/plan.md.

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
# Matches names of Keras's losses and metrics of which lower is better.
_LOWER_IS_BETTER = re.compile(
    r"loss|error|entropy|perplexity|divergence|hinge|poisson|log_?cosh|(^|[^a-z])(mae|mape|r?msl?e)([^a-z]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class MetricTarget:
    """A metric of the Eval lines and its target value: an upper limit if lower is better, else a lower one."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    @property
    def lower_is_better(self) -> bool:
        """True if lower is better, by the metric's name."""
        return bool(_LOWER_IS_BETTER.search(self.metric))

    def reached(self, value: float) -> bool:
        return value <= self.value if self.lower_is_better else value >= self.value


@dataclass(frozen=True)
class Crossing:
    """The `step`, counted over all replicas, at which a target is reached: between the evaluations `before` and `after`."""

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
class TimeToTargetModel:
    """A plan's `until`: a target, and the model of the steps to it, measured by one strategy with at most `max_replicas`."""

    target: MetricTarget
    strategy: str
    steps_model: StepsModel
    max_replicas: int
    measurement: Mapping[str, Any]

    @classmethod
    def of(cls, measurement: Mapping[str, Any]) -> TimeToTargetModel:
        """Parse a plan's `until`."""
        steps_model = StepsModel(measurement["leastSteps"], measurement["noiseSteps"])
        max_replicas = max(run["replicas"] for run in measurement["runs"])
        return cls(
            MetricTarget(measurement["metric"], measurement["value"]),
            measurement["strategy"],
            steps_model,
            max_replicas,
            measurement,
        )

    def for_strategy(self, strategy: str) -> TimeToTargetModel | None:
        """Return this model if it was measured with that strategy, else None."""
        return self if strategy == self.strategy else None

    def seconds(self, prediction: Prediction) -> float:
        """Return the seconds to the target at a predicted rate."""
        return self.steps_model.seconds(prediction.replicas, prediction.rate)

    def speed_up(self, prediction: Prediction) -> float:
        """Return the speed-up to the target over one process on the master's machine."""
        return self.steps_model.seconds(1, prediction.alone) / self.seconds(prediction)


def parse_target(text: str) -> MetricTarget:
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
    return MetricTarget(metric, value)


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


def crossing(target: MetricTarget, evaluations: Sequence[MetricPoint]) -> Crossing | None:
    """Return when the evaluations first reach the target, interpolated between two of them.

    Returns:
        None if they do not reach it, or if already the first one has, as the step before it is unknown.
    """
    points = [point for point in evaluations if target.metric in point.values]
    for lower, upper in pairwise(points):
        low, high = lower.values[target.metric], upper.values[target.metric]
        if target.reached(low):
            return None
        if target.reached(high):
            part = (target.value - low) / (high - low)
            return Crossing(lower.step + part * (upper.step - lower.step), lower, upper)
    return None


def nearest(target: MetricTarget, evaluations: Sequence[MetricPoint]) -> MetricPoint | None:
    """Return the evaluation nearest to a target that was not reached, or None if none has the metric."""
    points = [point for point in evaluations if target.metric in point.values]
    best = min if target.lower_is_better else max
    return best(points, key=lambda point: point.values[target.metric], default=None)


def fit(points: Sequence[tuple[int, float]]) -> StepsModel:
    """Fit a model to measurements: pairs of the number of replicas and the steps of all of them together.

    The method is non-negative least squares of the relative error of the steps. It needs two different numbers of replicas.
    """
    # Each measurement gives an equation p * least + q * noise = 1.
    rows = [(count / steps, 1 / steps) for count, steps in points]
    p, q = sum(p for p, _ in rows), sum(q for _, q in rows)
    pp, pq, qq = sum(p * p for p, _ in rows), sum(p * q for p, q in rows), sum(q * q for _, q in rows)
    determinant = pp * qq - pq * pq
    if determinant > 0:
        steps_model = StepsModel((p * qq - q * pq) / determinant, (q * pp - p * pq) / determinant)
        if steps_model.least >= 0 and steps_model.noise >= 0:
            return steps_model
    # If one of the two would be negative, the best fit has it at 0.
    return min(
        (StepsModel(p / pp, 0.0), StepsModel(0.0, q / qq)),
        key=lambda steps_model: sum((steps_model.least * p + steps_model.noise * q - 1) ** 2 for p, q in rows),
    )


def largest_error(steps_model: StepsModel, points: Sequence[tuple[int, float]]) -> float:
    """Return the largest deviation of a model from a measurement, in percent."""
    return max(100 * abs(steps_model.steps(count) / steps - 1) for count, steps in points)
