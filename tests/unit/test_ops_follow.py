"""Check the merge of several logs: by time, each line delayed for a moment at most, a bounded buffer."""

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
class TimedLine:
    """A log line with a time."""

    time: str
    log: str = ""
    number: int = 0


def line_at(time: int, log: str = "", number: int = 0) -> TimedLine:
    return TimedLine(f"{time:09}", log, number)


class FakeClock:
    """Replace the clock of `follow`; nothing waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), max_size=60))
def test_no_line_is_held_longer_than_the_window(events: list[tuple[int, int]]) -> None:
    """Let each event be a line of its own log: written at a time in ms, it arrives some ms later."""
    clock = FakeClock()
    follow.time, original = clock, follow.time  # type: ignore[assignment]
    try:
        lines: Merge[TimedLine, None] = Merge([str(n) for n in range(len(events))], window=0.08)
        arrivals = sorted((written + delay, n, written) for n, (written, delay) in enumerate(events))
        shown: list[tuple[float, TimedLine]] = []
        for moment, n, written in [*arrivals, (1000, -1, 0)]:
            while clock.now * 1000 < moment:
                shown += [(clock.now * 1000, line) for line in lines.take(0) if line]
                clock.now = round(clock.now + 0.001, 3)
            if n >= 0:
                lines.put(str(n), [(1, line_at(written, str(n)))])
    finally:
        follow.time = original
    arrived = {str(n): moment for moment, n, _ in arrivals}
    assert sorted(line.log for _, line in shown) == sorted(arrived)
    assert all(moment - arrived[line.log] <= 81 for moment, line in shown)
    # No line was later than the window, so the order is that of time.
    assert [line.time for _, line in shown] == sorted(line.time for _, line in shown)


logs = st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=4)


@given(logs, st.integers(1, 7), st.integers(1, 40))
def test_every_line_appears_once_in_its_logs_order(times: list[list[int]], step: int, max_bytes: int) -> None:
    """Write lines in pieces of any size, with a buffer of any size."""
    follow.MAX_BYTES, original = max_bytes, follow.MAX_BYTES
    try:
        lines: Merge[TimedLine, None] = Merge([str(n) for n in range(len(times))], window=0.0)

        def write_log(name: str, log: list[TimedLine]) -> None:
            for first in range(0, len(log), step):
                lines.put(name, [(10, line) for line in log[first : first + step]])
            lines.end(name)

        written = [[line_at(time, str(n), number) for number, time in enumerate(log)] for n, log in enumerate(times)]
        threads = [threading.Thread(target=write_log, args=(str(n), log), daemon=True) for n, log in enumerate(written)]
        for thread in threads:
            thread.start()
        shown: list[TimedLine] = []
        while not lines.ended:
            shown += [line for line in lines.take(5.0) if line]
    finally:
        follow.MAX_BYTES = original
    for n, log in enumerate(written):
        assert [line for line in shown if line.log == str(n)] == log


def test_lines_are_merged_at_once_if_each_log_has_one() -> None:
    lines: Merge[TimedLine, None] = Merge(["a", "b"], window=3600.0)
    lines.put("a", [(1, line_at(1)), (1, line_at(4))])
    assert lines.take(0) == []
    lines.put("b", [(1, line_at(2)), (1, line_at(3))])
    assert lines.take(0) == [line_at(1), line_at(2), line_at(3)], "b may still get a line before the last of a"
    lines.end("b")
    assert lines.take(0) == [line_at(4)]
    assert not lines.ended
    lines.end("a")
    assert lines.ended


def test_a_writer_waits_while_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_BYTES", 100)
    lines: Merge[TimedLine, str] = Merge(["a"], window=0.0)
    written = []

    def write_lines() -> None:
        for n in range(20):
            lines.put("a", [(50, line_at(n))])
            written.append(n)

    threading.Thread(target=write_lines, daemon=True).start()
    until(lambda: len(written) == 1)
    time.sleep(0.05)
    assert len(written) == 1
    lines.put_event("something else")
    assert lines.take(1.0)[0] == "something else"
    until(lambda: len(written) >= 2)
    lines.close()
    until(lambda: len(written) == 20)


def test_a_reader_waits_for_lines_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Merge[TimedLine, str] = Merge(["a", "b"], window=0.02)
    threading.Timer(0.05, lines.put, ("a", [(1, line_at(1))])).start()
    assert lines.take(20.0) == [line_at(1)]
    threading.Timer(0.05, lines.put_event, ("x",)).start()
    assert lines.take(20.0) == ["x"]
    assert lines.take(0.01) == []
