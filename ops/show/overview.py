"""The whole cluster at one moment: from the bucket's records to JSON and `fab top`. Never waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from infra.inventory import Host, Inventory
from infra.spec import Role
from jobs.queue import QueueEntry
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.states import JobState, ReplicaState
from jobs.times import seconds_between
from ops import terminal
from ops.screen.picture import Picture, Row, Span, Table, cell, cut, harmless, height, state
from ops.show.cost import share
from ops.show.snapshot import ClusterSnapshot

_HOST_HEADS = ("HOST", "ROLE", "CPU", "CPUS", "MEMORY", "LIMIT", "JOB", "REPLICA", "STATE", "RESTARTS", "REPORT")
_JOB_HEADS = ("JOB", "STATE", "HOSTS", "PRIORITY", "TOOK", "BY", "USD", "BEHIND")
_RIGHT = frozenset({"CPU", "CPUS", "MEMORY", "LIMIT", "RESTARTS", "REPORT", "HOSTS", "PRIORITY", "TOOK", "USD"})


@dataclass(frozen=True)
class HostNow:
    """A host, the job and replica on it or the job it is kept for, and the replica's last report.

    `usage` is of that report, None if no trainer runs; reportSeconds is its age, by the clocks of two machines.
    """

    name: str
    role: str
    machineType: str
    cpus: float
    memoryBytes: int
    job: str | None
    replica: str | None
    keptFor: str | None
    state: str | None
    restarts: int | None
    usage: Usage | None
    reportTime: str | None
    reportSeconds: float | None


@dataclass(frozen=True)
class JobNow:
    """A job that has hosts or waits for them.

    `seconds` since it started, or else since it was made; cost is that of its hosts so far in US dollars, None if they have no
    price or it has none of them yet.
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
    """The cluster at one moment; costs are US dollars by list price since the hosts were made, or None."""

    time: str
    stack: str
    scaleTier: str
    hourlyCost: float | None
    cost: float | None
    hosts: list[HostNow]
    jobs: list[JobNow]

    def to_dict(self) -> dict[str, Any]:
        """Return the overview as `--json` prints it."""
        return asdict(self)


def overview(inventory: Inventory, glance: ClusterSnapshot, moment: str) -> Overview:
    """Return the state of the cluster; `moment` is RFC 3339."""
    whole = share(inventory.hosts, moment)
    reserved = glance.queue.kept()
    placements = {host: (entry, name) for entry in glance.queue.entries if entry.held for name, host in entry.placement.items()}
    hosts = [_host(host, placements.get(host.name), reserved.get(host.name), glance, moment) for host in inventory.hosts]
    jobs = [_job(entry, glance, moment) for entry in sorted(glance.queue.entries, key=lambda e: (not e.held, -e.priority))]
    return Overview(moment, inventory.stack, inventory.scale_tier, whole.hourlyCost, whole.accruedCost, hosts, jobs)


def _host(host: Host, held: tuple[QueueEntry, str] | None, kept: str | None, glance: ClusterSnapshot, moment: str) -> HostNow:
    job_id, name = (held[0].jobId, held[1]) if held else (None, None)
    record = glance.replicas.get((job_id, name)) if job_id and name else None
    job = glance.jobs.get(job_id) if job_id else None
    report = record if record and record.life else None
    what = _state(job, name, record)
    return HostNow(
        name=host.name,
        role=str(host.role),
        machineType=host.machine_type,
        cpus=host.cpus,
        memoryBytes=host.memory_bytes,
        job=job_id,
        replica=name,
        keptFor=kept,
        state=what,
        restarts=record.restarts if record else None,
        usage=record.usage if record and what == ReplicaState.RUNNING else None,
        reportTime=report.heartbeatTime if report else None,
        reportSeconds=round(max(seconds_between(report.heartbeatTime, moment), 0.0), 3) if report else None,
    )


def _state(job: JobRecord | None, name: str | None, record: ReplicaRecord | None) -> str | None:
    if job and name in job.lost:
        return str(ReplicaState.LOST)
    return str(record.state) if record else None


