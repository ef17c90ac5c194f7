"""Build a job's report from its evidence: pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from jobs import progress
from jobs.firsterror import ERROR_SEVERITIES
from jobs.progress import MetricPoint
from jobs.records import JobRecord, ReplicaRecord
from jobs.study import Parameter, ParameterType, ScaleType, Trial
from jobs.times import seconds_between
from ops import terminal
from ops.cluster.ledger import replica_names
from ops.errors import OpsError
from ops.logs.lines import LogLine
from ops.report.evidence import JobEvidence
from ops.report.report import (
    CATEGORICAL,
    RESTARTING,
    RUNNING,
    WAITING,
    Chart,
    Curve,
    JobCost,
    ReplicaThroughput,
    Report,
    ReportedReplica,
    TimelineEvent,
    TimelineSegment,
    TrialRow,
    TunedParameter,
    Tuning,
)
from ops.submit import compare
from ops.submit.trials import TuningResult
from ops.submit.tuning import HYPERPARAMETERS

MOST_CHARTS = 12
_MOST_ERRORS = 20
_MOST_TRIALS = 8
_LEADING_CHARTS = ("loss", "accuracy")
_OTHER_ARGUMENTS = "other arguments"


def make(job: JobEvidence) -> Report:
    """Build the report of a job, as of the time of its evidence."""
    record, tuned = job.record, job.tuned
    check_started(record, job.replicas)
    end = record.endTime or job.time
    charts = charts_from_trials(tuned) if tuned else charts_from_logs(job.logs, replica_names(record))
    source = ("trials" if tuned else "log") if charts else ""
    if not tuned and not charts and job.scalars:
        charts, source = charts_from_scalars(job.scalars), "summaries"
    evaluation, manifest, metrics = job.evaluation, job.manifest, job.metrics
    notes = list(job.notes)
    if len(charts) > MOST_CHARTS:
        notes.append(
            f"{terminal.plural(len(charts) - MOST_CHARTS, 'more chart')} not shown: fab tensorboard {record.jobId} has all"
        )
    return Report(
        job=record.jobId,
        state=str(record.state),
        running=not record.final,
        madeTime=job.time,
        createTime=record.createTime,
        startTime=record.startTime,
        endTime=record.endTime,
        seconds=round(max(seconds_between(record.startTime, end), 0), 3) if record.startTime else None,
        submittedBy=record.submittedBy,
        labels=dict(record.labels),
        retries=record.attempt,
        cost=cost(record, end),
        metrics=metrics,
        charts=charts[:MOST_CHARTS],
        chartsFrom=source,
        throughput=[] if tuned else replica_throughput(record, job.replicas, job.logs),
        timeline=list(timeline(record, job.replicas, end)),
        replicas=[_reported(record, each) for each in job.replicas],
        events=timeline_events(record, job.replicas),
        arguments=[str(word) for word in manifest.get("args", record.trainingInput.get("args", []))],
        inputs=job_inputs(record, manifest) | ({HYPERPARAMETERS: tuned.line()} if tuned else {}),
        errors=errors(record, job.replicas),
        errorLines=error_lines(job.logs),
        evaluation=evaluation,
        planned=job.planned,
        tuning=tuning(tuned, end) if tuned else None,
        notes=notes,
    )


def _reported(record: JobRecord, replica: ReplicaRecord) -> ReportedReplica:
    host = record.placement.get(replica.name)
    return ReportedReplica(replica.name, str(replica.state), replica.exitCode, replica.restarts, host)


def check_started(record: JobRecord, replicas: Sequence[ReplicaRecord]) -> None:
    """Check that a job has run; OpsError if it has not started, or ended without a start."""
    if record.startTime or any(replica.startTime for replica in replicas):
        return
    if not record.final:
        raise OpsError(f"job {record.jobId} is {record.state}: there is nothing to report yet")
    why = record.errorMessage.partition("\n")[0]
    raise OpsError(
        f"job {record.jobId} is {record.state} and never started: there is nothing to report" + (why and f" ({why})")
    )


def charts_from_logs(logs: Mapping[str, Sequence[LogLine]], names: Sequence[str]) -> list[Chart]:
    """Return the curves of the first replica with lines `Train [NAME], step N: …`, and of every replica's `Eval, step N: …`.

    `names` are the replicas, the chief first. The chief's curves are called `train` and `eval`, those of others `train, NAME`.
    Charts of loss and accuracy come first; one without a curve of two points is omitted.
    """
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def add(curve: str, points: Iterable[MetricPoint]) -> None:
        for each in points:
            for name, value in each.values.items():
                curves.setdefault(name, {}).setdefault(curve, []).append((each.step, value))

    messages = {name: [line.message for line in logs[name]] for name in names if name in logs}
    for name, lines in messages.items():
        if points := [*filter(None, map(progress.parse_train_metrics, lines))]:
            add(_curve_name("train", name, names), points)
            break
    for name, lines in messages.items():
        add(_curve_name("eval", name, names), filter(None, map(progress.parse_eval_metrics, lines)))
    return _charts(curves)


def charts_from_trials(tuned: TuningResult) -> list[Chart]:
    """Return the best trials' curves of the metric by step; empty if no trial reported more than a final value."""
    trials = [trial for trial in tuned.ranked if len(trial.allMetrics) > 1][:_MOST_TRIALS]
    curves = [
        Curve(f"trial {trial.trialId}", [(each.trainingStep, float(each.objectiveValue)) for each in trial.allMetrics])
        for trial in trials
    ]
    return [Chart(tuned.study.hyperparameterMetricTag, curves)] if curves else []


