"""Numbers over time in bounded memory, and how they are drawn: a series that keeps its shape, and a rate with an estimate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from ops import terminal

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
CAPACITY = 128
WINDOW_SECONDS = 20.0
_APART_SECONDS = 0.2
_SAMPLE_SECONDS = 1.0


class Series:
    """The shape of any number of values in CAPACITY at most: when full, each pair of neighbours is replaced by its mean."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._each = capacity, 1
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Add a value; ignore one that is not finite."""
        if not math.isfinite(value):
            return
        self._open.append(value)
        if len(self._open) < self._each:
            return
        self._means.append(_mean(self._open))
        self._open.clear()
        if len(self._means) >= self._capacity:
            self._means = [_mean(self._means[i : i + 2]) for i in range(0, len(self._means), 2)]
            self._each *= 2

    @property
    def values(self) -> list[float]:
        """The means, the newest last; the last one may be of fewer values than the others."""
        return [*self._means, _mean(self._open)] if self._open else list(self._means)


class CountRate:
    """The speed at which a count grows, by its marks; all times are seconds of one clock."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # bounded, as they are apart and within the window
        self._first: tuple[float, int] | None = None
        self._sampled = -math.inf
        self._heard = -math.inf
        self.rates = Series()
        self.count: int | None = None

    def mark(self, moment: float, count: int, now: float) -> None:
        """Record the count at a moment, received now; ignore one that is not higher, as it is late."""
        if self.count is not None and count <= self.count:
            return
        self.count, self._heard = count, now
        if self._first is None:
            self._first = (moment, count)
        if self._marks and moment - self._marks[-1][0] < _APART_SECONDS:
            return
        self._marks.append((moment, count))
        while len(self._marks) > 2 and moment - self._marks[1][0] > WINDOW_SECONDS:
            self._marks.popleft()
        if (rate := self._window()) is not None and moment - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = moment
            self.rates.add(rate)

    def rate(self, now: float) -> float | None:
        """Return recent counts per second; None before two marks, and if no mark arrived for a while."""
        return None if now - self._heard > WINDOW_SECONDS * 2 else self._window()

    @property
    def mean(self) -> float | None:
        """Counts a second since the first mark."""
        return _rate(self._first, self._marks[-1]) if self._first and self._marks else None

    def seconds_to(self, maximum: int | None, now: float) -> float | None:
        """Return the seconds until the maximum at the recent rate, or None if unknown."""
        rate = self.rate(now)
        if not rate or maximum is None or self.count is None:
            return None
        return max(maximum - self.count, 0) / rate

    def _window(self) -> float | None:
        return _rate(self._marks[0], self._marks[-1]) if self._marks else None


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sparkline(values: Sequence[float], width: int = _WIDTH, least: float | None = None) -> str:
    """Draw the values as at most `width` blocks.

    They reach from `least`, or the least value, to the greatest; all are halfway if the values are equal.
    """
    if not values or width < 1:
        return ""
    blocks = min(width, len(values))
    edges = [len(values) * i // blocks for i in range(blocks + 1)]
    means = [_mean(values[begin:end]) for begin, end in pairwise(edges)]
    low, high = min(means) if least is None else least, max(means)
    if high <= low:
        return _BLOCKS[3] * blocks
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in means)


def bar(share: float, width: int = _WIDTH) -> str:
    """Draw a share from 0 to 1 as a bar of `width` characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "━" * full + "╌" * (width - full)


def progress(unit: str, rate: CountRate, maximum: int | None, final: bool, now: float) -> Text:
    """Return a line with a count, and with a maximum its share and, unless `final`, the time that is left."""
    line = f"{unit:<8} {rate.count}"
    if maximum and rate.count is not None:
        line += f" of {maximum}  {bar(rate.count / maximum)} {100 * rate.count // maximum}%"
    if not final and (seconds := rate.seconds_to(maximum, now)):
        line += f"  {terminal.duration(seconds)} to go"
    return Text(line)
