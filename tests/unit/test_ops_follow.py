"""Several logs into one: by time, none delayed for longer than a moment, and within a bounded buffer."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicahosts import until

from ops.logs import follow
from ops.logs.follow import Merge


@dataclass(frozen=True)
class At:
    """A line."""

    time: str
    log: str = ""
    number: int = 0


def at(time: int, log: str = "", number: int = 0) -> At:
    return At(f"{time:09}", log, number)


class Fake:
    """A clock for `follow`, and nothing to wait for."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), max_size=60))
def test_following_holds_back_no_line_for_longer_than_the_window(events: list[tuple[int, int]]) -> None:
    """Each event is a line of a log of its own, written at some time in ms, that arrives some ms later."""
    clock = Fake()
    follow.time, before = clock, follow.time  # type: ignore[assignment]
    try:
        lines: Merge[At, None] = Merge([str(n) for n in range(len(events))], window=0.08)
        arrivals = sorted((written + delay, n, written) for n, (written, delay) in enumerate(events))
        shown: list[tuple[float, At]] = []
        for moment, n, written in [*arrivals, (1000, -1, 0)]:
            while clock.now * 1000 < moment:
                shown += [(clock.now * 1000, one) for one in lines.take(0) if one]
                clock.now = round(clock.now + 0.001, 3)
            if n >= 0:
                lines.put(str(n), [(1, at(written, str(n)))])
    finally:
        follow.time = before
    arrived = {str(n): moment for moment, n, _ in arrivals}
    assert sorted(line.log for _, line in shown) == sorted(arrived)
    assert all(moment - arrived[line.log] <= 81 for moment, line in shown)
    # No line was later than the window, so the order is that of time.
    assert [line.time for _, line in shown] == sorted(line.time for _, line in shown)


logs = st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=4)


@given(logs, st.integers(1, 7), st.integers(1, 40))
def test_every_line_comes_once_in_the_order_of_its_log(times: list[list[int]], step: int, most: int) -> None:
    """Whatever is brought in whatever pieces, past a reader that takes as it likes."""
    follow.MAX_BYTES, before = most, follow.MAX_BYTES
    try:
        lines: Merge[At, None] = Merge([str(n) for n in range(len(times))], window=0.0)

        def bring(name: str, log: list[At]) -> None:
            for first in range(0, len(log), step):
                lines.put(name, [(10, line) for line in log[first : first + step]])
            lines.end(name)

        written = [[at(time, str(n), number) for number, time in enumerate(log)] for n, log in enumerate(times)]
        threads = [threading.Thread(target=bring, args=(str(n), log), daemon=True) for n, log in enumerate(written)]
        for thread in threads:
            thread.start()
        shown: list[At] = []
        while not lines.ended:
            shown += [line for line in lines.take(5.0) if line]
    finally:
        follow.MAX_BYTES = before
    for n, log in enumerate(written):
        assert [line for line in shown if line.log == str(n)] == log


def test_where_each_log_has_a_line_nobody_waits_for_a_moment() -> None:
    lines: Merge[At, None] = Merge(["a", "b"], window=3600.0)
    lines.put("a", [(1, at(1)), (1, at(4))])
    assert lines.take(0) == []
    lines.put("b", [(1, at(2)), (1, at(3))])
    assert lines.take(0) == [at(1), at(2), at(3)], "of b there may be one before the last of a"
    lines.end("b")
    assert lines.take(0) == [at(4)]
    assert not lines.ended
    lines.end("a")
    assert lines.ended


def test_who_brings_more_than_fits_waits_until_some_of_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_BYTES", 100)
    lines: Merge[At, str] = Merge(["a"], window=0.0)
    brought = []

    def bring() -> None:
        for n in range(20):
            lines.put("a", [(50, at(n))])
            brought.append(n)

    threading.Thread(target=bring, daemon=True).start()
    until(lambda: len(brought) == 1)
    time.sleep(0.05)
    assert len(brought) == 1
    lines.put_event("something else")
    assert lines.take(1.0)[0] == "something else"
    until(lambda: len(brought) >= 2)
    lines.close()
    until(lambda: len(brought) == 20)


def test_a_reader_waits_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Merge[At, str] = Merge(["a", "b"], window=0.02)
    threading.Timer(0.05, lines.put, ("a", [(1, at(1))])).start()
    assert lines.take(20.0) == [at(1)]
    threading.Timer(0.05, lines.put_event, ("x",)).start()
    assert lines.take(20.0) == ["x"]
    assert lines.take(0.01) == []
