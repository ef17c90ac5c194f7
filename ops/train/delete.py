"""`fab delete` and `fab prune`: jobs that have ended, taken out of the bucket with all that is theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jobs import paths
from jobs.records import JobRecord
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job
from ops.errors import DONE, UsageError


def delete(cluster: Cluster, job_id: str | None, sure: bool) -> int:
    """Take a job out of the bucket: record, package, logs, and its output where that is below it."""
    if job_id is None:
        raise UsageError("delete which job? fab jobs lists them, and fab prune --keep N deletes all but the newest")
    record = existing_job(cluster.ledger, job_id)
    if not record.final:
        raise UsageError(f"job {job_id} is {record.state}: fab cancel {job_id} ends it first")
    if cluster.ledger.queue().entry(job_id):
        raise UsageError(f"job {job_id} is {record.state}, but its replicas have not all stopped: try again in a moment")
    if user := _users(cluster, cluster.ledger.jobs()[0], [job_id]).get(job_id):
        raise UsageError(f"job {user} has its output in that of {job_id}: delete it first, or keep both")
    return _delete(cluster, [record], sure)


def prune(cluster: Cluster, keep: str | None, sure: bool) -> int:
    """Take all jobs out of the bucket that have ended, but for those made last."""
    if keep is None or not keep.isdecimal():
        said = "how many are to stay?" if keep is None else f"--keep {keep!r} is no number of jobs:"
        raise UsageError(f"{said} fab prune --keep 10 deletes all jobs that have ended but the newest 10")
    with terminal.Step("reading the jobs"):
        records, unreadable = cluster.ledger.jobs()
    if unreadable:
        raise UsageError(f"which output is whose cannot be known: {'; '.join(unreadable)}")
    queue = cluster.ledger.queue()
    ended = [record for record in records if record.final and not queue.entry(record.jobId)][int(keep) :]
    users = _users(cluster, records, {record.jobId for record in ended})
    for job_id, user in sorted(users.items()):
        terminal.note(f"{job_id} stays, as {user} has its output there")
    chosen = [record for record in ended if record.jobId not in users]
    if not chosen:
        terminal.note(f"nothing to delete: {len(records)} jobs are there, and the newest {keep} that have ended stay")
        return DONE
    return _delete(cluster, chosen, sure)


def _users(cluster: Cluster, records: Sequence[JobRecord], gone: Collection[str]) -> dict[str, str]:
    """Of the jobs that are to go, those in whose folder a job writes that stays, and which one that is."""
    bucket = cluster.inventory.bucket
    stay = {record.jobId: f"{record.trainingInput.get('jobDir', '')}/" for record in records if record.jobId not in gone}
    found = {}
    for job_id in gone:
        own = f"{bucket}/{paths.folder(job_id)}/"
        if users := [user for user, job_dir in stay.items() if job_dir.startswith(own)]:
            found[job_id] = users[0]
    return found


def _delete(cluster: Cluster, records: Sequence[JobRecord], sure: bool) -> int:
    sizes = {}
    for record in records:
        with terminal.Step(f"looking through {record.jobId}"):
            sizes[record.jobId] = sum(cluster.bucket.walk(paths.folder(record.jobId)).values())
    what = f"{len(records)} jobs ({', '.join(sizes)})" if len(records) > 1 else records[0].jobId
    terminal.confirm(f"delete {what} with logs and output, {terminal.size(sum(sizes.values()))}", sure)
    for job_id, size in sizes.items():
        with terminal.Step(f"deleting {job_id}"):
            cluster.bucket.remove(paths.folder(job_id), last=paths.job(job_id))
        terminal.out(f"{job_id} deleted, {terminal.size(size)}")
    return DONE
