"""Hyperparameter tuning in Cloud ML's terms: the `HyperparameterSpec` of a job, and its trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from jobs.serialization import Record
from jobs.times import now, seconds_between

METRIC_TAG = "training/hptuning/metric"
"""Cloud ML's default of hyperparameterMetricTag, and the tag of `cloudml-hypertune`'s reports."""
MOST_MEASUREMENTS = 200


class Goal(StrEnum):
    MAXIMIZE = "MAXIMIZE"
    MINIMIZE = "MINIMIZE"

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return max(values) if self is Goal.MAXIMIZE else min(values)

    def better(self, value: float, other: float) -> bool:
        """Return True if a value is better than another."""
        return value > other if self is Goal.MAXIMIZE else value < other


class Algorithm(StrEnum):
    ALGORITHM_UNSPECIFIED = "ALGORITHM_UNSPECIFIED"
    GRID_SEARCH = "GRID_SEARCH"
    RANDOM_SEARCH = "RANDOM_SEARCH"


class ParameterType(StrEnum):
    DOUBLE = "DOUBLE"
    INTEGER = "INTEGER"
    CATEGORICAL = "CATEGORICAL"
    DISCRETE = "DISCRETE"


class ScaleType(StrEnum):
    NONE = "NONE"
    UNIT_LINEAR_SCALE = "UNIT_LINEAR_SCALE"
    UNIT_LOG_SCALE = "UNIT_LOG_SCALE"
    UNIT_REVERSE_LOG_SCALE = "UNIT_REVERSE_LOG_SCALE"


class TrialState(StrEnum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter: a range from minValue to maxValue, both inclusive, or a list of values."""

    parameterName: str
    type: ParameterType
    minValue: float | None = None
    maxValue: float | None = None
    categoricalValues: list[str] = field(default_factory=list)
    discreteValues: list[float] = field(default_factory=list)
    scaleType: ScaleType = ScaleType.NONE

    @property
    def choices(self) -> list[str] | range | None:
        """Its values in order if there are finitely many: texts, or the range of an INTEGER; else None."""
        if self.type is ParameterType.CATEGORICAL:
            return self.categoricalValues
        if self.type is ParameterType.DISCRETE:
            return [format_value(value) for value in self.discreteValues]
        if self.type is ParameterType.INTEGER:
            return range(int(self.minValue or 0), int(self.maxValue or 0) + 1)
        return None

    def allows(self, value: str | None) -> bool:
        """Return True for a value that a trial can have."""
        if value is None or self.type in (ParameterType.CATEGORICAL, ParameterType.DISCRETE):
            return value in (self.choices or ())
        try:
            number = int(value) if self.type is ParameterType.INTEGER else float(value)
            return (self.minValue or 0.0) <= number <= (self.maxValue or 0.0)
        except ValueError:
            return False


@dataclass(frozen=True)
class Measurement:
    """The metric at a global step."""

    trainingStep: int
    objectiveValue: float


@dataclass(frozen=True)
class EarlierTrial:
    """The result of a trial of an earlier job."""

    hyperparameters: dict[str, str]
    objectiveValue: float


@dataclass(frozen=True)
class Study:
    """The tuning of a job.

    `jobDir` is the folder of the trials' own folders, `1`, `2` and so on. jobDirFlag is the flag that passes a trial its
    folder, empty if the program has none. `seed` is the seed of all random choices; `earlier` are the trials of
    resumePreviousJobId.
    """

    params: list[Parameter]
    goal: Goal = Goal.MAXIMIZE
    hyperparameterMetricTag: str = METRIC_TAG
    maxTrials: int = 1
    maxParallelTrials: int = 1
    maxFailedTrials: int = 3
    algorithm: Algorithm = Algorithm.ALGORITHM_UNSPECIFIED
    enableTrialEarlyStopping: bool = False
    resumePreviousJobId: str = ""
    jobDir: str = ""
    jobDirFlag: str = ""
    seed: int = 0
    earlier: list[EarlierTrial] = field(default_factory=list)

    @property
    def grid_size(self) -> int | None:
        """The number of points of a grid, or None if a parameter has infinitely many values."""
        choices = [parameter.choices for parameter in self.params]
        return math.prod(len(each or ()) for each in choices) if None not in choices else None

    @property
    def trial_count(self) -> int:
        """The number of trials: maxTrials, or the grid points that no earlier trial tried, if they are fewer."""
        if self.algorithm is not Algorithm.GRID_SEARCH or (grid_size := self.grid_size) is None:
            return self.maxTrials
        tried = {tuple(sorted(trial.hyperparameters.items())) for trial in self.earlier if self.allows(trial.hyperparameters)}
        return min(self.maxTrials, grid_size - len(tried))

    def allows(self, hyperparameters: Mapping[str, str]) -> bool:
        """Return True if a trial of this study can have these values; records of trials are not trusted."""
        return all(each.allows(hyperparameters.get(each.parameterName)) for each in self.params)

    def folder(self, trial: int) -> str:
        """Return the folder of a trial's output, as in Cloud ML."""
        return f"{self.jobDir}/{trial}"


@dataclass(frozen=True)
class Trial(Record):
    """`jobs/<id>/trials/<trialId>.json`: written by the replica that it names. Another replica may take the trial over."""

    kind: ClassVar[str] = "the record of a trial"

    trialId: int
    hyperparameters: dict[str, str]
    replica: str
    host: str = ""
    state: TrialState = TrialState.RUNNING
    restarts: int = 0
    startTime: str = field(default_factory=now)
    endTime: str | None = None
    allMetrics: list[Measurement] = field(default_factory=list)
    finalMetric: Measurement | None = None
    isTrialStoppedEarly: bool = False
    errorMessage: str = ""

    @property
    def final(self) -> bool:
        return self.state is not TrialState.RUNNING

    @property
    def last(self) -> Measurement | None:
        """The metric at the end of the trial, or else the latest one."""
        return self.finalMetric or (self.allMetrics[-1] if self.allMetrics else None)

    def seconds(self, until: str) -> float:
        """Return its duration in seconds, so far if it still runs."""
        return max(seconds_between(self.startTime, self.endTime or until), 0.0)


def format_value(value: float) -> str:
    """Return a number as text for a trial's flag: 32 for 32.0."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def ranked(study: Study, trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials, the best first; those without a value come last, in the order of their numbers."""
    by_number = sorted(trials, key=lambda trial: trial.trialId)
    results = [(trial.finalMetric.objectiveValue, trial) for trial in by_number if trial.finalMetric]
    results.sort(key=lambda result: result[0], reverse=study.goal is Goal.MAXIMIZE)
    return [trial for _, trial in results] + [trial for trial in by_number if not trial.finalMetric]


def best(study: Study, trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the best final metric; among equals the first."""
    return next((trial for trial in ranked(study, trials) if trial.finalMetric), None)


def thin(measurements: list[Measurement]) -> list[Measurement]:
    """Return MOST_MEASUREMENTS at most of the measurements, evenly spaced, the last among them."""
    return measurements[:: -math.ceil(len(measurements) / MOST_MEASUREMENTS)][::-1] if measurements else []


def flags(hyperparameters: Mapping[str, str]) -> list[str]:
    """Return the flags of a trial; with an equals sign, as a value may begin with a minus."""
    return [f"--{name}={value}" for name, value in hyperparameters.items()]
