"""The values of a report: `fab report --json` prints them under these names.

Moments are RFC 3339 in UTC; those in `throughput` and `timeline` are seconds since the job's creation. `seconds` and
`recoverSeconds` are durations. Steps are global steps. None is an unknown value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WAITING, RUNNING, RESTARTING = "QUEUED, PREPARING", "RUNNING", "restarting"
"""The states of a segment."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart; `points` are (step, value) by time; steps fall after a restart from a checkpoint."""

    name: str
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """All curves under one name, such as loss."""

    name: str
    curves: list[Curve]


@dataclass(frozen=True)
class ReplicaThroughput:
    """A replica's steps/s by its Train lines.

    `points` are (seconds, steps/s), `restarts` the seconds at which it ended and was to be restarted. `own` is False if its
    lines do not report its own steps; the rates are then those of the global step.
    """

    replica: str
    own: bool
    points: list[tuple[float, float]]
    restarts: list[float]


@dataclass(frozen=True)
class TimelineSegment:
    """The job, or a replica, in one of the states above, from `begin` to `end`."""

    who: str
    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class TimelineEvent:
    """A restart, a lost host, or another event of the job or of a replica; `recoverSeconds` passed until `who` ran again."""

    time: str
    who: str
    what: str
    recoverSeconds: float | None = None


@dataclass(frozen=True)
class ReportedReplica:
    """A replica's state or result; `host` is where it ran."""

    name: str
    state: str
    exitCode: int | None
    restarts: int
    host: str | None


@dataclass(frozen=True)
class JobCost:
    """US dollars by list price: per hour of the job's hosts, and in total until now or its end."""

    hourly: float
    total: float


@dataclass(frozen=True)
class Mistake:
    """A misclassified image, a PNG in base64; `label` and `predicted` are indexes of the classes."""

    label: int
    predicted: int
    image: str


@dataclass(frozen=True)
class Evaluation:
    """A trainer's JOB_DIR/evaluation.json; confusion[i][j] counts records of class i predicted as class j."""

    step: int | None
    classes: list[str]
    confusion: list[list[int]]
    mistakes: list[Mistake]


@dataclass(frozen=True)
class Planned:
    """Steps/s by the plan and as measured; errorPercent is above 0 if the plan is too high, `bound` is its bottleneck."""

    createTime: str
    stepsPerSecond: float
    measured: float
    errorPercent: float
    speedUp: float
    bound: str


@dataclass(frozen=True)
class TrialRow:
    """A trial: `value` of the metric at its end, or the last reported value; None if it reported none."""

    trialId: int
    state: str
    value: float | None
    hyperparameters: dict[str, str]
    replica: str
    restarts: int
    seconds: float


CATEGORICAL = "words"
"""The kind of a categorical hyperparameter."""


@dataclass(frozen=True)
class TunedParameter:
    """A hyperparameter; `kind` is the scale of its axis: `linear`, `log` or CATEGORICAL."""

    name: str
    kind: str


@dataclass(frozen=True)
class Tuning:
    """The hyperparameters, the trials and their goal, MAXIMIZE or MINIMIZE `metric`.

    `wanted` is the number of trials that the job is to run; `trials` are those so far, the best first, unsuccessful ones last.
    """

    metric: str
    goal: str
    wanted: int
    parameters: list[TunedParameter]
    trials: list[TrialRow]


@dataclass(frozen=True)
class Report:
    """A job: `metrics` are the final ones, `madeTime` is the time of this report, `notes` name parts that could not be read.

    `seconds` is how long the job ran; `inputs` are its inputs except `arguments`. `errors` are the reason of a failure and the
    errors of replicas, `errorLines` the last lines that were logged as errors, with the time of day in UTC and the replica.
    """

    job: str
    state: str
    running: bool
    madeTime: str
    createTime: str
    startTime: str | None
    endTime: str | None
    seconds: float | None
    submittedBy: str
    labels: dict[str, str]
    retries: int
    cost: JobCost | None
    metrics: dict[str, str]
    charts: list[Chart]
    chartsFrom: str
    throughput: list[ReplicaThroughput]
    timeline: list[TimelineSegment]
    replicas: list[ReportedReplica]
    events: list[TimelineEvent]
    arguments: list[str]
    inputs: dict[str, str]
    errors: list[str]
    errorLines: list[str]
    evaluation: Evaluation | None = None
    planned: Planned | None = None
    tuning: Tuning | None = None
    notes: list[str] = field(default_factory=list)
