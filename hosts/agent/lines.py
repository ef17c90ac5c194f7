"""Split a trainer's output into lines of text, each with the time and severity of its message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from jobs.firsterror import TRACEBACK, is_continuation, strip_rank
from jobs.progress import valid_report

LONGEST_LINE = 64 * 1024
BAR_SECONDS = 5.0
"""The time between two logged states of a progress bar."""
PARTIAL_SECONDS = 1.0
"""The time after which text without an end of line is logged as a line."""
MESSAGE_SECONDS = 1.0
"""A line continues the message before it only if it comes within this time."""
RAISED_SECONDS = 0.05
"""Lines after a traceback, each within this time of the previous one, are the rest of its exception's text, unless progress."""

_TRACEBACK = b"Traceback (most recent call last):"
# Backspaces can go back by this many bytes at most, which limits the time for a line with many of them.
_REACH = 4096
# A token of a line: a colour, which has no width; a character of UTF-8; or an invalid byte.
_TOKEN = re.compile(rb"\x1b\[[0-9;:]*m|[\xc0-\xff][\x80-\xbf]*|[\x00-\xff]")
# An unfinished token at the end of the input so far: an end of line, a colour or a character that the next bytes may complete.
_INCOMPLETE = re.compile(rb"(?:\r|\x1b(?:\[[0-9;:]*)?|[\xc0-\xff][\x80-\xbf]{0,3})\Z")
_LONGEST_TOKEN = 64
# The first moves the cursor up by a number of lines; the others move it up or elsewhere, hide it, or erase.
_UP = re.compile(rb"\x1b\[(\d*)[AF]")
_MOVES = re.compile(rb"\x1b\[\??[\d;]*[A-HJKSTfhlsu]")
_MOST_ROWS = 100
# No two neighbouring parts can repeat over the same characters: a line may be long, and matching it must take linear time.
_WORD = r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
_MARKS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_WORD}:(?:\S*:|\s)",  # logging.basicConfig: INFO:root:text
        r"\[?([IWEF])\d{4} \d\d:\d\d:\d\d",  # absl, glog: I0000 00:00:1700000000.000000; PyTorch in brackets
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ([IWEF]) ",  # TensorFlow's C++
        rf"\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+\W+(?:\w(?:\S*\w)?\W+)?{_WORD}\b",  # logging with asctime
        r"\S+:\d+: \w*(Warning): ",  # warnings.warn
        r"(?:\S+: )?(error): ",  # the shipped trainer, argparse
        r"(Fatal) Python error: ",  # a crash in native code
    )
)
_SEVERITY = {
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
    "Fatal": "CRITICAL",
    "Warning": "WARNING",
    "error": "ERROR",
}
_TF_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Of the levels 0 to 3, those at which startup messages are kept.
_TF_VERBOSE = ("0", "1")
# Startup messages: those that TensorFlow's libraries print while they load, at any level of logging.
_TF_STARTUP = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|I\d{4} \d\d:\d\d:[\d.]+ +\d+ port\.cc:\d+\] oneDNN custom operations are on\."
    r"|I\d{4} \d\d:\d\d:[\d.]+ +\d+ cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use "
    r"|E\d{4} \d\d:\d\d:[\d.]+ +\d+ util\.cc:\d+\] oneDNN supports DT_\w+ only on platforms with "
    r"|To enable the following instructions: [A-Z0-9_ ]+, in other operations, rebuild TensorFlow with "
)
# TensorFlow's reports that another process has ended: a program that cannot continue prints an error of its own.
_LOST_PEER = re.compile(
    r"E\d{4} \d\d:\d\d:[\d.]+ +\d+ base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort "
    r"|ERROR:tensorflow:Worker /job:\S+ failed with "
)
# A line that begins as progress does, or has a bar of Keras or tqdm.
_PROGRESS = re.compile(
    r"(?i:(?:\[\w+\]:? ?)?(?:(?:global[ _])?step|epoch)\W{1,3}\d|(?:train|eval)\b.* step \d|loss ?[=:] ?[\d.])"
    r"|.*(?:━━|\[=+[>\]]|\d%\|)"
)
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class OutputLine(NamedTuple):
    """One line of a log; time and severity are those of its message, the time in seconds since the epoch."""

    time: float
    severity: str
    message: str


