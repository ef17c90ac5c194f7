"""What a change of the cluster would do to the jobs that have its hosts: said at every preview, and refused by an update."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pulumi

from infra.spec import ClusterSpec
from infra.targets import TargetError
from jobs.checked import RecordError
from jobs.paths import QUEUE
from jobs.placement import place
from jobs.queue import Queue

Read = Callable[[str], bytes | None]


def hosts_lost(inventory: Path, spec: ClusterSpec) -> list[str]:
    """The hosts that are up, as the last update wrote them down, and that the new cluster no longer has."""
    try:
        there = [str(host["name"]) for host in json.loads(inventory.read_bytes())["hosts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # there is no cluster yet
    stay = {replica.name for replica in spec.replicas}
    return [name for name in there if name not in stay]


def endangered(queue: Queue, lost: list[str]) -> list[str]:
    """A line for each job that has one of these hosts, or waits and could be given no others."""
    lines = []
    for entry in queue.entries:
        if entry.held and (taken := [host for host in entry.hosts if host in lost]):
            lines.append(f"job {entry.jobId} has {', '.join(taken)}")
        elif not entry.held and len(place(entry.wanted, lost)) < len(entry.wanted):
            lines.append(f"job {entry.jobId} waits for hosts of which too few stay")
    return lines


def check(lost: list[str], read: Read, preview: bool, allowed: bool) -> None:
    """Warn at a preview, refuse an update with a TargetError, where jobs would lose hosts and that is not `allowed`."""
    if not lost or (content := read(QUEUE)) is None:
        return
    try:
        lines = endangered(Queue.from_json(content), lost)
    except RecordError as error:
        pulumi.log.warn(f"which job has which host cannot be seen, so none is looked after: {error}")
        return
    if not lines:
        return
    what = f"this takes {', '.join(lost)} away, and {'; '.join(lines)}"
    if allowed:
        pulumi.log.warn(f"{what}: disruptJobs is true, so it is done")
    elif preview:
        pulumi.log.warn(f"{what}: pulumi up will refuse. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
    else:
        raise TargetError(f"{what}: nothing was changed. Wait (fab wait), fab cancel, or pulumi config set disruptJobs true")
