"""The reasons why a followed job prints nothing: replicas wait for each other at its start and at its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops import terminal

END_QUIET_SECONDS = 3.0
"""The seconds without a line after which `waiting_at_end` is shown."""
START_QUIET_SECONDS = 60.0
"""The seconds without a line after which `waiting_at_start` is shown."""
# A job that has run for longer has started, whatever it prints.
_START_SECONDS = 600.0
_SHOWN = 6


def waiting_at_end(
    job: JobRecord, replicas: Mapping[str, ReplicaRecord], names: Sequence[str], reading: Collection[str]
) -> str:
    """Describe what is awaited between a job's last line and its end; empty before that.

    Args:
        reading: the replicas whose logs are not yet complete.
    """
    chief = replicas.get(job.replica_names[0]) if job.replica_names else None
    if not (job.final or job.state is JobState.CANCELLING or (job.state is JobState.RUNNING and chief and chief.succeeded)):
        return ""
    records = [replicas[name] for name in names if name in replicas]
    if running := [replica.name for replica in records if replica.state is not ReplicaState.EXITED]:
        return f"waiting for {terminal.list_some(running, most=_SHOWN)} to end"
    if not job.final:
        return "waiting for the job to end: all its replicas have"
    if looking := [replica.name for replica in records if replica.startTime and replica.unsaved is None]:
        return f"waiting for {terminal.list_some(looking, most=_SHOWN)} to look for files outside JOB_DIR"
    more = [name for name in names if name in reading]
    return f"collecting the logs of {terminal.list_some(more, most=_SHOWN)}" if more else ""


def waiting_at_start(job: JobRecord, replicas: Mapping[str, ReplicaRecord], names: Sequence[str]) -> str:
    """Describe which replica waits for what in a job that prints nothing; empty if that is unknown.

    A replica's `connections` describe its host's sockets, such as `connecting to worker-0:2222`.
    """
    if job.state not in (JobState.PREPARING, JobState.RUNNING) or job.runSeconds > _START_SECONDS:
        return ""
    records = {name: replicas.get(name) for name in names}
    if all(r and r.state is not ReplicaState.PREPARING and not r.connections for r in records.values()):
        return ""
    lines = [
        ", ".join([f"{name} is {replica.state}", *replica.connections]) if replica else f"{name} has not reported"
        for name, replica in records.items()
    ]
    return terminal.list_some(lines, most=_SHOWN, separator="; ")
