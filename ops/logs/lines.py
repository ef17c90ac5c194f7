"""Log lines: the commands that print them on a host, the parsers of their output, and the format for a terminal."""

from __future__ import annotations

import heapq
import inspect
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jobs import chunks, paths
from jobs.chunks import LogFilter, Position
from ops.errors import UsageError

LOG_DIR = f"{paths.STATE_DIR}/logs"
_PYTHON = ("python3", "-I", "-S", "-c")
_CONTROLS = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, order=True, slots=True)
class LogLine:
    """One line of a replica's log; `time` is RFC 3339 in UTC with milliseconds, so it sorts as text."""

    time: str
    severity: str
    replica: str
    message: str

    def to_json(self, first_error: bool = False) -> str:
        """Return the line as JSON, with `firstError` if it is the job's first error; terminal controls are escaped."""
        data = {"time": self.time, "severity": self.severity, "replica": self.replica, "message": self.message}
        text = json.dumps({**data, "firstError": True} if first_error else data, ensure_ascii=False)
        return text if text.isprintable() else _CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", text)


def read_command(job_id: str, log_filter: LogFilter) -> str:
    """Return the command that prints the selected lines of a job's log on a host; it exits with NO_LOG if there is no log."""
    return _command(job_id, log_filter, "read")


def follow_command(job_id: str, log_filter: LogFilter, position: Position | None = None) -> str:
    """Return the command that prints a job's log from a position, and each new line, until stdin ends.

    The end of stdin ends the command: without a terminal, a closed SSH connection would not.
    """
    return _command(job_id, log_filter, "follow", *([f"{position.incarnation} {position.offset}"] if position else []))


def _command(job_id: str, log_filter: LogFilter, *arguments: str) -> str:
    return shlex.join([*_PYTHON, _source(), f"{LOG_DIR}/{job_id}", json.dumps(log_filter), *arguments])


@cache
def _source() -> str:
    """Return the source of this checkout's `jobs.chunks`, which the host runs instead of its own."""
    return inspect.getsource(chunks)


def parse_printed(printed: bytes, replica: str, last_time: str = "") -> tuple[Position, LogLine | None]:
    """Parse a line of a command's output: a position, and the log line that ends there, or None for a position alone.

    ValueError for any other output.
    """
    incarnation, offset, text = printed.split(b" ", 2)
    return Position(int(incarnation), int(offset)), parse_line(
        text.decode("utf-8", "replace"), replica, last_time
    ) if text else None


def parse_pieces(pieces: Iterable[bytes], replica: str) -> Iterator[tuple[Position | None, list[tuple[int, LogLine]]]]:
    """Yield for each piece of output the last position, and the lines that are complete, each with its size in bytes."""
    position: Position | None = None
    rest, last_time = b"", ""
    for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        lines = []
        for printed in filter(None, complete):
            position, line = parse_printed(printed, replica, last_time)
            if line:
                last_time = line.time
                lines.append((len(printed), line))
        yield position, lines


def parse_line(text: str, replica: str, last_time: str = "") -> LogLine:
    """Parse a line of a log; one that is no JSON, as after a power cut, becomes a message with the time `last_time`."""
    try:
        data: dict[str, Any] = json.loads(text)
        return LogLine(str(data["time"]), str(data["severity"]), str(data["replica"]) or replica, str(data["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return LogLine(last_time, "INFO", replica, text)


def read_source(
    source: chunks.ChunkSource, replica: str, log_filter: LogFilter, position: Position | None = None
) -> Iterator[LogLine]:
    """Yield the selected lines of a log, from a position if there is one, like the commands on a host.

    UsageError if the pattern takes too long.
    """
    last_time = ""
    try:
        if position is None and log_filter.lines is not None:
            entries: Iterable[chunks.LogEntry] = chunks.last_entries(source, log_filter)[0]
        else:
            start = position or chunks.first_position(source, log_filter)
            entries = chunks.ChunkReader(source, start, log_filter).entries()
        for entry in entries:
            line = parse_line(entry.line.decode("utf-8", "replace"), replica, last_time)
            last_time = line.time
            yield line
    except chunks.SlowError:
        raise slow_pattern_error(log_filter) from None


def merge(logs: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Yield the lines of several replicas by time; those of one replica keep their order."""
    return heapq.merge(*logs, key=lambda line: line.time)


def slow_pattern_error(log_filter: LogFilter) -> UsageError:
    """Return the error for a pattern that takes too long on a line."""
    what = f"--grep {log_filter.pattern!r} takes longer than {chunks.PATTERN_SECONDS:g} s on one line"
    return UsageError(f"{what}: avoid nested repetitions such as (a+)+")


def clock(moment: str) -> str:
    """Format an RFC 3339 moment in local time: `12:00:00.250`."""
    try:
        return f"{_second(moment[:19] + moment[23:])}.{moment[20:23]}" if moment[19] == "." else f"{_second(moment)}.000"
    except (ValueError, IndexError, OverflowError):
        return " " * 12


@lru_cache(64)
def _second(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S")


FIRST_ERROR_MARK = "  ← the job's first error"
_SEVERITY_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1", "DEBUG": "2"}
_REPLICA_COLOURS = ("36", "32", "35", "34", "33", "96", "92", "95", "94")


class LineFormatter:
    """A formatter of lines for a terminal: columns of time, severity and replica, then the message."""

    def __init__(self, replicas: Iterable[str], colours: bool) -> None:
        names = list(replicas)
        self._width = max((len(name) for name in names), default=0)
        self._colours = {name: _REPLICA_COLOURS[i % len(_REPLICA_COLOURS)] for i, name in enumerate(names)} if colours else {}

    def __call__(self, line: LogLine, first_error: bool = False) -> str:
        """Format a line; `first_error` appends that it is the job's first error."""
        severity, replica = f"{line.severity:<7}", f"{line.replica:<{self._width}}"
        message = line.message if "\n" not in line.message else line.message.replace("\n", "␊")  # shown in one line
        message += FIRST_ERROR_MARK if first_error else ""
        if not self._colours:
            return f"{clock(line.time)} {severity} {replica}  {message}"
        colour = _SEVERITY_COLOURS.get(line.severity)
        time, replica = _paint(clock(line.time), "2"), _paint(replica, self._colours.get(line.replica))
        return f"{time} {_paint(severity, colour)} {replica}  {_paint(message, colour)}"


def _paint(text: str, code: str | None) -> str:
    return f"\033[{code}m{text}\033[0m" if code else text
