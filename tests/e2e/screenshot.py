"""A screenshot for docs/ of a job's screen: as a terminal shows it after N seconds.

`fab train --job demo --no-follow -- --model cnn` and `python tests/e2e/screenshot.py demo 60 docs/screen.png`.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from pathlib import Path

from browser import Browser
from rich.console import Console
from rich.terminal_theme import MONOKAI

from jobs.chunks import LogFilter
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, replica_names
from ops.logs.follow import Follower
from ops.screen.job import JobScreen
from ops.screen.render import Frame, join_lines

_LINES, _COLUMNS = 30, 118


def follow_job(job: str, seconds: float) -> Frame:
    """Follow a job for `seconds` and return its frame."""
    cluster = ClusterClient.load()
    record = existing_job(cluster.ledger, job)
    names = replica_names(record)
    screen, until = JobScreen(record, names), time.monotonic() + seconds
    for event in Follower(cluster.fleet, cluster.ledger, record, names, LogFilter(), for_screen=True).events():
        screen.add(event, time.time())
        if time.monotonic() > until:
            break
    return screen.frame(time.time(), _LINES)


def main(job: str, seconds: str, target: str) -> None:
    """Follow the job and write the picture."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(join_lines(follow_job(job, float(seconds))))
    svg = console.export_svg(title=f"fab train --job {job}", theme=MONOKAI)
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        page = Path(folder) / "screen.html"
        page.write_text(f'<body style="margin:0">{svg}</body>')
        browser.emulate(900, round(900 * height / width), bars=False)
        browser.open(page.as_uri())
        browser.picture(Path(target), full_page=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
