"""Draws pictures on a terminal: the one module that uses rich. No text is parsed as rich markup.

Columns are laid out here and passed as segments: rich's own tables and texts measure and wrap everything each time, which with
31 replicas took a fifth of a processor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from ops.screen.picture import Picture, Row, Span, Table

_GAP = "  "


class Screen:
    """The whole terminal during the block; its former content is restored after. For one thread."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    @property
    def lines(self) -> int:
        """The number of lines of the terminal now."""
        return self._console.size.height

    def show(self, picture: Picture) -> None:
        """Replace the picture on the screen."""
        self._live.update(Drawn(picture), refresh=True)


def leave(picture: Picture) -> None:
    """Print a picture to stay, long lines whole."""
    Console(file=sys.stdout, highlight=False, markup=False, emoji=False).print(Drawn(picture, cut=False), crop=False, end="")


class Drawn:
    """A picture as rich takes it, each line of it on one line of the terminal where it is to be cut."""

    def __init__(self, picture: Picture, cut: bool = True) -> None:
        self._picture, self._cut = picture, cut

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for spans in lines(self._picture):
            yield from _cut(spans, options.max_width) if self._cut else _segments(spans)
            yield Segment.line()


def lines(picture: Picture) -> Iterator[Sequence[Span]]:
    """Yield the lines of a picture, with the cells of tables padded."""
    for part in picture:
        if isinstance(part, Row):
            yield part.spans
        else:
            yield from _columns(part)


def _columns(table: Table) -> Iterator[Sequence[Span]]:
    rows = [tuple(Span(head, "bold") for head in table.heads), *table.rows]
    widths = [max(cell_len(row[column].text) for row in rows) for column in range(len(table.heads))]
    for row in rows:
        spans: list[Span] = []
        for head, span, width in zip(table.heads, row, widths, strict=True):
            pad = Span(" " * (width - cell_len(span.text)))
            spans += (pad, span) if head in table.right else (span, pad)
            spans.append(Span(_GAP))
        yield spans[:-1]


def _segments(spans: Sequence[Span]) -> Iterator[Segment]:
    return (Segment(span.text, Style.parse(span.style) if span.style else None) for span in spans if span.text)


def _cut(spans: Sequence[Span], width: int) -> Iterator[Segment]:
    """Cut the spans to one line of `width` columns, with … at the end if text is missing."""
    if sum(cell_len(span.text) for span in spans) <= width:
        yield from _segments(spans)
        return
    room = width - 1
    for span in spans:
        text = span.text if cell_len(span.text) <= room else set_cell_size(span.text, room)
        yield from _segments((Span(text, span.style),))
        room -= cell_len(text)
        if room <= 0:
            break
    yield Segment("…")
