"""Frames on a terminal, drawn by rich. A frame is a list of lines; no text in it is parsed as markup.

Each text is sanitized before it gets into a frame, as a trainer may print anything. `layout_columns` does not use rich's
tables, which take ten times as long with 31 replicas, as they measure and wrap each cell of each frame.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ops import terminal

Frame = list[Text]
_MAX_LENGTH = 1000
_HIDDEN = "·"
_GAP = "  "

SEVERITIES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


def sanitize(text: str) -> str:
    """Return untrusted text on one line without colours, cut to 1000 characters; replace invisible characters by a dot."""
    if text.isprintable():  # true of nearly every text
        return text[:_MAX_LENGTH]
    text = terminal.sanitize(text[: 4 * _MAX_LENGTH]).replace("\t", "    ")[:_MAX_LENGTH]
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    return character if character.isprintable() else " " if character.isspace() else _HIDDEN


def format_cell(value: object, style: str = "") -> Text:
    """Return a cell with sanitized text; `-` for an unknown value."""
    return Text("-", "dim") if value is None or value == "" else Text(sanitize(str(value)), style)


def state_text(text: str) -> Text:
    """Return a state in its colour."""
    return Text(sanitize(text), terminal.STATE_COLOURS.get(text, ""))


def layout_columns(heads: Sequence[str], rows: Iterable[Sequence[Text]], right: Collection[str] = ()) -> list[Text]:
    """Return the lines of a table; the columns whose heads are in `right` are aligned right."""
    cells = [[Text(head, "bold") for head in heads], *rows]
    widths = [max(row[index].cell_len for row in cells) for index in range(len(heads))]
    for row in cells:
        for head, text, width in zip(heads, row, widths, strict=True):
            text.align("right" if head in right else "left", width)
    lines = [Text(_GAP).join(row) for row in cells]
    for line in lines:
        line.rstrip()
    return lines


def cut(lines: list[Text], max_lines: int, what: str) -> list[Text]:
    """Cut a table to `max_lines` lines; a last line then counts the rest of `what`, such as `hosts`."""
    if len(lines) <= max_lines:
        return lines
    count = max(max_lines - 1, 1)
    return [*lines[:count], Text(f"and {len(lines) - count} more {what}", "dim")][: max(max_lines, 0)]


def join_lines(frame: Frame) -> Text:
    """Return a frame as one text, whose lines rich cuts at the width of the terminal."""
    return Text("\n", no_wrap=True, overflow="ellipsis", end="").join(frame)


def print_frame(frame: Frame) -> None:
    """Print a frame as normal output, without cutting long lines."""
    console = _console()
    with console.capture() as captured:
        console.print(*frame, sep="\n", soft_wrap=True)
    terminal.out(captured.get().removesuffix("\n"))


class Screen:
    """A context manager that uses the whole terminal, and restores its former content after. Not thread-safe."""

    def __init__(self) -> None:
        self._console = _console()
        options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._live = Live(console=self._console, screen=True, vertical_overflow="crop", **options)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    @property
    def lines(self) -> int:
        """The current number of lines of the terminal."""
        return self._console.size.height

    def show(self, frame: Frame) -> None:
        """Replace the frame on the screen."""
        self._live.update(join_lines(frame), refresh=True)


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
