"""A job's logs as they grow, on a screen: what the follower hears is taken in as it comes, and drawn four times a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from jobs.chunks import Wanted
from jobs.records import JobRecord
from ops.cluster.cluster import Cluster
from ops.logs.follow import Event, Follower, Note, Replicas, Waiting
from ops.logs.lines import Line
from ops.screen.draw import Screen, leave
from ops.screen.job import JobScreen

REFRESH_SECONDS = 0.25


def follow(cluster: Cluster, record: JobRecord, replicas: Iterable[str], wanted: Wanted) -> JobRecord | None:
    """Show the job until it ends; its final record, None where it never came to be seen. What is left says how it stood."""
    names = list(replicas)
    seen = JobScreen(record, names)
    follower = Follower(cluster.fleet, cluster.ledger, record, names, wanted, ticks=True)
    try:
        with Screen() as screen:
            return _watch(follower.events(), seen, screen)
    finally:
        leave(seen.left(time.time()))
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
    """What was heard, to where it belongs; `now` in seconds of the epoch."""
    if isinstance(event, Line):
        seen.line(event, now)
    elif isinstance(event, JobRecord):
        seen.job(event)
    elif isinstance(event, Replicas):
        seen.replicas(event.records)
    elif isinstance(event, Note | Waiting) and event.text:
        seen.note(event.text, now)
