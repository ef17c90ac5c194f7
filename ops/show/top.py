"""`fab top`: the whole cluster, on a screen that is kept up to date, or once."""

from __future__ import annotations

import sys
import time

from rich.text import Text

from infra.spec import Role
from jobs.bucket import BucketError
from jobs.records import Usage
from jobs.serialization import RecordError
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, OpsError, one_line
from ops.screen.draw import Picture, Screen, cell, columns, cut, harmless, leave, state
from ops.show.overview import HostNow, JobNow, Overview, SnapshotReader, overview

REFRESH_SECONDS = 0.4
# The share of the time that is spent on polls: a slow bucket is polled less often.
_POLL_SHARE = 0.1
_HOST_HEADS = ("HOST", "ROLE", "CPU", "CPUS", "MEMORY", "LIMIT", "JOB", "REPLICA", "STATE", "RESTARTS", "REPORT")
_JOB_HEADS = ("JOB", "STATE", "HOSTS", "PRIORITY", "TOOK", "BY", "USD", "BEHIND")
_RIGHT = frozenset({"CPU", "CPUS", "MEMORY", "LIMIT", "RESTARTS", "REPORT", "HOSTS", "PRIORITY", "TOOK", "USD"})


def top(cluster: ClusterClient, once: bool, as_json: bool) -> int:
    """Show the cluster until Ctrl-C, with exit code 0; only once for `once`, JSON or without a terminal."""
    reader = SnapshotReader(cluster.ledger)
    with terminal.Step("looking at the cluster"):
        first = _read(cluster, reader)
    if as_json:
        terminal.as_json(first.to_dict())
    elif once or not terminal.has_screen():
        leave(picture(first))
    else:
        _refresh(cluster, reader, first)
    return DONE


def _read(cluster: ClusterClient, reader: SnapshotReader) -> Overview:
    return overview(cluster.inventory, reader.read(), now())


def _refresh(cluster: ClusterClient, reader: SnapshotReader, shown: Overview) -> None:
    """Refresh until Ctrl-C; leave the last state on the terminal."""
    problem, took = "", 0.0
    try:
        with Screen() as screen:
            while True:
                screen.show(picture(shown, problem, screen.lines))
                time.sleep(pause(took))
                began = time.monotonic()
                try:
                    shown, problem = _read(cluster, reader), ""
                except (BucketError, RecordError, OpsError) as error:
                    problem = f"the bucket does not answer ({one_line(error)}): this is of {terminal.local_time(shown.time)}"
                took = time.monotonic() - began
    except KeyboardInterrupt:
        leave(picture(shown, problem))
        sys.stdout.flush()


def pause(took: float) -> float:
    """Return the seconds until the next poll, by the duration of the last."""
    return max(REFRESH_SECONDS - took, took * (1 / _POLL_SHARE - 1))


def picture(cluster: Overview, problem: str = "", lines: int | None = None) -> Picture:
    """Return `fab top`'s picture with at most `lines` lines, or whole if None; `problem` is an error to show."""
    head = [_title(cluster), *([Text(harmless(problem), "yellow")] if problem else [])]
    hosts = columns(_HOST_HEADS, map(_host_row, cluster.hosts), _RIGHT)
    jobs = columns(_JOB_HEADS, map(_job_row, cluster.jobs), _RIGHT)
    if not cluster.jobs:
        jobs = [Text("no job runs, and none waits", "dim")]
    if lines is not None:
        jobs = cut(jobs, max(lines // 3, lines - len(head) - 2 - len(hosts)), "jobs")
        hosts = cut(hosts, lines - len(head) - 2 - len(jobs), "hosts")
    return [*head, Text(), *hosts, Text(), *jobs]


def _title(cluster: Overview) -> Text:
    training = [host for host in cluster.hosts if Role(host.role).runs_jobs]
    busy = sum(host.job is not None for host in training)
    text = f"  {terminal.local_time(cluster.time)}  {busy} of {terminal.plural(len(training), 'host')} busy"
    if cluster.cost is not None:
        text += f"  {terminal.dollars(cluster.cost)} USD so far, {terminal.dollars(cluster.hourlyCost)} an hour"
    return Text.assemble((f"{cluster.stack}, {cluster.scaleTier}", "bold"), text)


def _host_row(host: HostNow) -> tuple[Text, ...]:
    usage = host.usage or Usage()
    if host.role == Role.SERVING:
        job = cell("serves models", "dim")
    else:
        job = cell(f"reserved for {host.reservedFor}", "dim") if host.reservedFor else cell(host.job)
    return (
        Text(host.name, "bold"),
        cell(host.role),
        cell(None if usage.cpus is None else f"{usage.cpus:.0%}"),
        cell(f"{host.cpus:g}"),
        cell(None if usage.memoryBytes is None else terminal.size(usage.memoryBytes)),
        cell(terminal.size(host.memoryBytes)),
        job,
        cell(host.replica),
        state(host.state) if host.state else cell(None),
        cell(host.restarts, "yellow" if host.restarts else ""),
        cell(None if host.reportSeconds is None else f"{terminal.duration(host.reportSeconds)} ago"),
    )


def _job_row(job: JobNow) -> tuple[Text, ...]:
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
