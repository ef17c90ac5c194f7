"""A replica's log as chunks: files of whole lines, equal on host and in bucket; only the newest one grows.

A chunk's name gives its place in the log: the start of the log (its `incarnation`, in seconds since 1970), and the bytes and
lines before this chunk. A place stays valid if the middle of the log is cut out: the names on both sides give the missing
range. This module is also the program that reads a log on its host. It is copied there, so it imports the standard library
only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

LIMIT = 1_000_000_000
"""Bytes of a replica's log that are kept by default."""
CHUNK_BYTES = 2**20
"""A chunk ends once it has this many bytes."""
NO_LOG = 66  # sysexits' EX_NOINPUT
SLOW_PATTERN = 65  # the pattern exceeded PATTERN_SECONDS on one line
PATTERN_SECONDS = 1.0
SEVERITIES = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_HEAD_DIVISOR = 8
_NAME = re.compile(r"(\d{10,})-(\d{15,})-(\d{12,})\.jsonl")
_BEGINS = re.compile(rb'\{"time": "([^"]*)", "severity": "(\w*)", ')
_BLOCK = 2**18
_FROM_THE_END = 2**15
_POLL_SECONDS = 0.02
_LAST_SECONDS = 0.2
_TICK_NANOSECONDS = 100_000_000


class Position(NamedTuple):
    """A place in a log: the incarnation, and the bytes of the log before that place."""

    incarnation: int
    offset: int


BEGINNING = Position(0, 0)


class Chunk(NamedTuple):
    """A part of a log: its start in bytes and in lines, and its present size in bytes."""

    incarnation: int
    offset: int
    line: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.incarnation:010d}-{self.offset:015d}-{self.line:012d}.jsonl"

    @property
    def end(self) -> int:
        return self.offset + self.size


class LogEntry(NamedTuple):
    """A line as it was written, without its end, and the place after it."""

    position: Position
    line: bytes


class LogFilter(NamedTuple):
    """A filter of log lines: count, time range, severity and pattern; an empty field does not filter.

    `lines` is the number of last lines (None for all); times are RFC 3339 in UTC with milliseconds; severity is the lowest
    one; the pattern is searched in the message.
    """

    lines: int | None = None
    since: str = ""
    until: str = ""
    severity: str = ""
    pattern: str = ""

    @property
    def is_active(self) -> bool:
        """True if the filter may exclude lines."""
        return any(self[1:])

    def matches(self, line: bytes) -> bool:
        """Return True if a line passes the filter. Only the pattern applies to a line that is no log line. Raises SlowError."""
        if match := _BEGINS.match(line):
            time, severity = match[1].decode("ascii", "replace"), match[2].decode("ascii", "replace")
            if (self.since and time < self.since) or (self.until and time > self.until):
                return False
            if self.severity and _rank(severity) < _rank(self.severity):
                return False
        return not self.pattern or _message_matches(self.pattern, line)


class SlowError(Exception):
    """A pattern takes longer than PATTERN_SECONDS on one line."""


class ChunkSource(Protocol):
    """The storage of the chunks of one log."""

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each chunk in bytes, by name."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return this range of bytes of a chunk, as far as it exists; empty if the chunk was removed."""


def chunks_of(sizes: Mapping[str, int]) -> list[Chunk]:
    """Return the chunks among these names, in the order of the log."""
    return sorted(
        Chunk(int(match[1]), int(match[2]), int(match[3]), size)
        for name, size in sizes.items()
        if (match := _NAME.fullmatch(name))
    )


def chunks_to_remove(chunks: list[Chunk], limit: int) -> list[Chunk]:
    """Return the chunks to remove so that `limit` bytes stay: the oldest after the first `limit`/8 bytes, never the last."""
    over = sum(chunk.size for chunk in chunks) - limit
    removed, before = [], 0
    for chunk in chunks[:-1]:
        if over <= 0:
            break
        before += chunk.size
        if before > limit // _HEAD_DIVISOR:
            removed.append(chunk)
            over -= chunk.size
    return removed


class ChunkFolder:
    """Chunks in a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[str, int] = {}
        self._changed: int | None = None

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each chunk in bytes, by name; the folder is listed only if it has changed."""
        try:
            changed = self._path.stat().st_mtime_ns
            growing = max(self._sizes, default="")
            if changed != self._changed or not growing:
                self._list(growing)
                # Two changes within a tick of the kernel's clock have one time.
                self._changed = changed if time.time_ns() - changed > _TICK_NANOSECONDS else None
            else:
                self._sizes[growing] = (self._path / growing).stat().st_size
        except OSError:
            self._changed = None
            return {}
        return self._sizes

    def _list(self, growing: str) -> None:
        previous, self._sizes = self._sizes, {}
        for name in filter(_NAME.fullmatch, os.listdir(self._path)):  # noqa: PTH208  it is done often
            size = previous.get(name) if name < growing else None
            with suppress(FileNotFoundError):
                self._sizes[name] = (self._path / name).stat().st_size if size is None else size

    def read(self, name: str, start: int, end: int) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except OSError:
            return b""