def tuning(tuned: TuningResult, end: str) -> Tuning:
    """Return the tuned hyperparameters, and the results of the trials until `end`."""
    study = tuned.study
    parameters = [TunedParameter(each.parameterName, _scale_kind(each)) for each in study.params]
    rows = [_trial_row(tuned, trial, end) for trial in tuned.ranked if study.allows(trial.hyperparameters)]
    return Tuning(study.hyperparameterMetricTag, str(study.goal), study.trial_count, parameters, rows)


def _trial_row(tuned: TuningResult, trial: Trial, end: str) -> TrialRow:
    value = float(trial.last.objectiveValue) if trial.last else None
    seconds = round(trial.seconds(end), 3)
    return TrialRow(trial.trialId, tuned.state(trial), value, trial.hyperparameters, trial.replica, trial.restarts, seconds)


def _scale_kind(parameter: Parameter) -> str:
    if parameter.type is ParameterType.CATEGORICAL:
        return CATEGORICAL
    has_logarithms = min(parameter.discreteValues, default=1) > 0
    return "log" if parameter.scaleType is ScaleType.UNIT_LOG_SCALE and has_logarithms else "linear"


def _curve_name(what: str, name: str, names: Sequence[str]) -> str:
    return what if name == names[0] else f"{what}, {name}"


def charts_from_scalars(scalars: Mapping[str, Sequence[tuple[int, float]]]) -> list[Chart]:
    """Return the charts of summaries: a chart for each tag, with a curve for each run, as of train/loss and eval/loss."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path, points in scalars.items():
        run, _, name = path.rpartition("/")
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        curves.setdefault(name, {})[run or name] = finite
    return _charts(curves)


def _charts(curves: Mapping[str, Mapping[str, list[tuple[int, float]]]]) -> list[Chart]:
    ordered = sorted(curves, key=lambda name: _LEADING_CHARTS.index(name) if name in _LEADING_CHARTS else len(_LEADING_CHARTS))
    charts = (Chart(name, [Curve(curve, points) for curve, points in curves[name].items()]) for name in ordered)
    return [chart for chart in charts if any(len(curve.points) > 1 for curve in chart.curves)]


def replica_throughput(
    record: JobRecord, replicas: Sequence[ReplicaRecord], logs: Mapping[str, Sequence[LogLine]]
) -> list[ReplicaThroughput]:
    """Return each replica's steps/s: as its Train lines report, else by the rise of the global step between them."""
    throughput = []
    for replica in replicas:
        lines = logs.get(replica.name, [])
        points = [(_since_creation(record, line.time), progress.parse_train_metrics(line.message)) for line in lines]
        own = [(seconds, each.rate) for seconds, each in points if each and each.rate is not None]
        if rates := own or _step_rates(record, lines):
            restarts = [_since_creation(record, event.time) for event in replica.events]
            throughput.append(ReplicaThroughput(replica.name, bool(own), rates, restarts))
    return throughput


def _step_rates(record: JobRecord, lines: Iterable[LogLine]) -> list[tuple[float, float]]:
    points = [
        (_since_creation(record, line.time), point) for line in lines if (point := progress.parse_train_point(line.message))
    ]
    return [
        (seconds, round((b.step - a.step) / (b.seconds - a.seconds), 3))
        for (_, a), (seconds, b) in pairwise(points)
        if b.seconds > a.seconds and b.step >= a.step
    ]


