"""The tables of `fab jobs` and `fab describe`."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from typing import Any

from infra.scale_tiers import suggest
from jobs import paths
from jobs.progress import JobProgress
from jobs.queue import Queue
from jobs.records import CancelRequest, JobRecord, ReplicaRecord
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState
from jobs.times import seconds_between
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import failure_hint, first_error, format_elapsed, readable_jobs
from ops.errors import DONE, UsageError
from ops.submit import manifest, outcome, trials
from ops.submit.tuning import HYPERPARAMETERS


def jobs(cluster: ClusterClient, filter_text: str | None, limit: str | None, as_json: bool) -> int:
    """List the jobs, or those that match the filter, the newest first."""
    matches, max_jobs = _parse_filter(filter_text or ""), _parse_limit(limit)
    records = readable_jobs(cluster.ledger)
    total = len(records)
    records = [record for record in records if matches(record)][:max_jobs]
    if as_json:
        terminal.print_json([record.to_dict() for record in records])
        return DONE
    if not records:
        terminal.note(
            f"none of {total} jobs is {filter_text}" if total else "no job was started on this cluster yet: fab train"
        )
        return DONE
    terminal.table(("JOB", "STATE", "CREATED", "TIME", "BY", "LABELS", "ERROR"), map(_job_row, records))
    return DONE


def _job_row(record: JobRecord) -> tuple[object, ...]:
    created, error = terminal.local_time(record.createTime), record.errorMessage.partition("\n")[0]
    return record.jobId, record.state, created, format_elapsed(record), record.submittedBy, _labels(record, ","), error


def _labels(record: JobRecord, separator: str) -> str:
    return separator.join(f"{key}={value}" for key, value in record.labels.items())


def _parse_filter(text: str) -> Callable[[JobRecord], bool]:
    """Parse `--filter`: `state=FAILED,by=ann`, another key for a label, or parts of the id; all conditions must match."""
    conditions = [part.partition("=") for part in filter(None, text.split(","))]
    for key, equals, value in conditions:
        if key == "state" and equals and value.upper() not in list(JobState):
            valid = f"{', '.join(JobState)}{suggest(value.upper(), JobState)}"
            raise UsageError(f"--filter state={value} is invalid. Valid: {valid}")
    return lambda record: all(_matches(record, *condition) for condition in conditions)


def _matches(record: JobRecord, key: str, equals: str, value: str) -> bool:
    if not equals:
        return key in record.jobId
    if key == "state":
        return record.state == value.upper()
    if key == "by":
        return value in (record.submittedBy, record.submittedBy.partition("@")[0])
    return record.labels.get(key) == value


def _parse_limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--limit {text!r} is invalid. Valid: 1 and above")
    return int(text)


def _cancelled_by(cluster: ClusterClient, record: JobRecord) -> str | None:
    """Return the user who cancelled a job, with the reason if one was stated."""
    if record.state is not JobState.CANCELLED or (item := cluster.ledger.store.read(paths.cancel(record.jobId))) is None:
        return None
    try:
        request = CancelRequest.from_json(item.content)
    except RecordError:
        return None
    return f"by {request.requestedBy}" + (f": {request.reason}" if request.reason else "")


def describe(cluster: ClusterClient, job_id: str | None, as_json: bool) -> int:
    """Print all records of a job."""
    job = Client(cluster).get(job_id)
    if as_json:
        tuned = trials.read(cluster.ledger, job.record)
        output = {"trainingOutput": tuned.output()} if tuned else {}
        terminal.print_json({**job.to_dict(), **output})
        return DONE
    describe_to_stdout(cluster, job.record, list(job.replicas))
    if more := failure_hint(job.record):
        terminal.note(more)
    return DONE


def describe_to_stdout(cluster: ClusterClient, record: JobRecord, replicas: list[ReplicaRecord]) -> None:
    """Print the records of a job as text."""
    tuned = trials.read(cluster.ledger, record)
    first = first_error(record, replicas)
    queue = cluster.ledger.queue() if record.state is JobState.QUEUED else Queue()
    ahead = queue.ahead_of(record.jobId)
    reserved = sum(job == record.jobId for job in queue.reserved_hosts().values())
    facts = {
        "job": record.jobId,
        "state": terminal.state(record.state) + (f" behind {', '.join(entry.jobId for entry in ahead)}" if ahead else ""),
        "waits for": f"{terminal.plural(len(record.replica_names), 'host')}, {reserved} free and reserved for it"
        if ahead
        else None,
        "priority": record.priority or None,
        "created": f"{terminal.local_time(record.createTime)} by {record.submittedBy}",
        "started": terminal.local_time(record.startTime),
        "ended": terminal.local_time(record.endTime),
        "cancelled": _cancelled_by(cluster, record),
        "took": format_elapsed(record),
        "cost": None if record.cost is None else f"{terminal.dollars(record.cost)} USD",
        "retries": record.attempt or None,
        "continues without": ", ".join(record.droppedReplicas),
        "labels": _labels(record, ", "),
        "first error": f"{first[0]}, {terminal.local_time(first[1].time)}: {first[1].message}" if first else None,
        "progress": _progress(record.progress),
        "metrics": _metrics(record.progress),
        "notify": _notify(record),
        "tunes": tuned.line() if tuned else None,
        "trials": tuned.summary() if tuned else None,
        **{key: _format_value(value) for key, value in record.trainingInput.items() if key != HYPERPARAMETERS},
        **manifest.format_lines(record.manifest),
        "output": "the job wrote nothing to JOB_DIR" if _wrote_nothing(replicas) else None,
    }
    for key, value in facts.items():
        if value not in (None, ""):
            terminal.out(f"{key + ':':<14} {value}")
    if replicas and record.state is not JobState.QUEUED:
        terminal.out()
        heads = ("REPLICA", "HOST", "STATE", "EXIT CODE", "STARTS", "LAST START", "HEARTBEAT")
        terminal.table(heads, [_replica_row(record, replica) for replica in replicas])
    if tuned:
        tuned.show()
    if events := _events(record, replicas):
        terminal.out()
        terminal.table(("TIME", "WHO", "WHAT", "SECONDS TO RECOVER"), events)
    for text in ("\n".join(outcome.describe_unsaved(replicas)), record.errorMessage.rstrip("\n")):
        if text:
            terminal.out(f"\n{text}")


def _wrote_nothing(replicas: list[ReplicaRecord]) -> bool:
    """Return whether each replica that checked JOB_DIR found it empty: one that checked early may have missed a later write."""
    reports = [replica.unsaved.jobDirEmpty for replica in replicas if replica.unsaved and replica.startTime]
    return bool(reports) and all(reports)


def _progress(progress: JobProgress | None) -> str | None:
    """Describe the progress of a job: `step 348 of 5000 (7 %), 200.4 steps/s, 23.2 s left`."""
    if progress is None:
        return None
    total, rate = progress.totalSteps, progress.stepsPerSecond
    parts = [
        f"step {progress.step}" + (f" of {total} ({min(100 * progress.step // total, 100)} %)" if total else ""),
        f"{terminal.rate(rate)} steps/s" if rate else "",
        f"{terminal.duration(progress.etaSeconds)} left" if progress.etaSeconds is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _metrics(progress: JobProgress | None) -> str | None:
    if progress is None:
        return None
    loss = {} if progress.loss is None else {"loss": progress.loss}
    return ", ".join(f"{name} {value:.4g}" for name, value in (loss | progress.metrics).items())


def _notify(record: JobRecord) -> str | None:
    """Describe a job's notification: its target, and whether it was sent."""
    if (notice := record.notification) is None:
        return None
    if notice.time is None:
        return f"{notice.target} {'is not reported yet' if record.final else 'when it ends'}"
    tries = f" ({terminal.plural(notice.attempts, 'attempt')})" if notice.attempts > 1 else ""
    return f"{notice.target} {f'failed: {notice.error}' if notice.error else terminal.local_time(notice.time)}{tries}"


def _replica_row(record: JobRecord, replica: ReplicaRecord) -> tuple[object, ...]:
    alive = not record.final and replica.state != ReplicaState.EXITED
    reported = alive and replica.incarnation
    heartbeat = f"{terminal.duration(max(seconds_between(replica.heartbeatTime), 0))} ago" if reported else None
    code = None if replica.exitCode is None else str(replica.exitCode)
    if record.state is JobState.SUCCEEDED and replica.exitCode == 128 + signal.SIGTERM:
        code = f"{code} (stopped)"  # as the chief has succeeded
    last = terminal.local_time(replica.lastStartTime or replica.startTime)
    return (replica.name, record.placement.get(replica.name), replica.state, code, str(replica.starts), last, heartbeat)


def _events(record: JobRecord, replicas: list[ReplicaRecord]) -> list[tuple[object, ...]]:
    """List the events of the job and its replicas by time, such as restarts with their cause."""
    events = [("job", event) for event in record.events]
    events += [(replica.name, event) for replica in replicas for event in replica.events]
    events.sort(key=lambda source_and_event: source_and_event[1].time)
    return [(terminal.local_time(event.time), source, event.cause, event.seconds) for source, event in events]


def _format_value(value: Any) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)