class Splitter:
    """Split bytes into lines in bounded memory. It does not matter in which pieces the bytes arrive.

    A line ends with \\n or \\r\\n. A lone \\r redraws a progress bar, \\b a part of it. A bar is logged every BAR_SECONDS, and
    once more when it ends. Text without an end of line for PARTIAL_SECONDS is logged as a line; later text is another line.
    tqdm draws several bars below each other by moving the cursor up: each of these rows is such a bar.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0
        self._bar, self._bar_at = False, 0.0
        self._partly_logged = False  # True if the beginning of this line was already logged as a line of its own
        # The redrawn rows, by their distance from the lowest row.
        self._rows: dict[int, bytes] = {}
        self._rows_since = 0.0
        self._up = 0  # the cursor's distance from the lowest row
        self._doubtful = False  # True if the next row that ends may be ordinary output, not a bar

    def feed(self, data: bytes, now: float) -> Iterator[str]:
        """Return the lines that end in these bytes, and due states of bars."""
        if not self._rest:
            self._since = now
        *complete, rest = (self._rest + data).split(b"\n")
        for text in chain.from_iterable(map(_before_traceback, complete)):
            line = self._apply_moves(text, now) if b"\x1b[" in text else text
            if self._up:
                yield from self._row(line, now)
            else:
                visible = _visible(line, self._bar)
                if self._rows:
                    visible = visible or self._rows.pop(0, b"")
                    yield from self._drawn_rows()
                if visible or not self._partly_logged:
                    yield from self._cut(visible)
            self._partly_logged = self._bar = False
            self._since = now
        rest = self._apply_moves(rest, now) if b"\x1b[" in rest else rest
        # A \r at the end may be half of \r\n: keep it until the next bytes arrive.
        before, drawn_over, _ = rest.removesuffix(b"\r").rpartition(b"\r")
        if drawn_over or b"\b" in rest:
            self._begin_bar(now)
        if drawn_over:
            bar = _visible(before, True)
            if bar and now - self._bar_at >= BAR_SECONDS:
                self._bar_at = now
                yield from self._cut(bar)
            rest = rest[len(before) + 1 :]
        if b"\b" in rest:
            match = _INCOMPLETE.search(rest, len(rest) - _LONGEST_TOKEN)
            end = match.start() if match else len(rest)
            rest = _apply_backspaces(rest[:end]) + rest[end:]
        while len(rest) > LONGEST_LINE:
            cut = _boundary(rest)
            yield _text(rest[:cut])
            rest = rest[cut:]
        self._rest = rest
        if self.due(now) == 0.0:
            yield from self.take_partial(now)

    def _row(self, line: bytes, now: float) -> Iterator[str]:
        """Handle the end of a row above the lowest: yield it, unless it is a progress bar, which may be redrawn."""
        if line:
            drawn = self._bar or line.startswith(b"\r")
            if self._doubtful or not drawn:
                yield from self._drawn_rows()
            if drawn:
                self._draw(line, now)
                self._doubtful = (
                    True  # tqdm goes to a lower row and moves up again; if nothing moves up, other output follows the bar
                )
            else:
                yield from self._cut(line)
        self._up -= 1

    def _apply_moves(self, text: bytes, now: float) -> bytes:
        """Store the rows that the cursor leaves by moving up; return the text after the last move."""
        begin = 0
        for up in _UP.finditer(text):
            self._draw(text[begin : up.start()], now)
            self._up, self._doubtful = min(self._up + int(up[1][:3] or 1), _MOST_ROWS), False
            begin = up.end()
        return text[begin:]

    def _draw(self, text: bytes, now: float) -> None:
        """Store the cursor's row; a row without visible text is deleted."""
        if not self._rows:
            self._rows_since = now
        if visible := _visible(text, True):
            self._rows[self._up] = visible
        elif text:
            self._rows.pop(self._up, None)

    def _drawn_rows(self) -> Iterator[str]:
        """Yield the stored rows, from the top, and forget them."""
        rows, self._rows = self._rows, {}
        for _, row in sorted(rows.items(), reverse=True):
            yield from self._cut(row)

    def due(self, now: float) -> float | None:
        """Return the seconds until `take_partial` yields something, or None if no line is unfinished."""
        waits = [self._rows_since + BAR_SECONDS] if self._rows else []
        if self._rest:
            waits.append(max(self._since + PARTIAL_SECONDS, self._bar_at + BAR_SECONDS if self._bar else 0.0))
        return min(max(min(waits) - now, 0.0), BAR_SECONDS) if waits else None  # a clock may be set back

    def take_partial(self, now: float) -> Iterator[str]:
        """Yield an unfinished line or bar that has waited long enough; bytes of an unfinished character stay."""
        if self.due(now) != 0.0:
            return
        if now >= self._rows_since + BAR_SECONDS:
            yield from self._drawn_rows()
        if self.due(now) != 0.0:
            return
        self._since = now
        if self._bar or self._rest.endswith(b"\r"):
            self._bar, self._bar_at = True, now
        visible = _visible(self._rest, self._bar)
        complete = visible[: len(visible) - _unfinished(visible)]
        if complete:
            yield from self._cut(complete)
            self._rest, self._partly_logged = visible[len(complete) :], True

    def end(self) -> Iterator[str]:
        """Yield what is left when the output ends: bars, and a line without an end."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        yield from self._drawn_rows()
        if rest:
            yield from self._cut(_visible(rest, self._bar))

    def _begin_bar(self, now: float) -> None:
        if not self._bar:
            self._bar, self._bar_at = True, now

    def _cut(self, line: bytes) -> Iterator[str]:
        """Yield a line as text, in several lines if it is longer than LONGEST_LINE."""
        while len(line) > LONGEST_LINE:
            cut = _boundary(line)
            yield _text(line[:cut])
            line = line[cut:]
        yield _text(line)


class Messages:
    """Find the message that each line belongs to, for its time and severity.

    Python does not mark the end of a message. So a line without a severity of its own continues the message before it if it
    comes within MESSAGE_SECONDS and one of these is true: it is indented or empty; it is part of a traceback; it follows a
    traceback's exception, whose text may have many lines, within RAISED_SECONDS of the previous line, and is no progress of a
    program that caught it.
    """

    def __init__(self) -> None:
        self._first = OutputLine(0.0, "INFO", "")
        self._last = 0.0
        self._in_traceback = False
        self._raised = False
        self._chained = False

    def add(self, text: str, now: float) -> OutputLine:
        """Return this line with the time and severity of its message."""
        bare = strip_rank(text)
        traceback = TRACEBACK.match(bare) is not None
        severity = "ERROR" if traceback else severity_of(bare)
        if not self._continues(bare, severity, now, traceback):
            self._first = OutputLine(now, severity or "INFO", bare)
            self._raised = self._chained = False
        self._last = now
        in_traceback = traceback or (self._in_traceback and is_continuation(bare))
        self._raised = self._raised or (self._in_traceback and not in_traceback)
        self._in_traceback = in_traceback
        self._chained = self._chained or bare.startswith(_CHAINED)
        return OutputLine(self._first.time, self._first.severity, text)

    def _continues(self, text: str, severity: str | None, now: float, traceback: bool) -> bool:
        pause = now - self._last
        if pause > MESSAGE_SECONDS:
            return False
        if traceback:
            # logging.exception writes its message first; a chained exception has several tracebacks.
            logged = self._first.severity in ("ERROR", "CRITICAL") and not TRACEBACK.match(self._first.message)
            return self._chained or logged
        if severity is not None:
            return False
        if self._in_traceback or is_continuation(text):
            return True
        return self._raised and pause < RAISED_SECONDS and not (_PROGRESS.match(text) or valid_report(text))


def severity_of(text: str) -> str | None:
    """Return DEBUG, INFO, WARNING, ERROR or CRITICAL if the line itself has a severity; else None."""
    if _LOST_PEER.match(text):
        return "WARNING"
    for mark in _MARKS:
        if match := mark.match(text):
            return _SEVERITY.get(match[1], match[1])
    return None


def is_quiet(environment: Mapping[str, str]) -> bool:
    """Return True if a trainer's environment asks for no startup messages of TensorFlow."""
    return environment.get(_TF_LEVEL, "0") not in _TF_VERBOSE


