"""A job's sources, read from the bucket and its hosts; each part that cannot be read becomes a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jobs import paths, progress
from jobs.checked import RecordError
from jobs.chunks import LogFilter
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState
from jobs.store import StoreError
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job, replica_names, replicas_of
from ops.cluster.output import EVALUATION, JobOutput, find
from ops.errors import OpsError, one_line
from ops.logs.lines import LogLine
from ops.logs.read import read_logs
from ops.plan import plan, planned
from ops.report.evaluation import LARGEST_FILE, EvaluationError, parse
from ops.report.report import Evaluation, Planned
from ops.submit import trials
from ops.submit.metrics import final_metrics, scalars
from ops.submit.trials import Tuned

T = TypeVar("T")
_POINTS = 1000


LOUD = ("ERROR", "CRITICAL")
"""Severities of the lines that a page has."""


@dataclass(frozen=True)
class Sources:
    """The sources of a report.

    `logs` are each replica's lines, `scalars` those of summaries, by `run/tag`, if the logs report no step; `madeTime` is when
    they were read, RFC 3339. If a job `tuned` hyperparameters, the output is its best trial's.
    """

    record: JobRecord
    replicas: list[ReplicaRecord]
    madeTime: str
    logs: dict[str, list[LogLine]] = field(default_factory=dict)
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    planned: Planned | None = None
    tuned: Tuned | None = None
    notes: list[str] = field(default_factory=list)


def read(cluster: Cluster, job_id: str | None) -> Sources:
    """Read the sources of a job, by default the newest.

    Raises:
        UsageError: if there is no such job.
        OpsError: if it never started.
    """
    record = existing_job(cluster.ledger, job_id)
    replicas = replicas_of(cluster.ledger, record)
    check_started(record, replicas)
    notes: list[str] = []
    none: dict[str, list[LogLine]] = {}
    logs = tried(lambda: _logs(cluster, record), none, notes, "no log was read")
    output = tried(lambda: find(cluster, record), None, notes, "the output was not read")
    tuned = tried(lambda: trials.read(cluster.ledger, record), None, notes, "the trials were not read")
    if output and tuned:
        output = output.of_trial(tuned.best)
    has_curves = any(
        progress.trained(line.message) or progress.evaluated(line.message) for log in logs.values() for line in log
    )
    curves: dict[str, list[tuple[int, float]]] = {}
    if output and not has_curves:
        curves = tried(lambda: scalars(cluster, output, _POINTS), {}, notes, "the summaries were not read")
    evaluation = tried(lambda: _evaluation(output), None, notes, f"{EVALUATION} was not used") if output else None
    return Sources(
        record,
        replicas,
        now(),
        logs,
        curves,
        _metrics(cluster, record, logs),
        tried(lambda: _manifest(cluster, record.jobId), {}, notes, "the manifest was not read"),
        evaluation,
        _planned(cluster, record),
        tuned,
        notes,
    )


def check_started(record: JobRecord, replicas: list[ReplicaRecord]) -> None:
    """Check that a job has run.

    Raises:
        OpsError: if nothing of it has run, or ever will.
    """
    if record.startTime or any(replica.startTime for replica in replicas):
        return
    if not record.final:
        raise OpsError(f"job {record.jobId} is {record.state}: there is nothing to report yet")
    why = record.errorMessage.partition("\n")[0]
    raise OpsError(
        f"job {record.jobId} is {record.state} and never started: there is nothing to report" + (why and f" ({why})")
    )


def tried(read_it: Callable[[], T], otherwise: T, notes: list[str], what: str) -> T:
    """Return the result of `read_it`; if it fails, add a note with the reason and return `otherwise`."""
    try:
        return read_it()
    except (OpsError, StoreError, RecordError, EvaluationError, OSError) as error:
        notes.append(f"{what}: {one_line(error)}")
        return otherwise


def _logs(cluster: Cluster, record: JobRecord) -> dict[str, list[LogLine]]:
    with terminal.Step(f"reading the logs of {record.jobId}"):
        logs = read_logs(cluster, record, replica_names(record), LogFilter())
        return {name: [line for line in log if _tells(line)] for name, log in logs.items()}


def _tells(line: LogLine) -> bool:
    """Return whether the page uses a line: a log may be of any size."""
    return line.severity in LOUD or progress.tells(line.message)


def _metrics(cluster: Cluster, record: JobRecord, logs: dict[str, list[LogLine]]) -> dict[str, str]:
    """Return the final metrics, from the chief's log if it has them, which saves a second read."""
    chief = next(iter(replica_names(record)), "")
    metrics = progress.final_metrics(line.message for line in logs.get(chief, []))
    return metrics or (final_metrics(cluster, record) if record.final else {})


def _manifest(cluster: Cluster, job_id: str) -> dict[str, Any]:
    """Return the manifest, empty if the job has none."""
    try:
        whole = json.loads(cluster.bucket.read(paths.manifest(job_id)) or b"{}")
    except (ValueError, RecursionError):
        raise OpsError("it is no JSON") from None
    if not isinstance(whole, dict):
        raise OpsError("it is no JSON object")
    return whole


def _evaluation(output: JobOutput) -> Evaluation | None:
    if EVALUATION not in output.files:
        return None
    if output.files[EVALUATION] > LARGEST_FILE:
        raise EvaluationError(f"it has {terminal.size(output.files[EVALUATION])}; {terminal.size(LARGEST_FILE)} is the most")
    return parse(output.read(EVALUATION))


def _planned(cluster: Cluster, record: JobRecord) -> Planned | None:
    """Return the stored plan's forecast for the job, or None if there is none that fits the stack."""
    if record.state is not JobState.SUCCEEDED or not any(plan.PLANS.glob("*.json")):
        return None
    try:
        checked = planned.compared(cluster, record)
    except (OpsError, StoreError, OSError):
        return None
    forecast = checked.found
    figures = (round(forecast.rate, 2), round(checked.measured, 2), round(checked.error, 1), round(forecast.speed_up, 2))
    return Planned(checked.made["createTime"], *figures, forecast.bound)
