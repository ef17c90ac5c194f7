"""Guard jobs and data: refuse an update or a destroy that would end jobs, or delete data. A preview of an update warns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulumi

from infra.scale_tiers import ClusterSpec, TargetError
from jobs.paths import QUEUE, cancel, job, plan
from jobs.queue import Queue, place
from jobs.records import CancelRequest, JobRecord, Plan
from jobs.serialization import RecordError
from jobs.times import now

ReadObject = Callable[[str], bytes | None]
CreateObject = Callable[[str, bytes], None]
DESTROY_ADVICE = (
    "`pulumi config set retainBucket true` to retain the bucket, or `pulumi config set forceDestroy true` to delete it with "
    "its data; then `pulumi up` and `pulumi destroy`"
)


def require_same_target(previous: str | None, target: str) -> None:
    """Raise TargetError if the stack is up on another target: the update would destroy its hosts and bucket."""
    if previous not in (None, target):
        raise TargetError(
            f"target is {target}, and this stack is up on {previous}: `pulumi destroy` first, or another stack beside it "
            f"(`make stack STACK=NAME`), or `pulumi config set target {previous}`"
        )


def removed_hosts(previous: Iterable[str], spec: ClusterSpec) -> list[str]:
    """Return the hosts of the previous cluster, running or not, that the new one lacks."""
    stay = {host_id.name for host_id in spec.hosts}
    return [name for name in previous if name not in stay]


@dataclass(frozen=True)
class Change:
    """The hosts that an update removes or replaces; everything that runs on them ends."""

    removed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        return [*self.removed, *self.replaced]

    def __str__(self) -> str:
        parts = {"removes": self.removed, "replaces": self.replaced}
        return "this " + " and ".join(f"{verb} {', '.join(hosts)}" for verb, hosts in parts.items() if hosts)


@dataclass(frozen=True)
class AffectedJob:
    """A job that a change disrupts: the reason, and whether the job can continue."""

    job_id: str
    why: str
    continues: bool = False


def affected_jobs(queue: Queue, change: Change, read_object: ReadObject) -> list[AffectedJob]:
    """Return each job that has a host of the change, or waits for more hosts than would remain."""
    jobs = []
    for entry in queue.entries:
        if entry.has_hosts and (lost_hosts := [host for host in entry.hosts if host in change.hosts]):
            continues = _can_continue(read_object(plan(entry.jobId)), [entry.replica_on(host) for host in lost_hosts])
            jobs.append(AffectedJob(entry.jobId, f"job {entry.jobId} has {', '.join(lost_hosts)}", continues))
        elif not entry.has_hosts and len(place(entry.candidate_hosts, change.removed)) < len(entry.replica_names):
            jobs.append(AffectedJob(entry.jobId, f"job {entry.jobId} waits for more hosts than remain"))
    return jobs


def _can_continue(content: bytes | None, replicas: list[str]) -> bool:
    """Return True if all of these replicas are optional in the job's plan.

    Also return True if the plan is missing or unreadable: a job whose plan is unknown is never cancelled.
    """
    try:
        return content is None or all(map(Plan.from_json(content).is_optional, replicas))
    except RecordError:
        return True


def protect_jobs(change: Change, read_object: ReadObject, create_object: CreateObject, preview: bool, allowed: bool) -> None:
    """Warn at a preview and raise TargetError at an update if jobs would lose hosts.

    If `allowed` (disruptJobs), the update ends the jobs that cannot continue, as `fab cancel` would.
    """
    if not change.hosts or (content := read_object(QUEUE)) is None:
        return
    try:
        jobs = affected_jobs(Queue.from_json(content), change, read_object)
    except RecordError as error:
        pulumi.log.warn(f"the queue cannot be read, so no job is protected: {error}")
        return
    if not jobs:
        return
    problem = f"{change}, and {'; '.join(job.why for job in jobs)}"
    ended = [job.job_id for job in jobs if not job.continues]
    if allowed:
        effects = [f"{', '.join(ended)} {'end' if len(ended) > 1 else 'ends'}"] if ended else []
        effects += [f"{job.job_id} continues, or waits for its hosts" for job in jobs if job.continues]
        pulumi.log.warn(f"{problem}: disruptJobs is true, so it is done; {'; '.join(effects)}")
        if not preview:
            request = CancelRequest("pulumi up", now(), f"hosts removed or replaced: {', '.join(change.hosts)}")
            for job_id in ended:
                create_object(cancel(job_id), request.to_json())
    elif preview:
        pulumi.log.warn(f"{problem}: pulumi up will refuse. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
    else:
        raise TargetError(f"{problem}: nothing was changed. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")


def destroy_problem(settings: Mapping[str, Any], content: Callable[[], str], read_object: ReadObject) -> str:
    """Return why a destroy is refused, or nothing: it would delete a bucket with `content`, or end a job.

    `settings` are retain (retainBucket), force (forceDestroy) and disrupt (disruptJobs), which states of older stacks lack.
    """
    if not settings["retain"] and not settings["force"]:
        return data_problem(content())
    problem = "" if settings.get("disrupt") else _unended_jobs(read_object)
    remedy = "Wait (`fab wait`), `fab cancel`, or `pulumi config set disruptJobs true && pulumi up`"
    return problem and f"{problem}, so nothing was destroyed. {remedy}"


def data_problem(content: str, interrupted: bool = False) -> str:
    """Return why a bucket with this content is not destroyed, or nothing if it is empty.

    If an earlier destroy was `interrupted`, some resources are already destroyed.
    """
    more = "more " if interrupted else ""
    return content and (
        f"the bucket contains {content}, so nothing {more}was destroyed. To save data: `fab get ID`. Then {DESTROY_ADVICE}"
    )


def list_some(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _unended_jobs(read_object: ReadObject) -> str:
    """Return which jobs have not ended; the leader of one with a final state is about to remove it from the queue."""
    try:
        queued = Queue.from_json(content).entries if (content := read_object(QUEUE)) is not None else []
        records = {entry.jobId: read_object(job(entry.jobId)) for entry in queued}
        jobs = [job_id for job_id, record in records.items() if record is None or not JobRecord.from_json(record).final]
    except RecordError as error:
        return f"a record of jobs cannot be read ({error})"
    return f"not all jobs have ended ({', '.join(jobs)})" if jobs else ""
