"""`fab delete` and `fab prune`: jobs that have ended, taken out of the bucket with all that is theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs import paths
from jobs.records import JobRecord
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job
from ops.errors import DONE, UsageError


def delete(cluster: Cluster, job_ids: Sequence[str], sure: bool) -> int:
    """Take jobs out of the bucket: record, package, logs and output."""
    if not job_ids:
        raise UsageError("delete which job? fab jobs lists them, and fab prune --keep N deletes all but the newest")
    return _delete(cluster, [existing_job(cluster.ledger, job_id) for job_id in dict.fromkeys(job_ids)], sure)


def prune(cluster: Cluster, keep: str | None, sure: bool) -> int:
    """Take all jobs out of the bucket that have ended, but for the newest."""
    if keep is None or not keep.isdecimal():
        said = "how many are to stay?" if keep is None else f"--keep {keep!r} is no number of jobs:"
        raise UsageError(f"{said} fab prune --keep 10 deletes all jobs that have ended but the newest 10")
    with terminal.Step("reading the jobs"):
        records, _ = cluster.ledger.jobs()
    ended = [record for record in records if record.final][int(keep) :]
    used = {record.jobId for record in ended for other in records if other not in ended and _writes_into(other, record)}
    chosen = [record for record in ended if record.jobId not in used]
    for job_id in sorted(used):
        terminal.note(f"{job_id} stays: a job that stays has its output there")
    if not chosen:
        terminal.note(f"nothing to delete: {len(records)} jobs are there, and the newest {keep} that have ended stay")
        return DONE
    return _delete(cluster, chosen, sure)


def _delete(cluster: Cluster, records: Sequence[JobRecord], sure: bool) -> int:
    """All of these, or none of them where one may not go or the user has second thoughts."""
    for record in records:
        if not record.final:
            raise UsageError(f"job {record.jobId} is {record.state}: fab cancel {record.jobId} ends it first")
    gone = {record.jobId for record in records}
    for other in cluster.ledger.jobs()[0]:
        if other.jobId in gone:
            continue
        if into := next((record.jobId for record in records if _writes_into(other, record)), None):
            raise UsageError(f"job {other.jobId} has its output in that of {into}: delete it, too, or keep both")
    sizes = {}
    for record in records:
        with terminal.Step(f"looking through {record.jobId}"):
            sizes[record.jobId] = sum(cluster.bucket.walk(_folder(record)).values())
    what = f"{len(records)} jobs" if len(records) > 1 else records[0].jobId
    if not sure:
        _ask(f"delete {what}, {terminal.size(sum(sizes.values()))}, with logs and output ({', '.join(sizes)})")
    for record in records:
        with terminal.Step(f"deleting {record.jobId}"):
            cluster.bucket.remove(_folder(record))
        terminal.out(f"{record.jobId} deleted, {terminal.size(sizes[record.jobId])}")
    return DONE


def _folder(record: JobRecord) -> str:
    return f"{paths.JOBS}/{record.jobId}"


def _writes_into(other: JobRecord, record: JobRecord) -> bool:
    """True where a job's output lies in the folder of another."""
    return f"/{paths.output(record.jobId)}" in f"{other.trainingInput.get('jobDir', '')}/" and other.jobId != record.jobId


def _ask(what: str) -> None:
    """Nothing of a user's is deleted without being asked; where nobody can be asked, --yes says it beforehand."""
    if not sys.stdin.isatty():
        raise UsageError(f"this would {what}: say --yes, as there is no terminal to ask on")
    sys.stderr.write(f"{what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was deleted")
