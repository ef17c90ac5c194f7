"""Read the state of the whole cluster for `fab top`, in one or two calls of `read_all`.

On Google Cloud, `read_all` sends a request for each object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from infra.inventory import Host, Inventory
from jobs import paths
from jobs.bucket import Item
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.serialization import RecordError
from jobs.states import JobState, ReplicaState
from jobs.times import seconds_between
from ops.show.cost import cost_of


@dataclass(frozen=True)
class ClusterSnapshot:
    """The queue, the records of its jobs by id, and of the replicas that have a host, by job id and name."""

    queue: Queue
    jobs: dict[str, JobRecord]
    replicas: dict[tuple[str, str], ReplicaRecord]


class SnapshotReader:
    """Polls the bucket: reads the objects of the previous poll in one call, and new ones in a second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._object_names: set[str] = set()

    def read(self) -> ClusterSnapshot:
        """Return the state now; an unreadable record counts as missing.

        BucketError if the bucket fails, RecordError if the queue is of a newer version.
        """
        items = self._ledger.store.read_all([paths.QUEUE, *sorted(self._object_names)])
        queue = self._queue(items.pop(paths.QUEUE, None))
        names = {name for entry in queue.entries for name in _names_of_objects(entry)}
        if new := names - self._object_names:
            items |= self._ledger.store.read_all(sorted(new))
        self._object_names = names
        snapshot = ClusterSnapshot(queue, {}, {})
        for entry in queue.entries:
            if item := items.get(paths.job(entry.jobId)):
                with suppress(RecordError):
                    snapshot.jobs[entry.jobId] = JobRecord.from_json(item.content)
            for name in entry.placement if entry.has_hosts else ():
                if item := items.get(paths.replica(entry.jobId, name)):
                    with suppress(RecordError):
                        snapshot.replicas[entry.jobId, name] = ReplicaRecord.from_json(item.content)
        return snapshot

    def _queue(self, item: Item | None) -> Queue:
        if item is None:
            return Queue()
        try:
            return Queue.from_json(item.content)
        except RecordError:
            return self._ledger.queue()  # rebuilt from the jobs


def _names_of_objects(entry: QueueEntry) -> Iterator[str]:
    """Yield the names of the objects with the state of a job in the queue."""
    yield paths.job(entry.jobId)
    if entry.has_hosts:
        yield from (paths.replica(entry.jobId, name) for name in entry.placement)


@dataclass(frozen=True)
class HostSnapshot:
    """A host, the job and replica on it, or the job that has reserved it, and the replica's last report.

    `usage` is of that report, None if no trainer runs; reportSeconds is its age, if the clocks of both machines agree.
    """

    name: str
    role: str
    machineType: str
    cpus: float
    memoryBytes: int
    job: str | None
    replica: str | None
    reservedFor: str | None
    state: str | None
    restarts: int | None
    usage: Usage | None
    reportTime: str | None
    reportSeconds: float | None


@dataclass(frozen=True)
class JobSnapshot:
    """A job that has hosts or waits for them.

    Attributes:
        behind: the ids of the jobs that it waits for: they have hosts that it could use, or get them before it.
        seconds: since its start, or since its submission if it has not started.
        cost: of its hosts so far, in US dollars; None if they have no price, or the job has no hosts yet.
    """

    jobId: str
    state: str
    hosts: list[str]
    priority: int
    behind: list[str]
    submittedBy: str
    createTime: str
    startTime: str | None
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class Overview:
    """The cluster at one moment.

    Attributes:
        hourlyCost: the list price of all hosts, in US dollars per hour; None if unknown.
        cost: the cost of all hosts since their creation, in US dollars; None if unknown.
    """

    time: str
    stack: str
    scaleTier: str
    hourlyCost: float | None
    cost: float | None
    hosts: list[HostSnapshot]
    jobs: list[JobSnapshot]


def build_overview(inventory: Inventory, snapshot: ClusterSnapshot, moment: str) -> Overview:
    """Return the state of the cluster; `moment` is RFC 3339."""
    totals, queue = cost_of(inventory.hosts, moment), snapshot.queue
    assigned = {host: (e.jobId, replica) for e in queue.entries if e.has_hosts for replica, host in e.placement.items()}
    reserved = queue.reserved_hosts()
    hosts = [_host(host, assigned.get(host.name), reserved.get(host.name), snapshot, moment) for host in inventory.hosts]
    jobs = [_job(entry, snapshot, moment) for entry in sorted(queue.entries, key=lambda e: (not e.has_hosts, -e.priority))]
    return Overview(moment, inventory.stack, inventory.scale_tier, totals.hourlyCost, totals.accruedCost, hosts, jobs)


def _host(
    host: Host, assignment: tuple[str, str] | None, reserved_for: str | None, snapshot: ClusterSnapshot, moment: str
) -> HostSnapshot:
    job_id, name = assignment or (None, None)
    record = snapshot.replicas.get(assignment) if assignment else None
    job = snapshot.jobs.get(assignment[0]) if assignment else None
    report = record if record and record.incarnation else None
    state = ReplicaState.LOST if job and name in job.lostReplicas else record.state if record else None
    return HostSnapshot(
        name=host.name,
        role=str(host.role),
        machineType=host.machine_type,
        cpus=host.cpus,
        memoryBytes=host.memory_bytes,
        job=job_id,
        replica=name,
        reservedFor=reserved_for,
        state=str(state) if state else None,
        restarts=record.restarts if record else None,
        usage=record.usage if record and state is ReplicaState.RUNNING else None,
        reportTime=report.heartbeatTime if report else None,
        reportSeconds=round(max(seconds_between(report.heartbeatTime, moment), 0.0), 3) if report else None,
    )


def _job(entry: QueueEntry, snapshot: ClusterSnapshot, moment: str) -> JobSnapshot:
    record = snapshot.jobs.get(entry.jobId)
    created = record.createTime if record else entry.createTime
    started = record.startTime if record else None
    seconds = max(seconds_between(started or created, record.endTime if record and record.endTime else moment), 0.0)
    return JobSnapshot(
        jobId=entry.jobId,
        state=str(record.state if record else JobState.QUEUED),
        hosts=list(entry.placement.values()) if entry.has_hosts else [],
        priority=entry.priority,
        behind=[ahead.jobId for ahead in snapshot.queue.ahead_of(entry.jobId)],
        submittedBy=(record.submittedBy if record else "") or entry.submittedBy,
        createTime=created,
        startTime=started,
        seconds=round(seconds, 3),
        cost=record.cost_until(record.endTime or moment) if record and entry.has_hosts else None,
    )