def _job(entry: QueueEntry, glance: ClusterSnapshot, moment: str) -> JobNow:
    record = glance.jobs.get(entry.jobId)
    created = record.createTime if record else entry.createTime
    started = record.startTime if record else None
    seconds = max(seconds_between(started or created, record.endTime if record and record.endTime else moment), 0.0)
    return JobNow(
        jobId=entry.jobId,
        state=str(record.state if record else JobState.QUEUED),
        hosts=list(entry.placement.values()) if entry.held else [],
        priority=entry.priority,
        behind=[ahead.jobId for ahead in glance.queue.ahead_of(entry.jobId)],
        submittedBy=(record.submittedBy if record else "") or entry.submittedBy,
        createTime=created,
        startTime=started,
        seconds=round(seconds, 3),
        cost=_cost(record, seconds) if entry.held else None,
    )


def _cost(record: JobRecord | None, seconds: float) -> float | None:
    if record is None or record.hourlyCost is None:
        return None
    return record.cost if record.cost is not None else round(record.hourlyCost * seconds / 3600, 4)


def picture(seen: Overview, said: str = "", lines: int | None = None) -> Picture:
    """Return `fab top`'s picture with `lines` lines, or whole if None; `said` is an error to show."""
    head = [Row.of(*_title(seen)), *([Row.of(Span(harmless(said), "yellow"))] if said else [])]
    hosts = Table(_HOST_HEADS, tuple(map(_host_row, seen.hosts)), _RIGHT)
    jobs = Table(_JOB_HEADS, tuple(map(_job_row, seen.jobs)), _RIGHT)
    if not seen.jobs:
        below: list[Row | Table] = [Row.of(Span("no job runs, and none waits", "dim"))]
    else:
        below = [jobs] if lines is None else cut(jobs, max(lines // 3, lines - len(head) - 3 - len(seen.hosts)), "jobs")
    above = [hosts] if lines is None else cut(hosts, lines - len(head) - 2 - height(below), "hosts")
    return [*head, Row(), *above, Row(), *below]


def _title(seen: Overview) -> Iterator[str | Span]:
    training = [host for host in seen.hosts if Role(host.role).runs_jobs]
    busy = sum(host.job is not None for host in training)
    yield Span(f"{seen.stack}, {seen.scaleTier}", "bold")
    yield f"  {terminal.local_time(seen.time)}  {busy} of {terminal.plural(len(training), 'host')} busy"
    if seen.cost is not None:
        yield f"  {terminal.dollars(seen.cost)} USD so far, {terminal.dollars(seen.hourlyCost)} an hour"


def _what_it_does(host: HostNow) -> Span:
    if host.role == Role.SERVING:
        return cell("serves models", "dim")
    return cell(f"kept for {host.keptFor}", "dim") if host.keptFor else cell(host.job)


def _host_row(host: HostNow) -> tuple[Span, ...]:
    usage = host.usage or Usage()
    return (
        Span(host.name, "bold"),
        cell(host.role),
        cell(None if usage.cpus is None else f"{usage.cpus:.0%}"),
        cell(f"{host.cpus:g}"),
        cell(None if usage.memoryBytes is None else terminal.size(usage.memoryBytes)),
        cell(terminal.size(host.memoryBytes)),
        _what_it_does(host),
        cell(host.replica),
        state(host.state) if host.state else cell(None),
        cell(host.restarts, "yellow" if host.restarts else ""),
        cell(None if host.reportSeconds is None else f"{terminal.duration(host.reportSeconds)} ago"),
    )


def _job_row(job: JobNow) -> tuple[Span, ...]:
    return (
        cell(job.jobId, "bold"),
        state(job.state),
        cell(len(job.hosts) or None),
        cell(job.priority or None),
        cell(terminal.duration(job.seconds)),
        cell(job.submittedBy),
        cell(terminal.dollars(job.cost)),
        cell(", ".join(job.behind)),
    )
