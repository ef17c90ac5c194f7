"""`fab logs`, and what `fab train` shows of its job: in lines, or on a screen where there can be one."""

from __future__ import annotations

import sys

from jobs.chunks import LogFilter
from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job
from ops.errors import DETACHED, DONE, FAILED, UsageError
from ops.logs import read
from ops.logs.lines import merge


def show_logs(
    cluster: Cluster,
    selection: str | None,
    job_id: str | None,
    wanted: LogFilter,
    follow: bool,
    as_json: bool,
    plain: bool = True,
) -> int:
    """Print the logs of a replica, a role or all of them; of a job, where `selection` is the id of one.

    What is followed is a screen on a terminal, unless `plain` lines are wanted.
    """
    if follow and wanted.until:
        raise UsageError("--until is for what has been printed, --follow for what will be: say one of them")
    selection, job_id = read.meant_by(cluster, selection, job_id)
    record = existing_job(cluster.ledger, job_id)
    replicas = read.selected(record, selection)
    if follow and not record.final:
        return _follow(cluster, record, replicas, wanted, as_json, plain)
    write = read.writer(replicas, as_json, read.first_of(cluster, record))
    for line in merge(read.read_logs(cluster, record, replicas, wanted).values()):
        write(line)
    sys.stdout.flush()
    return FAILED if follow and record.state is not JobState.SUCCEEDED else DONE


def _follow(cluster: Cluster, record: JobRecord, replicas: list[str], wanted: LogFilter, as_json: bool, plain: bool) -> int:
    """Print the logs until the job ends or the user interrupts; return 0 if the job SUCCEEDED."""
    job_id = record.jobId
    try:
        end = followed(cluster, record, replicas, wanted, as_json, plain)
    except KeyboardInterrupt:
        return DETACHED
    if end is None:
        return FAILED
    why = end.errorMessage.partition("\n")[0]
    terminal.note(f"{job_id} {end.state}" + (f": {why}" if why else ""))
    return DONE if end.state is JobState.SUCCEEDED else FAILED


def followed(
    cluster: Cluster, record: JobRecord, replicas: list[str], wanted: LogFilter, as_json: bool, plain: bool
) -> JobRecord | None:
    """Show the logs as they grow; the job's final record, None where it never came to be seen."""
    if plain or as_json or not terminal.has_screen():
        return read.follow(cluster, record, replicas, wanted, as_json)
    from ops.screen.follow import follow  # with rich, which plain lines do not wait for

    return follow(cluster, record, replicas, wanted)
