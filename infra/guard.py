"""What a change of the cluster would do to the jobs that have its hosts: said at every preview, and refused by an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pulumi

from infra.spec import ClusterSpec
from infra.target import TargetError
from jobs.checked import RecordError
from jobs.paths import QUEUE, cancel, plan
from jobs.placement import place
from jobs.queue import Queue
from jobs.records import CancelRequest, Plan
from jobs.times import now

Read = Callable[[str], bytes | None]
Create = Callable[[str, bytes], None]


def same_target(there: str | None, wanted: str) -> None:
    """Raises TargetError where the stack is up on another target, which would be destroyed with the bucket there."""
    if there not in (None, wanted):
        raise TargetError(
            f"target is {wanted}, and this stack is up on {there}: `pulumi destroy` first, or another stack beside it "
            f"(`make stack STACK=NAME`), or `pulumi config set target {there}`"
        )


def hosts_lost(there: Iterable[str], spec: ClusterSpec) -> list[str]:
    """The hosts that are up and that the new cluster no longer has."""
    stay = {replica.name for replica in spec.replicas}
    return [name for name in there if name not in stay]


@dataclass(frozen=True)
class Change:
    """What an update does to hosts that are up: `lost` go for good, `anew` are replaced, and all that runs there ends."""

    lost: list[str] = field(default_factory=list)
    anew: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = (f"takes {', '.join(self.lost)} away", f"makes {', '.join(self.anew)} anew")
        return f"this {' and '.join(part for part, hosts in zip(parts, (self.lost, self.anew), strict=True) if hosts)}"


@dataclass(frozen=True)
class Hurt:
    """A job that a change takes hosts from: why, in words, and whether it can go on all the same."""

    job_id: str
    why: str
    goes_on: bool = False


def hurt(queue: Queue, change: Change, read: Read) -> list[Hurt]:
    """Each job that has one of these hosts, or waits and could be given no others."""
    found = []
    for entry in queue.entries:
        if entry.held and (taken := [host for host in entry.hosts if host in (*change.lost, *change.anew)]):
            can = _can_go_on(read(plan(entry.jobId)), [entry.replica_on(host) for host in taken])
            found.append(Hurt(entry.jobId, f"job {entry.jobId} has {', '.join(taken)}", can))
        elif not entry.held and len(place(entry.wanted, change.lost)) < len(entry.wanted):
            found.append(Hurt(entry.jobId, f"job {entry.jobId} waits for hosts of which too few stay"))
    return found


def _can_go_on(content: bytes | None, replicas: list[str]) -> bool:
    """True where all of these are expendable, by the job's plan; and where that cannot be read, as no job is ended unseen."""
    try:
        return content is None or all(map(Plan.from_json(content).is_expendable, replicas))
    except RecordError:
        return True


def check(change: Change, read: Read, create: Create, preview: bool, allowed: bool) -> None:
    """Warn at a preview, refuse an update with a TargetError, where jobs would lose hosts and that is not `allowed`.

    Where it is, the update ends the jobs that cannot go on, as `fab cancel` would.
    """
    if not (change.lost or change.anew) or (content := read(QUEUE)) is None:
        return
    try:
        found = hurt(Queue.from_json(content), change, read)
    except RecordError as error:
        pulumi.log.warn(f"which job has which host cannot be seen, so none is looked after: {error}")
        return
    if not found:
        return
    what = f"{change}, and {'; '.join(job.why for job in found)}"
    ended = [job.job_id for job in found if not job.goes_on]
    if allowed:
        how = [f"{', '.join(ended)} ends"] if ended else []
        how += [f"{job.job_id} goes on, or waits" for job in found if job.goes_on]
        pulumi.log.warn(f"{what}: disruptJobs is true, so it is done; {', '.join(how)}")
        if not preview:
            request = CancelRequest("pulumi up", now(), f"hosts taken away: {', '.join([*change.lost, *change.anew])}")
            for job_id in ended:
                create(cancel(job_id), request.to_json())
    elif preview:
        pulumi.log.warn(f"{what}: pulumi up will refuse. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
    else:
        raise TargetError(f"{what}: nothing was changed. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
