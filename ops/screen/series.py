"""Numbers over time in bounded memory, and their drawing: a series that keeps its shape, and a rate with the time left."""

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
_MIN_DISTANCE_SECONDS = 0.2
_SAMPLE_SECONDS = 1.0


class Series:
    """The shape of any number of values, as at most CAPACITY means: when full, each pair of neighbours becomes its mean."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._values_per_mean = capacity, 1
        self._means: list[float] = []
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Add a value; ignore one that is not finite."""
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) < self._values_per_mean:
            return
        self._means.append(_mean(self._pending))
        self._pending.clear()
        if len(self._means) >= self._capacity:
            self._means = [_mean(self._means[i : i + 2]) for i in range(0, len(self._means), 2)]
            self._values_per_mean *= 2

    @property
    def values(self) -> list[float]:
        """The means, the newest last, which may be of fewer values than the others."""
        return [*self._means, _mean(self._pending)] if self._pending else list(self._means)


class CountRate:
    """The rate at which a count grows, by its latest points in time; all times are in seconds by one clock."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()  # bounded: within the window, and not too close
        self._first: tuple[float, int] | None = None
        self._last_sample = -math.inf
        self._last_arrival = -math.inf
        self.rates = Series()
        self.count: int | None = None

    def add_point(self, moment: float, count: int, now: float) -> None:
        """Record the count at a moment; `now` is when it arrives. A count that is not higher is late, and ignored."""
        if self.count is not None and count <= self.count:
            return
        self.count, self._last_arrival = count, now
        if self._first is None:
            self._first = (moment, count)
        if self._points and moment - self._points[-1][0] < _MIN_DISTANCE_SECONDS:
            return
        self._points.append((moment, count))
        while len(self._points) > 2 and moment - self._points[1][0] > WINDOW_SECONDS:
            self._points.popleft()
        if (rate := self._window_rate()) is not None and moment - self._last_sample >= _SAMPLE_SECONDS:
            self._last_sample = moment
            self.rates.add(rate)

    def rate(self, now: float) -> float | None:
        """Return the recent counts per second; None before two points, and if no point arrived for a while."""
        return None if now - self._last_arrival > WINDOW_SECONDS * 2 else self._window_rate()

    @property
    def mean(self) -> float | None:
        """The mean counts per second since the first point."""
        return _rate(self._first, self._points[-1]) if self._first and self._points else None

    def seconds_to(self, maximum: int | None, now: float) -> float | None:
        """Return the seconds until the maximum at the recent rate, or None if unknown."""
        rate = self.rate(now)
        if not rate or maximum is None or self.count is None:
            return None
        return max(maximum - self.count, 0) / rate

    def _window_rate(self) -> float | None:
        return _rate(self._points[0], self._points[-1]) if self._points else None


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sparkline(values: Sequence[float], width: int = _WIDTH, least: float | None = None) -> str:
    """Draw the values as at most `width` blocks.

    The lowest block stands for `least`, or the lowest mean; the full one for the highest mean. If that is no higher, all blocks
    are half ones.
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


def progress_line(unit: str, rate: CountRate, maximum: int | None, final: bool, now: float) -> Text:
    """Return a line with the count; if there is a maximum, also the percentage and, unless `final`, the time left."""
    line = f"{unit:<8} {rate.count}"
    if maximum and rate.count is not None:
        line += f" of {maximum}  {bar(rate.count / maximum)} {100 * rate.count // maximum}%"
    if not final and (seconds := rate.seconds_to(maximum, now)):
        line += f"  {terminal.duration(seconds)} to go"
    return Text(line)
