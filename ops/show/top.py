"""`fab top`: the whole cluster, on a screen that is kept up to date, or once."""

from __future__ import annotations

import sys
import time

from jobs.checked import RecordError
from jobs.store import StoreError
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.errors import DONE, OpsError, one_line
from ops.screen.picture import Picture, Row
from ops.show.overview import Overview, overview, picture
from ops.show.snapshot import SnapshotReader

REFRESH_SECONDS = 0.4
# A bucket that is slow, or is paid by the read, is polled less often: this share of the time is spent on polls.
_LOOKING = 0.1


def top(cluster: Cluster, once: bool, as_json: bool) -> int:
    """Show the cluster until Ctrl-C, with exit code 0; only once for `once`, JSON or without a terminal."""
    looker = SnapshotReader(cluster.ledger)
    with terminal.Step("looking at the cluster"):
        first = _look(cluster, looker)
    if as_json:
        terminal.as_json(first.to_dict())
    elif once or not terminal.has_screen():
        _print(picture(first))
    else:
        _stay(cluster, looker, first)
    return DONE


def _look(cluster: Cluster, looker: SnapshotReader) -> Overview:
    glance = looker.look()
    return overview(cluster.inventory, glance, now())


def _stay(cluster: Cluster, looker: SnapshotReader, seen: Overview) -> None:
    """Refresh until Ctrl-C; leave the last state on the terminal."""
    from ops.screen.draw import Screen, leave

    problem, took = "", 0.0
    try:
        with Screen() as screen:
            while True:
                screen.show(picture(seen, problem, screen.lines))
                time.sleep(pause(took))
                began = time.monotonic()
                try:
                    seen, problem = _look(cluster, looker), ""
                except (StoreError, RecordError, OpsError) as error:
                    problem = f"the bucket does not answer ({one_line(error)}): this is of {terminal.local_time(seen.time)}"
                took = time.monotonic() - began
    except KeyboardInterrupt:
        leave(picture(seen, problem))
        sys.stdout.flush()


def pause(took: float) -> float:
    """Return the seconds until the next poll, by the duration of the last."""
    return max(REFRESH_SECONDS - took, took * (1 / _LOOKING - 1))


def _print(shown: Picture) -> None:
    for part in shown:
        if isinstance(part, Row):
            terminal.out(part.text)
        else:
            terminal.table(part.heads, [[cell.text for cell in row] for row in part.rows])