def is_startup_message(line: str) -> bool:
    """Return True for a message that TensorFlow's libraries print at each start and that does not help users."""
    return _TF_STARTUP.match(line) is not None


def _text(line: bytes) -> str:
    if b"\x1b[" in line:
        line = _MOVES.sub(b"", line)
    return line.replace(b"\b", b"").decode("utf-8", "replace")


def _before_traceback(line: bytes) -> Sequence[bytes]:
    """Return a line, or two if a traceback begins behind an unfinished one, such as a progress bar.

    A space separates the prefix that some programs give to every line, such as `[rank0]: `.
    """
    before = line.removesuffix(_TRACEBACK)
    return (line,) if before == line or not before.strip() or before.endswith(b" ") else (before, _TRACEBACK)


def _visible(line: bytes, bar: bool) -> bytes:
    """Return a line as a terminal shows it: after its last redraw, and without the padding of a redrawn line."""
    _, drawn_over, last = line.removesuffix(b"\r").rpartition(b"\r")
    return _apply_backspaces(last).rstrip(b"\b ") if bar or drawn_over or b"\b" in last else last


def _apply_backspaces(line: bytes) -> bytes:
    """Apply the backspaces in a line. Those at its end are kept: they say where the next character is drawn."""
    first = line.find(b"\b")
    if first < 0:
        return line
    begin = max(0, first - _REACH)
    cells: list[bytes] = []
    cursor, style = 0, b""
    for token in _TOKEN.findall(line[begin:]):
        if token == b"\b":
            cursor = max(0, cursor - 1)
        elif token.startswith(b"\x1b["):
            style += token
        else:
            cells[cursor : cursor + 1] = [style + token]
            cursor, style = cursor + 1, b""
    return line[:begin] + b"".join(cells) + style + b"\b" * (len(cells) - cursor)


def _unfinished(text: bytes) -> int:
    """Return the number of bytes at the end that are the beginning of an incomplete UTF-8 character."""
    for length in range(1, min(4, len(text) + 1)):
        first = text[-length]
        if first & 0xC0 != 0x80:
            return length if first >= 0xC0 and length < (2 if first < 0xE0 else 3 if first < 0xF0 else 4) else 0
    return 0


def _boundary(line: bytes) -> int:
    """Return the place, at most LONGEST_LINE, at which a cut does not divide a UTF-8 character."""
    cut = LONGEST_LINE
    while cut > LONGEST_LINE - 4 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
