"""The live log screen of a job: events are applied as they arrive, and drawn four times a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from jobs.chunks import LogFilter
from jobs.records import JobRecord
from ops.cluster.cluster import Cluster
from ops.logs.follow import Event, Follower, Note, Replicas, Waiting
from ops.logs.lines import LogLine
from ops.screen.draw import Screen, leave
from ops.screen.job import JobScreen

REFRESH_SECONDS = 0.25


def follow(cluster: Cluster, record: JobRecord, replicas: Iterable[str], wanted: LogFilter) -> JobRecord | None:
    """Show the job until it ends, then leave its last state on the terminal.

    Returns:
        The final record, or None if the job was never seen.
    """
    names = list(replicas)
    job_screen = JobScreen(record, names)
    follower = Follower(cluster.fleet, cluster.ledger, record, names, wanted, ticks=True)
    try:
        with Screen() as screen:
            return _watch(follower.events(), job_screen, screen)
    finally:
        leave(job_screen.left(time.time()))
        sys.stdout.flush()


def _watch(events: Iterator[Event], seen: JobScreen, screen: Screen) -> JobRecord | None:
    end, drawn = None, 0.0
    for event in events:
        if isinstance(event, JobRecord):
            end = event
        take(seen, event, time.time())
        if time.monotonic() - drawn >= REFRESH_SECONDS:
            screen.show(seen.picture(time.time(), screen.lines))
            drawn = time.monotonic()
    return end


def take(seen: JobScreen, event: Event, now: float) -> None:
    """Apply an event to the screen; `now` in seconds of the epoch."""
    if isinstance(event, LogLine):
        seen.line(event, now)
    elif isinstance(event, JobRecord):
        seen.job(event)
    elif isinstance(event, Replicas):
        seen.replicas(event.records)
    elif isinstance(event, Note | Waiting) and event.text:
        seen.note(event.text, now)
