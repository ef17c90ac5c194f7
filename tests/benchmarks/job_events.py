"""Times in a job's record, its log and on its hosts, for figures between two moments."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime

from benchmarks.measure import Lines, MeasureError, running
from benchmarks.stack import ROOT, BenchStack
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient

_PAUSE = 0.1
_SSH_SECONDS = 20.0
_STARTED = re.compile(r"started trainer pid (\d+):")
# Waits for the end of a process without polling: these hosts share two cores.
_WATCH = (
    "python3 -I -S -c 'import os, select, time; ends = os.pidfd_open({pid}); print(0, flush=True); "
    "select.select([ends], [], []); print(time.time(), flush=True)'"
)


@dataclass(frozen=True)
class LoggedLine:
    """A line of a job's log."""

    at: float
    replica: str
    message: str


def parse_log(text: str) -> list[LoggedLine]:
    """Return the lines of `fab logs --json` with their Unix times, in the order of time."""
    lines = (json.loads(line) for line in text.splitlines())
    parsed = (LoggedLine(seconds_of(line["time"]), line["replica"], line["message"]) for line in lines)
    return sorted(parsed, key=lambda line: line.at)


def seconds_of(moment: str) -> float:
    """Return the Unix time of a moment of RFC 3339."""
    return datetime.fromisoformat(moment).timestamp()


def starts(log: Iterable[LoggedLine]) -> list[tuple[str, int, float]]:
    """Return every start of a trainer: replica, process id on its host, Unix time."""
    return [(line.replica, int(match[1]), line.at) for line in log if (match := _STARTED.match(line.message))]


def trainers(log: Iterable[LoggedLine]) -> dict[str, int]:
    """Return the process id of each replica's latest trainer."""
    return {replica: pid for replica, pid, _ in starts(log)}


def first_after(log: Iterable[LoggedLine], replica: str, beginning: str, moment: float) -> float | None:
    """Return the Unix time of a replica's first line with this beginning after a moment, or None."""
    times = (line.at for line in log if line.replica == replica and line.message.startswith(beginning) and line.at > moment)
    return min(times, default=None)


def log_of(stack: BenchStack, job: str, replica: str = "all") -> list[LoggedLine]:
    """Return the present log of a job."""
    return parse_log(stack.fab("logs", replica, "--job", job, "--lines", "all", "--json").out)


@contextmanager
def ledger_of(stack: BenchStack) -> Iterator[Ledger]:
    """Yield the records of the stack's bucket, over one connection."""
    cluster = ClusterClient(stack.inventory)
    try:
        yield cluster.ledger
    finally:
        cluster.fleet.close()


def record_in(ledger: Ledger, job: str, wanted: Callable[[JobState], bool], limit: float) -> JobRecord:
    """Return a job's record once it has this state.

    Raises:
        MeasureError: that takes longer than the limit.
    """
    deadline = time.monotonic() + limit
    while True:
        stored = ledger.job(job)
        if stored is not None and wanted(stored.record.state):
            return stored.record
        if time.monotonic() > deadline:
            raise MeasureError(f"{job} is {stored.record.state if stored else 'nowhere'} after {limit:.0f} s")
        time.sleep(_PAUSE)


def runs(state: JobState) -> bool:
    """Return True for the state of a running job."""
    return state is JobState.RUNNING


def last_gone(stack: BenchStack, processes: Mapping[str, int], action: Callable[[], object], limit: float) -> float:
    """Return seconds from the start of an action until the last of these processes, one per host, has ended.

    Local hosts and this machine have one clock.

    Raises:
        MeasureError: one exists at the limit, which counts from the action's end.
    """
    with ExitStack() as opened:
        watched = {}
        for host, pid in processes.items():
            command = stack.ssh(host, _WATCH.format(pid=pid))
            watched[host] = Lines(opened.enter_context(running(command, stack.env, ROOT, subprocess.DEVNULL)))
        ready = time.monotonic() + _SSH_SECONDS
        for host, lines in watched.items():
            if next(lines.until(ready), None) is None:
                raise MeasureError(f"the trainer on {host} ended too early, or the host does not answer")
        began = time.time()
        action()
        deadline = time.monotonic() + limit
        ends = {host: next(lines.until(deadline), None) for host, lines in watched.items()}
    late = [host for host, end in ends.items() if end is None]
    if late:
        raise MeasureError(f"after {limit:.0f} s the trainers on {', '.join(late)} still ran")
    return max(float(end[1]) for end in ends.values() if end) - began
