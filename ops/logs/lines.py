"""Log lines: the commands that read them on a host, their order among replicas, and how they are shown. Nothing here waits."""

from __future__ import annotations

import heapq
import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

LOG_DIR = "/var/lib/scaletier/logs"
NO_LOG = 66  # sysexits' EX_NOINPUT
REORDER_SECONDS = 0.08


@dataclass(frozen=True, order=True)
class Line:
    """One line of a replica's log; `time` is RFC 3339 in UTC with milliseconds, so it sorts as text."""

    time: str
    severity: str
    replica: str
    message: str

    def to_json(self) -> str:
        data = {"time": self.time, "severity": self.severity, "replica": self.replica, "message": self.message}
        return json.dumps(data, ensure_ascii=False)


def read_command(job_id: str, lines: int | None) -> str:
    """Print the last lines of a job's log, None for all; exits with NO_LOG where there is none."""
    file = shlex.quote(f"{LOG_DIR}/{job_id}.jsonl")
    return f"[ -e {file} ] || exit {NO_LOG}; exec tail -n {_count(lines)} {file}"


def follow_command(job_id: str, lines: int | None) -> str:
    """Print a job's last lines and then each that is added, until stdin ends.

    That is how the host learns that nobody reads any more: without a terminal, a closed connection kills no process.
    The last 0.2 s are for lines that were written just before.
    """
    # The log appears when the replica starts, which may be later. A tail that has seen no file yet looks for it and its lines
    # from time to time, one that has is told of them by the kernel: so the file is waited for while it is likely to come soon.
    file = shlex.quote(f"{LOG_DIR}/{job_id}.jsonl")
    soon = f"for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e {file} ] && break; sleep 0.03; done"
    return f"{soon}; tail -n {_count(lines)} -s 0.1 -F {file} 2>/dev/null & cat >/dev/null; sleep 0.2; kill $!"


def _count(lines: int | None) -> str:
    return "+1" if lines is None else str(lines)


def parse_line(text: str, replica: str, before: str = "") -> Line:
    """A line of a log; one that is no JSON, as half a line after a power cut, is shown as it is, at the time of the last."""
    try:
        data = json.loads(text)
        return Line(str(data["time"]), str(data["severity"]), str(data["replica"]), str(data["message"]))
    except (ValueError, KeyError, TypeError):
        return Line(before, "INFO", replica, text)


def parse_log(text: str, replica: str) -> list[Line]:
    """A whole log."""
    lines: list[Line] = []
    for line in text.split("\n"):
        if line:
            lines.append(parse_line(line, replica, lines[-1].time if lines else ""))
    return lines


def merge(logs: Iterable[list[Line]]) -> Iterator[Line]:
    """Lines of several replicas in the order of time; lines of one replica stay in their own order."""
    return heapq.merge(*(_rising(log) for log in logs), key=lambda line: line.time)


def _rising(log: list[Line]) -> list[Line]:
    """The log in the order of time, which it only lacks where the host's clock was set back."""
    return log if all(a.time <= b.time for a, b in pairwise(log)) else sorted(log, key=lambda line: line.time)


class Reorder:
    """Puts the lines of several followed logs into the order of time, holding each back for a moment at most.

    A line waits `window` seconds for earlier ones of other replicas, and no longer: lines that come later still are
    shown when they come.
    """

    def __init__(self, window: float = REORDER_SECONDS) -> None:
        self.window = window
        self._waiting: list[tuple[str, int, float, Line]] = []
        self._count = 0

    def add(self, line: Line, now: float) -> None:
        """A line that has just come in."""
        heapq.heappush(self._waiting, (line.time, self._count, now, line))
        self._count += 1

    def ready(self, now: float) -> Iterator[Line]:
        """The lines that have waited long enough, and those before them in time."""
        due = [time for time, _, since, _ in self._waiting if now - since >= self.window]
        if due:
            last = max(due)
            while self._waiting and self._waiting[0][0] <= last:
                yield heapq.heappop(self._waiting)[3]

    def rest(self) -> Iterator[Line]:
        """All that is left."""
        while self._waiting:
            yield heapq.heappop(self._waiting)[3]

    def wait(self, now: float) -> float | None:
        """Seconds until a line is ready; None when none waits."""
        if not self._waiting:
            return None
        return max(self.window - (now - min(since for _, _, since, _ in self._waiting)), 0.0)


def clock(moment: str) -> str:
    """An RFC 3339 moment as the operator's clock shows it: `12:00:00.250`."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return " " * 12


_SEVERITY = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1", "DEBUG": "2"}
_REPLICA = ("36", "32", "35", "34", "33", "96", "92", "95", "94")


class Format:
    """A line as it is shown: time, severity and replica in front, in columns."""

    def __init__(self, replicas: Iterable[str], colours: bool) -> None:
        names = list(replicas)
        self._width = max((len(name) for name in names), default=0)
        self._colours = {name: _REPLICA[i % len(_REPLICA)] for i, name in enumerate(names)} if colours else {}

    def __call__(self, line: Line) -> str:
        severity, replica = f"{line.severity:<7}", f"{line.replica:<{self._width}}"
        if not self._colours:
            return f"{clock(line.time)} {severity} {replica}  {line.message}"
        loud = _SEVERITY.get(line.severity)
        time, replica = _paint(clock(line.time), "2"), _paint(replica, self._colours.get(line.replica))
        return f"{time} {_paint(severity, loud)} {replica}  {_paint(line.message, loud)}"


def _paint(text: str, code: str | None) -> str:
    return f"\033[{code}m{text}\033[0m" if code else text