class ChunkReader:
    """A log from a place on, in its order; one line replaces each range that was cut out."""

    def __init__(self, source: ChunkSource, position: Position = BEGINNING, log_filter: LogFilter | None = None) -> None:
        self.position = position
        self._source, self._until = source, log_filter.until if log_filter else ""
        self._matches = log_filter.matches if log_filter and log_filter.is_active else None
        self._line: int | None = 0 if position == BEGINNING else None
        self._name = ""  # of the chunk that was reached

    def entries(self) -> Iterator[LogEntry]:
        """Yield all complete lines that exist now and were not yielded before."""
        sizes = self._source.sizes()
        unread = {name: sizes[name] for name in sizes if name >= self._name}  # few, while a log is followed
        chunks = chunks_of(unread)
        ahead = [chunk for chunk in chunks if (chunk.incarnation, chunk.end) > self.position]
        if chunks and not ahead:
            self._name = chunks[-1].name
        for chunk in span(self._source, ahead, until=self._until):
            yield from self._entries_of(chunk)

    def _entries_of(self, chunk: Chunk) -> Iterator[LogEntry]:
        self._name = chunk.name
        if chunk.incarnation != self.position.incarnation:
            self.position, self._line = Position(chunk.incarnation, 0), 0
        if chunk.offset >= self.position.offset:
            gap = chunk.offset - self.position.offset
            lines = None if self._line is None else chunk.line - self._line
            self.position, self._line = Position(chunk.incarnation, chunk.offset), chunk.line
            if gap:
                yield _gap(self._source, chunk, lines, gap)
        rest = b""
        while (at := self.position.offset + len(rest)) < chunk.end:
            start = at - chunk.offset
            data = self._source.read(chunk.name, start, min(start + _BLOCK, chunk.size))
            if not data:
                return  # the chunk was removed meanwhile
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self.position = Position(chunk.incarnation, self.position.offset + len(line) + 1)
                if self._line is not None:
                    self._line += 1
                if self._matches is None or self._matches(line):
                    yield LogEntry(self.position, line)


def first_position(source: ChunkSource, log_filter: LogFilter) -> Position:
    """Return a position before which no line passes the filter."""
    chunks = span(source, chunks_of(source.sizes()), log_filter.since)
    return Position(chunks[0].incarnation, chunks[0].offset) if chunks and log_filter.since else BEGINNING


def last_entries(source: ChunkSource, log_filter: LogFilter) -> tuple[list[LogEntry], Position]:
    """Return the last lines that pass the filter, and the log's end position; read as little as possible."""
    every = chunks_of(source.sizes())
    entries: list[LogEntry] = []
    if not every:
        return entries, BEGINNING
    if log_filter.lines == 0:
        return entries, _behind(source, every[-1])
    end: Position | None = None
    before: dict[Chunk, Chunk | None] = dict(zip(every, [None, *every], strict=False))
    for chunk in reversed(span(source, every, log_filter.since, log_filter.until)):
        if len(entries) == log_filter.lines:
            break
        for entry in _backwards(source, chunk):
            end = end or entry.position
            if log_filter.matches(entry.line):
                entries.append(entry)
                if len(entries) == log_filter.lines:
                    break
        else:
            gap = _gap_between(source, before[chunk], chunk)
            if gap and LogFilter(since=log_filter.since).matches(gap.line):
                entries.append(gap)
    behind = end if end and end > (every[-1].incarnation, every[-1].offset) else _behind(source, every[-1])
    return entries[::-1], behind


def _behind(source: ChunkSource, chunk: Chunk) -> Position:
    """Return the place after a chunk's last complete line."""
    last = next(_backwards(source, chunk), None)
    return last.position if last else Position(chunk.incarnation, chunk.offset)


def _gap_between(source: ChunkSource, before: Chunk | None, chunk: Chunk) -> LogEntry | None:
    """Return the line that stands for what was cut out between two chunks, or None if nothing was."""
    lines, size = chunk.line, chunk.offset
    if before and before.incarnation == chunk.incarnation and (size := chunk.offset - before.end):
        lines -= before.line + source.read(before.name, 0, before.size).count(b"\n")
    return _gap(source, chunk, lines, size) if size else None


def span(source: ChunkSource, chunks: list[Chunk], since: str = "", until: str = "") -> list[Chunk]:
    """Return the chunks that may have lines in this time range; an empty time is no limit.

    Lines before `until` may follow later ones, if the clock was ahead and then set back.
    """
    if since:
        chunks = chunks[max(bisect_left(chunks, since, key=lambda chunk: _time(source, chunk)) - 1, 0) :]
    if not until or not chunks:
        return chunks
    last = next(_backwards(source, chunks[-1]), None)
    times = [*(_time(source, chunk) for chunk in chunks), _time_of(last.line if last else b"")]
    ends = [n for n, (time, after) in enumerate(pairwise(times), 1) if time <= until or after < time]
    return chunks[: max(ends, default=0)]


