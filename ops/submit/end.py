"""`fab wait`, `fab cancel`, `fab delete` and `fab prune`: the end of jobs, and their removal from the bucket."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence

from jobs import paths
from jobs.bucket import BucketError
from jobs.records import JobRecord
from jobs.serialization import NewerSchemaError, RecordError
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.client import Client
from ops.cluster import root_helper
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, replicas_of
from ops.errors import DONE, FAILED, HostError, OpsError, UsageError, one_line

_LOGS_SECONDS = 30.0
DAMAGED_HINT = "fab delete JOB deletes a job whose record is damaged"


def cancel(cluster: ClusterClient, job_id: str | None, as_json: bool = False) -> int:
    """Cancel a job, by default the only one that has not ended, and wait; the exit code is 0 once it is CANCELLED."""
    with terminal.ProgressLine(f"cancelling {job_id or 'the job'}") as step:

        def show(record: JobRecord) -> None:
            replicas = replicas_of(cluster.ledger, record, lambda _: None)  # unreadable records are noted once, at the end
            running = [replica.name for replica in replicas if replica.state is not ReplicaState.EXITED]
            step.what = f"cancelling {record.jobId}"
            step.detail = f"({record.state}, waiting for {', '.join(running) or 'its leader'})"

        job = Client(cluster).cancel(job_id, show)
    if as_json:
        terminal.print_json(job.record.to_dict())
    else:
        terminal.out(f"{job.id} {job.state}")
    return DONE


def wait(cluster: ClusterClient, job_id: str | None, as_json: bool) -> int:
    """Wait until a job has ended; exit code 0 if it SUCCEEDED."""
    with terminal.ProgressLine(f"waiting for {job_id or 'the job'}") as step:

        def show(record: JobRecord) -> None:
            step.what, step.detail = f"waiting for {record.jobId}", f"({record.state})"

        job = Client(cluster).wait(job_id, on_poll=show)
    if as_json:
        terminal.print_json(job.record.to_dict())
    else:
        terminal.out(f"{job.id} {job.state}" + (f": {job.error}" if job.error else ""))
    return DONE if job.state is JobState.SUCCEEDED else FAILED


def delete(cluster: ClusterClient, job_id: str | None, sure: bool, as_json: bool = False) -> int:
    """Delete a job from the bucket: record, package, logs, and its output if that is in the job's folder."""
    if job_id is None:
        raise UsageError("delete which job? fab jobs lists them, and fab prune --keep N deletes all but the newest")
    try:
        existing_job(cluster.ledger, job_id)
    except OpsError:
        if not _is_damaged(cluster, job_id):
            raise
    _check(cluster, [job_id])
    return _delete(cluster, [job_id], sure, as_json)


def prune(cluster: ClusterClient, keep: str | None, sure: bool, as_json: bool = False) -> int:
    """Delete all ended jobs from the bucket, except the newest `keep`."""
    if keep is None or not keep.isdecimal():
        problem = "how many are to stay?" if keep is None else f"--keep {keep!r} is no number of jobs:"
        raise UsageError(f"{problem} fab prune --keep 10 deletes all ended jobs except the newest 10")
    records = _records(cluster)
    queue = cluster.ledger.queue()
    ended = [record.jobId for record in records if record.final and not queue.entry(record.jobId)]
    chosen = ended[int(keep) :]
    while users := _users(cluster, records, chosen):  # a kept job may itself use another one
        for job_id, user in users.items():
            terminal.note(f"{job_id} stays, as {user} has its output there")
        chosen = [job_id for job_id in chosen if job_id not in users]
    if not chosen and as_json:
        terminal.print_json({"deleted": []})
        return DONE
    if not chosen:
        terminal.note(f"nothing to delete: of {terminal.plural(len(records), 'job')} the newest {keep} that have ended stay")
        return DONE
    return _delete(cluster, chosen, sure, as_json)


def _records(cluster: ClusterClient, deleted: Collection[str] = ()) -> list[JobRecord]:
    """Return every job's record; damaged ones are skipped if one of the `deleted` jobs has a damaged record.

    Otherwise a damaged record is a UsageError: its job's output may be in the folder of a deleted job.
    """
    with terminal.ProgressLine("reading the jobs"):
        records, unreadable = cluster.ledger.jobs()
    if unreadable and any(_is_damaged(cluster, job_id) for job_id in deleted):
        unreadable = {job_id: error for job_id, error in unreadable.items() if not _is_damaged(cluster, job_id)}
    if unreadable:
        raise unreadable_error(unreadable)
    return records


def unreadable_error(errors: Mapping[str, RecordError]) -> UsageError:
    """Return the error of a deletion, which must read every job's record; `errors` has the failures by job id."""
    lines = "; ".join(f"{job_id}: {error}" for job_id, error in errors.items())
    return UsageError(f"nothing can be deleted while records are unreadable: {lines}; {DAMAGED_HINT}")


