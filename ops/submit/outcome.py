"""Describe the files that a job left, for `fab train` and `fab describe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs import paths
from jobs.records import JobRecord, ReplicaRecord
from jobs.serialization import RecordError
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import replica_names
from ops.cluster.output import find
from ops.errors import OpsError

_HINT = "what a program saves below $JOB_DIR is kept; in arguments ${JOB_DIR} stands for it"


def describe_output(cluster: ClusterClient, record: JobRecord) -> list[str]:
    """Return the lines about an ended job's output, to print after its state; empty if the bucket is unreachable."""
    try:
        files = find(cluster, record).files
    except (OpsError, OSError):
        return []
    return [_describe_files(record.jobId, files), *describe_unsaved_of(cluster, record)]


def describe_unsaved_of(cluster: ClusterClient, record: JobRecord) -> list[str]:
    """Describe what an ended job wrote outside JOB_DIR; empty if the bucket does not answer."""
    try:
        return describe_unsaved(list(cluster.ledger.replicas(record.jobId, replica_names(record)).values()))
    except (OpsError, OSError, RecordError):
        return []


def _describe_files(job_id: str, files: Mapping[str, int]) -> str:
    own = {name: size for name, size in files.items() if not name.startswith(f"{paths.UNSAVED_FOLDER}/")}
    chosen = own or files
    fetches = f"fab get {job_id} fetches its {terminal.plural(len(chosen), 'file')}, {terminal.size(sum(chosen.values()))}"
    if own:
        return fetches
    return f"it wrote nothing to JOB_DIR; {fetches}" if files else "it wrote nothing to JOB_DIR, there is nothing to fetch"


def describe_unsaved(replicas: Sequence[ReplicaRecord]) -> list[str]:
    """Describe what replicas wrote outside JOB_DIR, a line for each that did, and the remedy.

    In a replica's report, `kept` names the files that its host has copied to UNSAVED_FOLDER in JOB_DIR, `leftOut` the others.
    """
    lines = []
    for replica in replicas:
        if (report := replica.unsaved) is None:
            continue
        copy_note = (
            f"kept in JOB_DIR/{paths.UNSAVED_FOLDER}/{replica.name}: {terminal.list_some(report.kept, report.keptFiles)}"
        )
        parts = [copy_note] if report.keptFiles else []
        parts += [f"not kept: {terminal.list_some(report.leftOut, report.leftOutFiles)}"] if report.leftOutFiles else []
        parts += [report.error] if report.error else []
        if report.keptFiles or report.leftOutFiles:
            lines.append(f"{replica.name} wrote outside JOB_DIR, {'; '.join(parts)}")
        elif report.error:
            lines.append(f"{replica.name}: {report.error}")
    has_losses = any(replica.unsaved and (replica.unsaved.jobDirEmpty or replica.unsaved.leftOutFiles) for replica in replicas)
    return [*lines, _HINT] if lines and has_losses else lines
