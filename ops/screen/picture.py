"""A picture: what is to be seen, as plain data, with no terminal in it. `ops.screen.draw` draws one.

Every text is made harmless where it comes in, as a trainer may print anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ops import terminal

_LONGEST = 1000
_HIDDEN = "·"

STATES = {
    "SUCCEEDED": "green",
    "RUNNING": "blue",
    "FAILED": "red",
    "LOST": "red",
    "CANCELLED": "yellow",
    "CANCELLING": "yellow",
    "EXITED": "dim",
}
SEVERITIES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


def harmless(text: str) -> str:
    """Return the text on one line without colours, cut to LONGEST; replace invisible characters by a dot."""
    if text.isprintable():  # as nearly all are
        return text[:_LONGEST]
    text = terminal.harmless(text[: 4 * _LONGEST]).replace("\t", "    ")[:_LONGEST]
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    return character if character.isprintable() else " " if character.isspace() else _HIDDEN


@dataclass(frozen=True)
class Span:
    """A text in one style: colours and `bold`, `dim`; empty for none."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Row:
    """A line of spans, cut off where the terminal ends."""

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, *texts: str | Span) -> Row:
        """Return a line of plain texts and spans."""
        return cls(tuple(text if isinstance(text, Span) else Span(text) for text in texts))

    @property
    def text(self) -> str:
        """Its text without styles."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True)
class Table:
    """Columns under heads; those that are named in `right` end at the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Span, ...], ...]
    right: frozenset[str] = frozenset()


Picture = Sequence[Row | Table]


def cell(value: object, style: str = "") -> Span:
    """Return a cell with its text made harmless; `-` for an unknown value."""
    return Span("-", "dim") if value is None or value == "" else Span(harmless(str(value)), style)


def state(text: str) -> Span:
    """Return a state in its colour."""
    return Span(harmless(text), STATES.get(text, ""))


def bar(share: float, width: int) -> str:
    """Draw a share from 0 to 1 as a bar of `width` characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "━" * full + "╌" * (width - full)


def cut(table: Table, most: int, what: str) -> list[Row | Table]:
    """Cut a table to `most` lines, including its head and the line that counts the rest.

    Args:
        what: the rows' plural noun, such as `hosts`.
    """
    if 1 + len(table.rows) <= most:
        return [table]
    count = max(most - 2, 0)
    rest = Row.of(Span(f"and {len(table.rows) - count} more {what}", "dim"))
    both: list[Row | Table] = [replace(table, rows=table.rows[:count]), rest]
    return both[: max(most, 0)]


def height(picture: Picture) -> int:
    """Return the number of lines of a picture."""
    return sum(1 if isinstance(part, Row) else 1 + len(part.rows) for part in picture)
