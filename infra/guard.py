"""The effect of a cluster's change on its jobs: reported at every preview, refused by an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pulumi

from infra.scale_tiers import ClusterSpec, TargetError
from jobs.paths import QUEUE, cancel, plan
from jobs.queue import Queue, place
from jobs.records import CancelRequest, Plan
from jobs.serialization import RecordError
from jobs.times import now

Read = Callable[[str], bytes | None]
Create = Callable[[str, bytes], None]


def same_target(previous: str | None, target: str) -> None:
    """Raise TargetError if the stack is up on another target, which would be destroyed with its bucket."""
    if previous not in (None, target):
        raise TargetError(
            f"target is {target}, and this stack is up on {previous}: `pulumi destroy` first, or another stack beside it "
            f"(`make stack STACK=NAME`), or `pulumi config set target {previous}`"
        )


def removed_hosts(previous: Iterable[str], spec: ClusterSpec) -> list[str]:
    """Return the running hosts that the new cluster lacks."""
    stay = {replica.name for replica in spec.replicas}
    return [name for name in previous if name not in stay]


@dataclass(frozen=True)
class Change:
    """The hosts that an update removes and replaces; all work there ends."""

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
    """A job that a change takes hosts from: the reason, and whether it can continue."""

    job_id: str
    why: str
    continues: bool = False


def affected_jobs(queue: Queue, change: Change, read: Read) -> list[AffectedJob]:
    """Return each job that has one of these hosts, or waits and has too few others."""
    jobs = []
    for entry in queue.entries:
        if entry.held and (lost_hosts := [host for host in entry.hosts if host in change.hosts]):
            can = _can_go_on(read(plan(entry.jobId)), [entry.replica_on(host) for host in lost_hosts])
            jobs.append(AffectedJob(entry.jobId, f"job {entry.jobId} has {', '.join(lost_hosts)}", can))
        elif not entry.held and len(place(entry.candidates_by_replica, change.removed)) < len(entry.candidates_by_replica):
            jobs.append(AffectedJob(entry.jobId, f"job {entry.jobId} waits for more hosts than remain"))
    return jobs


def _can_go_on(content: bytes | None, replicas: list[str]) -> bool:
    """Return True if all of these are optional by the job's plan, or the plan is unreadable.

    No job is ended unseen.
    """
    try:
        return content is None or all(map(Plan.from_json(content).is_optional, replicas))
    except RecordError:
        return True


def check(change: Change, read: Read, create: Create, preview: bool, allowed: bool) -> None:
    """Warn at a preview and raise TargetError at an update if jobs would lose hosts.

    If it is `allowed`, the update ends the jobs that cannot continue, as `fab cancel` would.
    """
    if not change.hosts or (content := read(QUEUE)) is None:
        return
    try:
        jobs = affected_jobs(Queue.from_json(content), change, read)
    except RecordError as error:
        pulumi.log.warn(f"the queue cannot be read, so no job is protected: {error}")
        return
    if not jobs:
        return
    what = f"{change}, and {'; '.join(job.why for job in jobs)}"
    ended = [job.job_id for job in jobs if not job.continues]
    if allowed:
        how = [f"{', '.join(ended)} ends"] if ended else []
        how += [f"{job.job_id} continues, or waits" for job in jobs if job.continues]
        pulumi.log.warn(f"{what}: disruptJobs is true, so it is done; {', '.join(how)}")
        if not preview:
            request = CancelRequest("pulumi up", now(), f"hosts removed: {', '.join(change.hosts)}")
            for job_id in ended:
                create(cancel(job_id), request.to_json())
    elif preview:
        pulumi.log.warn(f"{what}: pulumi up will refuse. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
    else:
        raise TargetError(f"{what}: nothing was changed. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
