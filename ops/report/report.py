"""The values of a report: `fab report --json` prints them under these names.

Seconds are counted from the job's creation, steps are global ones, moments are RFC 3339 in UTC. None is an unknown value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WAITING, RUNNING, RESTARTING = "QUEUED, PREPARING", "RUNNING", "restarting"
"""The states of a segment."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart; `points` are (step, value) by time, and fall after a restart from a checkpoint."""

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

    `points` are (seconds, steps/s), `restarts` the seconds at which it was killed. `own` is False if its lines do not report
    its own steps, and the rates are those of the global step.
    """

    replica: str
    own: bool
    points: list[tuple[float, float]]
    restarts: list[float]


@dataclass(frozen=True)
class TimelineSegment:
    """The job, or a replica, in one state, one of the above, from `begin` to `end` seconds."""

    who: str
    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class TimelineEvent:
    """A restart, a lost host, or another event; recoverSeconds until it was up again."""

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
    """A misclassified picture, a PNG in base64: `label` and `predicted` are places in the classes."""

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
    """The plan and the measured value of steps/s, and errorPercent, above 0 if the plan is too high."""

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


@dataclass(frozen=True)
class TunedParameter:
    """A hyperparameter: its `kind` is `linear`, `log`, or `words` for values that are no numbers."""

    name: str
    kind: str


@dataclass(frozen=True)
class Tuning:
    """The hyperparameters, the trials and their goal, MAXIMIZE or MINIMIZE `metric`.

    `trials` are those of the `wanted` ones that exist: the best first, the unsuccessful last.
    """

    metric: str
    goal: str
    wanted: int
    parameters: list[TunedParameter]
    trials: list[TrialRow]


@dataclass(frozen=True)
class Report:
    """A job: `metrics` are the final ones, `inputs` made it, `notes` are the parts that could not be read.

    `errors` are the reason of a failure and the errors of its replicas. `errorLines` are the last lines that were logged as
    errors, with the time of day in UTC and the replica.
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
