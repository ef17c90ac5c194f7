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
from ops.show.glance import Looker
from ops.show.overview import Overview, overview, picture

REFRESH_SECONDS = 0.4
# A bucket that takes long to answer, or is paid by the read, is asked the less often: so much of the time goes into looking.
_LOOKING = 0.1


def top(cluster: Cluster, once: bool, as_json: bool) -> int:
    """Show it until Ctrl-C, which is exit code 0 as well; once, where that or JSON is wanted or there is no terminal."""
    looker = Looker(cluster.ledger)
    with terminal.Step("looking at the cluster"):
        first = _look(cluster, looker)
    if as_json:
        terminal.as_json(first.to_dict())
    elif once or not terminal.has_screen():
        _print(picture(first))
    else:
        _stay(cluster, looker, first)
    return DONE


def _look(cluster: Cluster, looker: Looker) -> Overview:
    glance = looker.look()
    return overview(cluster.inventory, glance, now())


def _stay(cluster: Cluster, looker: Looker, seen: Overview) -> None:
    """Until Ctrl-C; what was seen last is left behind."""
    from ops.screen.draw import Screen, leave

    said, took = "", 0.0
    try:
        with Screen() as screen:
            while True:
                screen.show(picture(seen, said, screen.lines))
                time.sleep(pause(took))
                began = time.monotonic()
                try:
                    seen, said = _look(cluster, looker), ""
                except (StoreError, RecordError, OpsError) as error:
                    said = f"the bucket does not answer ({one_line(error)}): this is of {terminal.local_time(seen.time)}"
                took = time.monotonic() - began
    except KeyboardInterrupt:
        leave(picture(seen, said))
        sys.stdout.flush()


def pause(took: float) -> float:
    """Seconds until the next look, where the last one took so long."""
    return max(REFRESH_SECONDS - took, took * (1 / _LOOKING - 1))


def _print(shown: Picture) -> None:
    for part in shown:
        if isinstance(part, Row):
            terminal.out(part.text)
        else:
            terminal.table(part.heads, [[cell.text for cell in row] for row in part.rows])