def timeline(record: JobRecord, replicas: Sequence[ReplicaRecord], end: str) -> Iterator[TimelineSegment]:
    """Yield the states of the job and of each replica, until the job's end or until now."""
    last = _since_creation(record, end)
    begin = _since_creation(record, record.startTime) if record.startTime else last
    yield TimelineSegment("job", WAITING, 0.0, begin)
    if record.startTime:
        yield TimelineSegment("job", RUNNING, begin, max(last, begin))
    for replica in replicas:
        if replica.startTime:
            yield from _replica_timeline(record, replica, _since_creation(record, replica.endTime) if replica.endTime else last)


def _replica_timeline(record: JobRecord, replica: ReplicaRecord, end: float) -> Iterator[TimelineSegment]:
    at = _since_creation(record, replica.startTime or "")
    # `startTime` is the time of the first start, also after restarts of the job.
    for event, following in zip_longest(replica.events, replica.events[1:]):
        ended_at = max(_since_creation(record, event.time), at)
        yield TimelineSegment(replica.name, RUNNING, at, ended_at)
        until = _since_creation(record, following.time) if following else end
        at = max(min(ended_at + event.seconds, until), ended_at) if event.seconds is not None else max(until, ended_at)
        yield TimelineSegment(replica.name, RESTARTING, ended_at, at)
    if end > at:
        yield TimelineSegment(replica.name, RUNNING, at, end)


def timeline_events(record: JobRecord, replicas: Sequence[ReplicaRecord]) -> list[TimelineEvent]:
    """List every restart with its cause, and the job's other events, by time."""
    events = [TimelineEvent(event.time, "job", event.cause, event.seconds) for event in record.events]
    events += [TimelineEvent(event.time, each.name, event.cause, event.seconds) for each in replicas for event in each.events]
    return sorted(events, key=lambda event: event.time)


def cost(record: JobRecord, end: str) -> JobCost | None:
    """Return the recorded cost once the job has ended, else the cost so far; None if hosts have no price."""
    total = record.cost_until(end)
    return None if record.hourlyCost is None or total is None else JobCost(record.hourlyCost, total)


def job_inputs(record: JobRecord, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the job's inputs except its arguments, from its manifest or else its record."""
    values = {**record.trainingInput, **manifest}
    command = values.get("command")
    config = manifest.get("config")
    facts = {
        "module": None if command else values.get("module") or values.get("pythonModule"),
        "command": command,
        **compare.inputs(record.manifest),
        "reproduces": manifest.get("reproduces"),
        "output": values.get("jobDir"),
        **(config if isinstance(config, dict) else {}),
        **{f"env {name}": value for name, value in _mapping(values.get("environment")).items()},
        "secrets": values.get("secrets"),
    }
    return {name: _format_value(value) for name, value in facts.items() if value not in (None, "", [], {})}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def errors(record: JobRecord, replicas: Sequence[ReplicaRecord]) -> list[str]:
    """List why the job failed, and other errors of its replicas."""
    why = record.errorMessage.rstrip()
    messages = (f"{each.name}: {each.errorMessage.rstrip()}" for each in replicas if each.errorMessage.rstrip() not in why)
    return [*filter(None, [why]), *messages]


def error_lines(logs: Mapping[str, Sequence[LogLine]]) -> list[str]:
    """Return the last lines that the replicas logged as errors, by time."""
    lines = sorted(line for log in logs.values() for line in log if line.severity in ERROR_SEVERITIES)[-_MOST_ERRORS:]
    return [f"{line.time[11:23]} {line.replica} {line.message}" for line in lines]


def _since_creation(record: JobRecord, moment: str) -> float:
    """Return the seconds from the job's creation to a moment, never below 0, as clocks differ."""
    return round(max(seconds_between(record.createTime, moment), 0.0), 3)


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse each flag with its value.

    Both `--a=b` and `--a b` are understood. The values of a repeated flag are joined by commas, a flag without a value has
    `yes`, and words that belong to no flag are joined under one name.
    """
    options: dict[str, list[str]] = {}
    last = None
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            last, equals, value = word.partition("=")
            options.setdefault(last, []).extend([value] if equals else [])
            last = None if equals else last
        else:
            options.setdefault(last or _OTHER_ARGUMENTS, []).append(word)
            last = None
    return {name: ", ".join(values) or "yes" for name, values in options.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def compared_inputs(report: Report) -> dict[str, str]:
    """Return the inputs of a job to compare, flag by flag, and its labels, but not its output path."""
    inputs = {name: value for name, value in report.inputs.items() if name != "output"}
    return {**inputs, **flags(report.arguments), **{f"label {name}": value for name, value in report.labels.items()}}


def compared_results(report: Report) -> dict[str, str]:
    """Return the results of a job to compare."""
    return compare.results(report.state, report.metrics, report.seconds, report.cost.total if report.cost else None)
