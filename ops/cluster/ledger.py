"""The records of the cluster's jobs, as `fab` reads them."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace

from infra.scale_tiers import suggest
from jobs import paths
from jobs.firsterror import FirstError, earliest
from jobs.ledger import Ledger, Stored
from jobs.records import JobRecord, ReplicaRecord
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState
from jobs.times import now, seconds_between
from ops import terminal
from ops.errors import OpsError, UsageError


def current_user() -> str:
    """Return `ann@laptop`, the user's name in records."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def find_job(ledger: Ledger, job_id: str) -> JobRecord | None:
    """Return a job's record, or None if missing; OpsError if it cannot be read."""
    try:
        stored = ledger.job(job_id) if paths.JOB_ID.fullmatch(job_id) else None
    except RecordError as error:
        raise OpsError(f"the record of job {job_id} cannot be read: {error}") from None
    return stored.record if stored else None


def existing_job(ledger: Ledger, job_id: str | None) -> JobRecord:
    """Return a job's record, by default that of `newest_job`; UsageError if there is none."""
    if job_id is None and (job_id := newest_job(ledger, note_others=True)) is None:
        raise UsageError("no job has run on this cluster yet: start one with fab train")
    if record := find_job(ledger, job_id):
        return record
    job_ids = [record.jobId for record in ledger.jobs()[0]]
    listed = f"fab jobs lists {terminal.list_some(job_ids)}" if job_ids else "none was started yet"
    raise UsageError(f"there is no job {job_id!r}{suggest(job_id, job_ids)}; {listed}")


def newest_job(ledger: Ledger, note_others: bool = False) -> str | None:
    """Return the id of the newest job that has hosts, else that started, else of all; None if there is none.

    With `note_others`, print a line if other jobs have hosts, too.
    """
    running = [entry for entry in ledger.queue().entries if entry.has_hosts]
    if running:
        if note_others and len(running) > 1:
            others = ", ".join(entry.jobId for entry in running[:-1])
            also = f"{others} {'has' if len(running) == 2 else 'have'} hosts, too"
            terminal.note(f"this is of job {running[-1].jobId}, the newest that has hosts; {also}: name one")
        return running[-1].jobId
    jobs = ledger.jobs()[0]
    started = [job for job in jobs if job.startTime] or jobs
    return started[0].jobId if started else None


def readable_jobs(ledger: Ledger) -> list[JobRecord]:
    """Return the jobs whose records can be read, the newest first; note the others."""
    with terminal.ProgressLine("reading the jobs"):
        records, unreadable = ledger.jobs()
    for job_id, error in unreadable.items():
        terminal.note(f"not shown: {job_id}: {error}")
    return records


def format_elapsed(record: JobRecord) -> str | None:
    """Format the time since a job's start, until now or its end; None if it never started."""
    return terminal.duration(seconds_between(record.startTime, record.endTime or now())) if record.startTime else None


def failure_hint(record: JobRecord) -> str:
    """Return the command that collects why a job FAILED; empty for any other job."""
    return f"fab bundle {record.jobId} collects the evidence in one file" if record.state is JobState.FAILED else ""


def first_error(record: JobRecord, replicas: Iterable[ReplicaRecord]) -> tuple[str, FirstError] | None:
    """Return the first error in a job's logs if it may be why the job failed; that of a cancelled job often is not."""
    if record.state in (JobState.SUCCEEDED, JobState.CANCELLING, JobState.CANCELLED):
        return None
    return earliest((replica.name, replica.firstError) for replica in replicas)


def replica_names(record: JobRecord) -> list[str]:
    """Return the names of a job's replicas, the chief first."""
    return record.replica_names or [str(item.get("name")) for item in record.replicas]


def replicas_of(ledger: Ledger, record: JobRecord, note: Callable[[str], None] = terminal.note) -> list[ReplicaRecord]:
    """Return the records of a job's replicas, built from the job's record for those that have none.

    A lost replica has the state LOST. `note` gets a line about each record that cannot be read; its replica is skipped if the
    job's record lacks it.
    """
    names = replica_names(record)
    own_records = ledger.replicas_named(record.jobId, names)
    by_name = {str(item.get("name")): item for item in record.replicas}
    result = []
    for name in names:
        stored, entry = own_records.get(name), by_name.get(name)
        own = stored.record if isinstance(stored, Stored) else None
        if isinstance(stored, RecordError):
            note(f"not read: {name}: {stored}")
            if not entry:
                continue
        if own is None:
            own = ReplicaRecord.from_dict(entry) if entry else ReplicaRecord(name)
        elif name in record.lostReplicas or (entry and entry.get("state") == ReplicaState.LOST):
            own = replace(own, state=ReplicaState.LOST)
        result.append(own)
    return result
