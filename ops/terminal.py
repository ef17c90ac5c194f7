"""Output to terminals and pipes: tables, colours, times, and the progress of slow operations."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Self, TextIO

from ops.errors import UsageError

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36"}
STATE_COLOURS = {
    "SUCCEEDED": "green",
    "RUNNING": "blue",
    "FAILED": "red",
    "LOST": "red",
    "CANCELLED": "yellow",
    "CANCELLING": "yellow",
    "EXITED": "dim",
    "no answer": "red",
}


def supports_colour(stream: TextIO) -> bool:
    """Return True for a terminal whose user has not refused colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def supports_screen() -> bool:
    """Return True if stdout and stderr are a terminal that can show a full-screen view."""
    able = os.environ.get("TERM", "dumb") != "dumb" and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return able and sys.stdout.isatty() and sys.stderr.isatty()


def paint(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    """Return the text in a colour if the stream supports colours."""
    return f"\033[{_CODES[colour]}m{text}\033[0m" if colour and supports_colour(stream or sys.stdout) else text


# Guards the terminal's status lines, which other threads' lines replace.
_write_lock, _status_lines = threading.RLock(), list["StatusLine"]()
_SGR = r"\033\[[0-9;:]{0,64}m"
_CONTROLS = re.compile(rf"({_SGR})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PLAIN = "\033[0m"


def sanitize(text: str, colours: bool = False) -> str:
    """Return untrusted text without terminal controls.

    With `colours`, colours stay, and are reset at the end of each line. Other control characters except newline and tab become
    visible ones: ESC becomes ␛.
    """
    if text.isprintable():
        return text
    safe_text = _CONTROLS.sub(lambda code: (code[0] if colours else "") if code[1] else _visible(code[0]), text)
    if "\033" not in safe_text:
        return safe_text
    return "\n".join(line + _PLAIN if "\033" in line and not line.endswith(_PLAIN) else line for line in safe_text.split("\n"))


def escape_breaks(text: str) -> str:
    """Return text, such as the name of a file, with visible characters for line breaks and tabs: ␊ for a newline."""
    return text if text.isprintable() else re.sub(r"[\n\t]", lambda match: _visible(match[0]), text)


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def write(stream: TextIO, line: str) -> None:
    """Write a line to a stream, sanitized; replace characters that it cannot encode."""
    encoding = stream.encoding or "utf-8"
    line = sanitize(line, supports_colour(stream))
    with _write_lock:
        for status in list(_status_lines):
            status.clear()
        stream.write((line + "\n").encode(encoding, "replace").decode(encoding))
        if stream is sys.stderr:
            stream.flush()


def out(text: str = "") -> None:
    """Print a line of a command's result on stdout."""
    write(sys.stdout, text)


def note(text: str) -> None:
    """Print a line on stderr, and so not into pipes."""
    write(sys.stderr, paint(text, "dim", sys.stderr))


def error(text: str) -> None:
    """Print the one line that states the problem."""
    write(sys.stderr, f"{paint('error:', 'red', sys.stderr)} {text}")


def print_json(value: Any) -> None:
    """Print a result as JSON; NaN and infinities, which JSON lacks, become strings."""
    write(sys.stdout, json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=1))


def confirm(what: str) -> None:
    """Ask the user whether to proceed; UsageError if the answer is no, or without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(f"this would {what}: say --yes, as there is no terminal to ask on")
    sys.stderr.write(f"{what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was changed")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose columns are as wide as their widest cell; numbers are aligned to the right."""
    cells = [["-" if cell is None or cell == "" else escape_breaks(str(cell)) for cell in row] for row in rows]
    widths = [max(len(head), *(len(row[i]) for row in cells)) if cells else len(head) for i, head in enumerate(heads)]
    right = [all(row[i] == "-" or row[i].replace(".", "", 1).isdecimal() for row in cells) for i in range(len(heads))]

    def line(row: Sequence[str], colours: Sequence[str | None]) -> str:
        padded = (f"{cell:{'>' if to_right else '<'}{width}}" for cell, width, to_right in zip(row, widths, right, strict=True))
        return "  ".join(paint(cell, colour) for cell, colour in zip(padded, colours, strict=True)).rstrip()

    out(line(heads, ["bold"] * len(heads)))
    for row in cells:
        out(line(row, [STATE_COLOURS.get(cell) for cell in row]))


def state(text: str) -> str:
    """Return a job's state in its colour."""
    return paint(text, STATE_COLOURS.get(text))


def local_time(moment: str | None) -> str:
    """Format an RFC 3339 moment in the operator's time zone: `2026-01-31 12:00:00`; any other text is returned as it is."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S") if moment else ""
    except (ValueError, OverflowError):
        return moment or ""


def duration(seconds: float) -> str:
    """Format a duration: `3.2 s`, `1 min 32 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def rate(value: float) -> str:
    """Format a rate, such as steps per second: `200.4`, and below 1 with three digits: `0.0323`."""
    return f"{value:.1f}" if value >= 1 else f"{value:.3g}"


def dollars(amount: float | None) -> str:
    """Format US dollars with 4 places, as prices have: `0.0036`."""
    return "" if amount is None else f"{amount:.4f}"


def size(count: float) -> str:
    """Format bytes in decimal units: `55.0 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class StatusLine:
    """A status on one line of stderr: rewritten on a terminal with colours, elsewhere one line for each change."""

    def __init__(self, suffix: str = "") -> None:
        """Append the suffix to each text, on a terminal only."""
        self.live = supports_colour(sys.stderr)
        self._suffix = suffix

    def show(self, text: str) -> None:
        """Replace the text; an empty one removes it."""
        self.clear()
        if text and not self.live:
            note(text)
        elif text:
            width = shutil.get_terminal_size().columns - len(self._suffix) - 1  # a wrapped line could not be removed
            with _write_lock:
                sys.stderr.write(f"{sanitize(text)[:width]}{self._suffix}")
                sys.stderr.flush()
                _status_lines.append(self)

    def clear(self) -> None:
        """Remove the line."""
        with _write_lock:
            if self in _status_lines:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()
                _status_lines.remove(self)


_FIRST_SECONDS, _AGAIN_SECONDS, _REDRAW_SECONDS = 2.0, 10.0, 0.2


class ProgressLine:
    """A context manager that counts the seconds of a slow operation: on a terminal in one line, elsewhere in a line after 2 s,
    every 10 s, and at the end.

    `with ProgressLine("connecting") as step: step.detail = "3 of 8"`
    """

    def __init__(self, what: str, always: bool = False) -> None:
        self.what, self._always = what, always
        self.detail: str | Callable[[], str] = ""
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._start, self._status = time.monotonic(), StatusLine()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._status.clear()
        seconds = time.monotonic() - self._start
        if kind is None and (self._always or seconds >= _FIRST_SECONDS):
            note(f"{self._line()} ({duration(seconds)})")

    def _line(self) -> str:
        return f"{self.what} {self.detail() if callable(self.detail) else self.detail}".rstrip()

    def _show(self) -> None:
        wait = _REDRAW_SECONDS if self._status.live else _FIRST_SECONDS
        while not self._ended.wait(wait):
            seconds = time.monotonic() - self._start
            if seconds >= 1 or not self._status.live:
                self._status.show(f"{self._line()} … {seconds:.0f} s")
            if not self._status.live:
                wait = _AGAIN_SECONDS


def list_some(items: Sequence[str], count: int | None = None, most: int = 5, separator: str = ", ") -> str:
    """List the first `most` items, and ` and N more` of `count`, by default of all items."""
    more = (len(items) if count is None else count) - len(items[:most])
    return separator.join(map(escape_breaks, items[:most])) + (f" and {more} more" if more > 0 else "")


def plural(count: int, what: str) -> str:
    """Format a count with its noun: `1 host`, `8 hosts`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def counter(step: ProgressLine, total: int) -> Callable[[object], None]:
    """Return a function to call once for each of `total` completed items."""
    calls = [0]

    def count(_: object) -> None:
        calls[0] += 1
        step.detail = f"{calls[0]} of {total}"

    return count


def byte_counter(step: ProgressLine, total: int) -> Callable[[int], None]:
    """Return a function to call, from any thread, with the number of bytes of each part."""
    done, lock = [0], threading.Lock()

    def count(more: int) -> None:
        with lock:
            done[0] += more
        step.detail = f"{size(min(done[0], total))} of {size(total)}"

    return count