def _time(source: ChunkSource, chunk: Chunk) -> str:
    """Return the time of a chunk's first line."""
    return _time_of(source.read(chunk.name, 0, min(256, chunk.size)) if chunk.size else b"")


def _time_of(line: bytes) -> str:
    """Return the time of a line of a log, of which the beginning is enough; empty if it has none."""
    match = _BEGINS.match(line)
    return match[1].decode("ascii", "replace") if match else ""


def _backwards(source: ChunkSource, chunk: Chunk) -> Iterator[LogEntry]:
    """Yield a chunk's complete lines, the last one first."""
    end, step = chunk.size, _FROM_THE_END
    tail, whole = b"", False  # the end of a line whose beginning is not read yet; whether any line's end was seen
    while end > 0:
        start = max(0, end - step)
        data = source.read(chunk.name, start, end) + tail
        if not whole:
            data = data[: data.rfind(b"\n") + 1]
            whole = bool(data)
            at = start + len(data)
        lines = data.split(b"\n")[:-1]
        tail = lines.pop(0) + b"\n" if start and lines else b""
        for line in reversed(lines):
            yield LogEntry(Position(chunk.incarnation, chunk.offset + at), line)
            at -= len(line) + 1
        end, step = start, min(2 * step, _BLOCK)


def _gap(source: ChunkSource, chunk: Chunk, lines: int | None, size: int) -> LogEntry:
    """Return the line that stands for what was cut out before a chunk, at that chunk's time."""
    line_count = "" if lines is None else f"{lines} lines, "
    entry = {
        "time": _time(source, chunk),
        "severity": "WARNING",
        "replica": "",
        "message": f"… {line_count}{_megabytes(size)} cut …",
    }
    return LogEntry(Position(chunk.incarnation, chunk.offset), json.dumps(entry, ensure_ascii=False).encode())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 50_000 else f"{size} bytes"


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def _message_matches(pattern: str, line: bytes) -> bool:
    """Return True if the pattern is found in a line's message. On the main thread the search is limited to PATTERN_SECONDS."""
    try:
        text = str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        text = line.decode("utf-8", "replace")
    if threading.current_thread() is not threading.main_thread():
        return re.search(pattern, text) is not None
    before = signal.signal(signal.SIGALRM, _too_slow)  # Python handles the signal during the search
    seconds_left, _ = signal.setitimer(signal.ITIMER_REAL, PATTERN_SECONDS)
    try:
        return re.search(pattern, text) is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, seconds_left)  # the caller may have set one


def _too_slow(*_: object) -> None:
    raise SlowError


def show(folder: str, filter_json: str, follow: bool, position: str = "") -> int:
    """Print the selected lines of a log, each preceded by its position. Return NO_LOG if there is no log.

    With `follow`, print later lines too, until stdin ends and all lines written by then are printed. A line with
    only a position marks where later lines begin. An empty first line means that there is a log.
    """
    source, log_filter = ChunkFolder(Path(folder)), LogFilter(*json.loads(filter_json))
    out = sys.stdout.buffer
    if not follow and not source.sizes():
        return NO_LOG
    out.write(b"\n")  # there is a log: the search in it may take long
    out.flush()
    ending = threading.Event()
    if follow:
        threading.Thread(target=_wait_for_end, args=(ending,), daemon=True).start()
    if position:
        reader = ChunkReader(source, Position(*map(int, position.split())), log_filter)
    elif log_filter.lines is None:
        reader = ChunkReader(source, first_position(source, log_filter), log_filter)
    else:
        entries, behind = last_entries(source, log_filter)
        reader = ChunkReader(source, behind, log_filter)
        out.writelines(map(_printed, entries))
    out.write(b"%d %d \n" % reader.position)
    while True:
        ended = ending.is_set() or not follow
        out.writelines(map(_printed, reader.entries()))
        out.flush()
        if ended:
            return 0
        if ending.wait(_POLL_SECONDS):
            threading.Event().wait(_LAST_SECONDS)  # for lines that were written just before


def _printed(entry: LogEntry) -> bytes:
    return b"%d %d %b\n" % (*entry.position, entry.line)


def _wait_for_end(ending: threading.Event) -> None:
    while os.read(0, 2**16):
        pass
    ending.set()


def main(arguments: Iterable[str]) -> int:
    """Run the command line `FOLDER FILTER read|follow [POSITION]`."""
    folder, filter_json, mode, *position = arguments
    try:
        return show(folder, filter_json, mode == "follow", *position)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: Python must not report that as it exits
        return 0
    except SlowError:
        return SLOW_PATTERN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
