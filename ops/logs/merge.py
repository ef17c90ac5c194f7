"""Merges several logs by time as they arrive; the waiting lines and the delay are bounded."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

WINDOW_SECONDS = 0.08
MOST = 1 << 19
"""Bytes of one log that wait at most."""
_AT_ONCE = 4096


class Timed(Protocol):
    """A line; times are compared as texts."""

    @property
    def time(self) -> str: ...


L = TypeVar("L", bound=Timed)
E = TypeVar("E")


class Merge(Generic[L, E]):
    """Takes lines from a thread a log, and gives them to one reader.

    A line waits for earlier ones of other logs, `window` seconds at most, and not at all where each log that goes on has one
    here already; what comes later still is given when it comes, and lines of one log stay in their order. A line costs the same
    however many wait. Who puts more of a log than MOST waits until the reader has taken some of it; so, over its connection,
    does the host. Anything else that is told goes by at once.
    """

    def __init__(self, names: Iterable[str], window: float = WINDOW_SECONDS) -> None:
        self.window = window
        names = list(names)
        self._index = {name: index for index, name in enumerate(names)}
        self._logs: list[deque[tuple[float, int, L]]] = [deque() for _ in names]
        self._sizes = [0] * len(names)
        self._open = set(range(len(names)))
        self._silent = set(self._open)  # of those that are open, those of which nothing waits
        self._heads: list[tuple[str, int]] = []
        self._told: deque[E] = deque()
        self._closed = False
        self._condition = threading.Condition()

    def put(self, name: str, lines: Sequence[tuple[int, L]]) -> None:
        """Add lines of a log, each with its size in bytes; block until there is room for more, or it closes."""
        index = self._index[name]
        log = self._logs[index]
        with self._condition:
            if not lines or self._closed:
                return
            now = time.monotonic()
            if not log:
                heapq.heappush(self._heads, (lines[0][1].time, index))
                self._silent.discard(index)
            log.extend((now, size, line) for size, line in lines)
            self._sizes[index] += sum(size for size, _ in lines)
            self._condition.notify_all()
            while self._sizes[index] >= MOST and not self._closed:
                self._condition.wait()

    def tell(self, event: E) -> None:
        """Add an event that is no line."""
        with self._condition:
            self._told.append(event)
            self._condition.notify_all()

    def end(self, name: str) -> None:
        """Mark the end of a log."""
        with self._condition:
            self._open.discard(self._index[name])
            self._silent.discard(self._index[name])
            self._condition.notify_all()

    def close(self) -> None:
        """Close the merge, and release all waiting threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def over(self) -> bool:
        """True once every log has ended and all was taken."""
        with self._condition:
            return not self._open and not self._heads and not self._told

    def take(self, seconds: float) -> list[L | E]:
        """Return the due lines in order, after a wait of at most `seconds`."""
        until = time.monotonic() + seconds
        with self._condition:
            while True:
                now = time.monotonic()
                events: list[L | E] = [*self._told]
                self._told.clear()
                events += self._due(now)
                if events or now >= until or (not self._open and not self._heads):
                    return events
                self._condition.wait(min(until, self._oldest() + self.window) - now if self._heads else until - now)

    def _due(self, now: float) -> list[L]:
        lines: list[L] = []
        oldest: float | None = None
        full = False
        while self._heads and len(lines) < _AT_ONCE:
            if self._silent:
                oldest = self._oldest() if oldest is None else oldest
                if now - oldest < self.window:
                    break
            _, index = heapq.heappop(self._heads)
            log = self._logs[index]
            came, size, line = log.popleft()
            lines.append(line)
            full = full or self._sizes[index] >= MOST
            self._sizes[index] -= size
            if came == oldest:
                oldest = None
            if log:
                heapq.heappush(self._heads, (log[0][2].time, index))
            elif index in self._open:
                self._silent.add(index)
        if full:
            self._condition.notify_all()
        return lines

    def _oldest(self) -> float:
        """Return when the longest waiting line arrived, which is the first of its log."""
        return min(self._logs[index][0][0] for _, index in self._heads)
