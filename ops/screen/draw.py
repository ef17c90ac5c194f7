"""Draws pictures on a terminal: the one module that knows rich. Nothing of a text is taken for rich's markup."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from ops.screen.picture import Picture, Row, Span, Table


class Screen:
    """The whole terminal, for as long as the block takes; what was on it before comes back. For one thread."""

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
        """How many lines there are now."""
        return self._console.size.height

    def show(self, picture: Picture) -> None:
        """This in place of what is there."""
        self._live.update(Group(*map(_part, picture)), refresh=True)


def leave(picture: Picture) -> None:
    """Print a picture to stay, long lines whole."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    for part in picture:
        console.print(_part(part, cut=False), soft_wrap=isinstance(part, Row))


def _part(part: Row | Table, cut: bool = True) -> RenderableType:
    if isinstance(part, Row):
        return _text(part.spans, cut)
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in part.heads:
        justify = "right" if head in part.right else "left"
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # it is one of rich's words
    for row in part.rows:
        table.add_row(*(_text((cell,), True) for cell in row))
    return table


def _text(spans: tuple[Span, ...], cut: bool) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis") if cut else Text()
    for span in spans:
        text.append(span.text, style=span.style or None)
    return text