def _is_damaged(cluster: ClusterClient, job_id: str) -> bool:
    """Return True if a job's record cannot be parsed; one of a newer scaletier, or with another id, is not damaged."""
    item = cluster.ledger.store.read(paths.job(job_id)) if paths.JOB_ID.fullmatch(job_id) else None
    try:
        if item:
            JobRecord.from_json(item.content)
    except NewerSchemaError:
        return False
    except RecordError:
        return True
    return False


def _check(cluster: ClusterClient, job_ids: Sequence[str]) -> None:
    """Check that jobs have ended, and that no other job resumes in their output; UsageError if one has not, or does."""
    records = _records(cluster, job_ids)
    records_by_id = {record.jobId: record for record in records}
    queue = cluster.ledger.queue()
    for job_id in job_ids:
        record = records_by_id.get(job_id)
        if record is None and not _is_damaged(cluster, job_id):
            raise UsageError(f"job {job_id} is gone: another user has deleted it")
        if record and not record.final:
            raise UsageError(f"job {job_id} is {record.state}: fab cancel {job_id} ends it first")
        if queue.entry(job_id):
            state = record.state if record else "in the queue"
            raise UsageError(f"job {job_id} is {state}, but its replicas have not all stopped: try again in a moment")
    for job_id, user in _users(cluster, records, job_ids).items():
        raise UsageError(f"job {user} has its output in that of {job_id}: delete it first, or keep both")


def _users(cluster: ClusterClient, records: Sequence[JobRecord], deleted: Collection[str]) -> dict[str, str]:
    """Map each job to delete to a remaining job whose output is in its folder, if there is one."""
    job_dirs = {
        record.jobId: f"{_normalize(record.trainingInput.get('jobDir'))}/" for record in records if record.jobId not in deleted
    }
    users_by_job = {}
    for job_id in deleted:
        own = f"{_normalize(cluster.inventory.bucket)}/{paths.folder(job_id)}/"
        if users := [user for user, job_dir in job_dirs.items() if job_dir.startswith(own)]:
            users_by_job[job_id] = users[0]
    return users_by_job


def _normalize(path: object) -> str:
    """Return a path or a URL without redundant parts: `//`, `/./`."""
    scheme, separator, rest = str(path or "").rpartition("://")
    return f"{scheme}{separator}{posixpath.normpath(rest)}"


def _delete(cluster: ClusterClient, job_ids: Sequence[str], sure: bool, as_json: bool) -> int:
    sizes: dict[str, int | None] = {}
    for job_id in job_ids:
        try:
            with terminal.ProgressLine(f"looking through {job_id}"):
                sizes[job_id] = sum(cluster.bucket.walk(paths.folder(job_id)).values())
        except BucketError as error:  # the trainer may have made a folder unreadable, or nested folders too deeply
            sizes[job_id] = None
            terminal.note(f"the size of {job_id} is unknown: {one_line(error)}")
    what = f"{len(sizes)} jobs ({', '.join(sizes)})" if len(sizes) > 1 else job_ids[0]
    if not sure:
        terminal.confirm(f"delete {what} with logs and output, {_format_size(*sizes.values())}")
        _check(cluster, job_ids)  # the confirmation may have taken long
    attempted = []
    try:
        for job_id, size in sizes.items():
            attempted.append(job_id)
            with terminal.ProgressLine(f"deleting {job_id}"):
                _remove(cluster, job_id)
            if not as_json:
                terminal.out(f"{job_id} deleted, {_format_size(size)}")
    finally:
        _remove_host_files(cluster, attempted)
    if as_json:
        terminal.print_json({"deleted": [{"job": job_id, "bytes": size} for job_id, size in sizes.items()]})
    return DONE


def _format_size(*sizes: int | None) -> str:
    """Format the sum of sizes; None is an unknown size."""
    known = [size for size in sizes if size is not None]
    more = "" if len(known) == len(sizes) else " and more"
    return f"{terminal.size(sum(known))}{more}" if known else "size unknown"


def _remove(cluster: ClusterClient, job_id: str) -> None:
    """Remove a job's folder, its record last, so that an interrupted removal can be repeated."""
    inventory = cluster.inventory
    if not inventory.bucket_on_hosts:
        cluster.bucket.remove(paths.folder(job_id), last=paths.job(job_id))
        return
    # Only root and the trainer's user may access some folders of a trainer: root on a host removes them.
    line = root_helper.command("remove", job_id)
    for name in inventory.replicas:
        try:
            cluster.fleet.check_output(name, line, f"could not delete {job_id}, it ended")
        except HostError as error:
            if error.exit_code is not None or name == inventory.replicas[-1]:
                raise
        else:
            return


def _remove_host_files(cluster: ClusterClient, job_ids: Sequence[str]) -> None:
    """Remove the logs and packages of jobs from the hosts that answer: another job may get the same id."""
    fleet = cluster.fleet
    line = root_helper.command("forget", *job_ids)
    failures = fleet.each(
        cluster.inventory.replicas, lambda name: fleet.check_output(name, line, "keeps its log"), _LOGS_SECONDS
    ).failures
    for error in failures.values():
        terminal.note(f"{error}; take another id for the next job")
