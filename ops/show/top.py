"""`fab top`: show the whole cluster, once or as a full-screen view that is refreshed."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

from rich.text import Text

from infra.scale_tiers import Role
from jobs.bucket import BucketError
from jobs.records import Usage
from jobs.serialization import RecordError
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, OpsError, one_line
from ops.screen.render import Frame, Screen, cut, format_cell, layout_columns, print_frame, sanitize, state_text
from ops.show.snapshot import HostSnapshot, JobSnapshot, Overview, SnapshotReader, build_overview

REFRESH_SECONDS = 0.4
# The largest share of the time that polls may take: a slow bucket is polled less often.
_POLL_SHARE = 0.1
_HOST_HEADS = ("HOST", "ROLE", "CPU", "CPUS", "MEMORY", "HOST MEMORY", "JOB", "REPLICA", "STATE", "RESTARTS", "REPORT")
_JOB_HEADS = ("JOB", "STATE", "HOSTS", "PRIORITY", "TIME", "BY", "USD", "WAITS FOR")
_RIGHT = frozenset({"CPU", "CPUS", "MEMORY", "HOST MEMORY", "RESTARTS", "REPORT", "HOSTS", "PRIORITY", "TIME", "USD"})


def top(cluster: ClusterClient, once: bool, as_json: bool) -> int:
    """Show the cluster until Ctrl-C, or only once with `once`, for JSON, or without a terminal."""
    reader = SnapshotReader(cluster.ledger)
    with terminal.ProgressLine("reading the state of the cluster"):
        first = _read(cluster, reader)
    if as_json:
        terminal.print_json(asdict(first))
    elif once or not terminal.supports_screen():
        print_frame(frame(first))
    else:
        _refresh(cluster, reader, first)
    return DONE


def _read(cluster: ClusterClient, reader: SnapshotReader) -> Overview:
    return build_overview(cluster.inventory, reader.read(), now())


def _refresh(cluster: ClusterClient, reader: SnapshotReader, current: Overview) -> None:
    """Refresh until Ctrl-C; leave the last state on the terminal."""
    problem, seconds = "", 0.0
    try:
        with Screen() as screen:
            while True:
                screen.show(frame(current, problem, screen.lines))
                time.sleep(pause(seconds))
                start = time.monotonic()
                try:
                    current, problem = _read(cluster, reader), ""
                except (BucketError, RecordError, OpsError) as error:
                    problem = f"cannot refresh ({one_line(error)}): the state shown is of {terminal.local_time(current.time)}"
                seconds = time.monotonic() - start
    except KeyboardInterrupt:
        print_frame(frame(current, problem))
        sys.stdout.flush()


def pause(seconds: float) -> float:
    """Return the seconds until the next poll, if the last one took `seconds`."""
    return max(REFRESH_SECONDS - seconds, seconds * (1 / _POLL_SHARE - 1))


def frame(overview: Overview, problem: str = "", lines: int | None = None) -> Frame:
    """Return the frame of `fab top`, cut to `lines` lines unless None; `problem` is an error to show."""
    head = [_title(overview), *([Text(sanitize(problem), "yellow")] if problem else [])]
    hosts = layout_columns(_HOST_HEADS, map(_host_row, overview.hosts), _RIGHT)
    jobs = layout_columns(_JOB_HEADS, map(_job_row, overview.jobs), _RIGHT)
    if not overview.jobs:
        jobs = [Text("no job runs, and none waits", "dim")]
    if lines is not None:
        jobs = cut(jobs, max(lines // 3, lines - len(head) - 2 - len(hosts)), "jobs")
        hosts = cut(hosts, lines - len(head) - 2 - len(jobs), "hosts")
    return [*head, Text(), *hosts, Text(), *jobs]


def _title(overview: Overview) -> Text:
    training = [host for host in overview.hosts if Role(host.role).runs_jobs]
    busy = sum(host.job is not None for host in training)
    text = f"  {terminal.local_time(overview.time)}  {busy} of {terminal.plural(len(training), 'host')} busy"
    if overview.cost is not None:
        text += f"  {terminal.dollars(overview.cost)} USD so far, {terminal.dollars(overview.hourlyCost)} an hour"
    return Text.assemble((f"{overview.stack}, {overview.scaleTier}", "bold"), text)


def _host_row(host: HostSnapshot) -> tuple[Text, ...]:
    usage = host.usage or Usage()
    if host.role == Role.SERVING:
        job = format_cell("serves models", "dim")
    else:
        job = format_cell(f"reserved for {host.reservedFor}", "dim") if host.reservedFor else format_cell(host.job)
    return (
        Text(host.name, "bold"),
        format_cell(host.role),
        format_cell(None if usage.cpus is None else f"{usage.cpus:.0%}"),
        format_cell(f"{host.cpus:g}"),
        format_cell(None if usage.memoryBytes is None else terminal.size(usage.memoryBytes)),
        format_cell(terminal.size(host.memoryBytes)),
        job,
        format_cell(host.replica),
        state_text(host.state) if host.state else format_cell(None),
        format_cell(host.restarts, "yellow" if host.restarts else ""),
        format_cell(None if host.reportSeconds is None else f"{terminal.duration(host.reportSeconds)} ago"),
    )


def _job_row(job: JobSnapshot) -> tuple[Text, ...]:
    return (
        format_cell(job.jobId, "bold"),
        state_text(job.state),
        format_cell(len(job.hosts) or None),
        format_cell(job.priority or None),
        format_cell(terminal.duration(job.seconds)),
        format_cell(job.submittedBy),
        format_cell(terminal.dollars(job.cost)),
        format_cell(", ".join(job.behind)),
    )
