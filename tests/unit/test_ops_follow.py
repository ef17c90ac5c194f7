"""Check a follower without threads, and its merge of several logs: by time, without delay, a bounded buffer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import FakeStream, put_job
from shared_fakes import Clock
from waiting import until

from jobs.bucket import BucketError
from jobs.chunks import SLOW_PATTERN, LogFilter, Position
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, Plan, ReplicaRecord, UnsavedFiles
from jobs.states import JobState, ReplicaState
from ops.errors import HostError, OpsError
from ops.logs import follow
from ops.logs.follow import TICK, Follower, Merge, Note, ReplicaRecords, WaitReason
from ops.logs.lines import LogLine, follow_command


@dataclass(frozen=True)
class TimedLine:
    """A log line with a time."""

    time: str
    log: str = ""
    number: int = 0


def line_at(time: int, log: str = "", number: int = 0) -> TimedLine:
    return TimedLine(f"{time:09}", log, number)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), max_size=60))
def test_no_line_is_held_longer_than_the_window(events: list[tuple[int, int]]) -> None:
    """Let each event be a line of its own log: written at a time in ms, it arrives some ms later."""
    clock = Clock(0.0)
    follow.time, original = clock, follow.time  # type: ignore[assignment]
    try:
        lines = Merge([str(n) for n in range(len(events))], window=0.08)
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
        lines = Merge([str(n) for n in range(len(times))], window=0.0)

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
    lines = Merge(["a", "b"], window=3600.0)
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
    lines = Merge(["a"], window=0.0)
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


def test_a_reader_waits_for_lines_and_events() -> None:
    lines = Merge(["a", "b"], window=0.02)
    threading.Timer(0.05, lines.put, ("a", [(1, line_at(1))])).start()
    assert lines.take(20.0) == [line_at(1)]
    threading.Timer(0.05, lines.put_event, ("x",)).start()
    assert lines.take(20.0) == ["x"]
    assert lines.take(0.01) == []


def test_a_reader_waits_no_longer_than_the_oldest_line_may(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Clock(10.0), list[float]()
    monkeypatch.setattr(follow, "time", clock)
    lines = Merge(["a", "b"], window=3.0)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(lines._condition, "wait", wait)
    lines.put("a", [(1, line_at(5)), (1, line_at(6))])
    clock.now = 11.0
    lines.put("a", [(1, line_at(7))])
    assert (lines.take(1.5), waits, clock.now) == ([], [1.5], 12.5)
    waits.clear()
    assert (lines.take(5.0), waits, clock.now) == ([line_at(5), line_at(6)], [0.5], 13.0)
    waits.clear()
    assert (lines.take(5.0), waits, clock.now) == ([line_at(7)], [1.0], 14.0)
    waits.clear()
    assert (lines.take(5.0), waits) == ([], [5.0])
    lines.end("a")
    waits.clear()
    lines.put("b", [(1, line_at(1))])
    assert (lines.take(5.0), waits) == ([line_at(1)], [])
    lines.end("b")
    assert (lines.take(5.0), waits, lines.ended) == ([], [], True), "no line can come"
    lines.put_event("x")
    assert not lines.ended


def test_each_change_of_a_merge_wakes_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_BYTES", 10)
    lines = Merge(["a"], window=0.0)
    wakes: list[str] = []
    monkeypatch.setattr(lines._condition, "notify_all", lambda: wakes.append("x"))
    for call, count in (
        (lambda: lines.put("a", []), 0),
        (lambda: lines.put("a", [(4, line_at(1)), (5, line_at(2))]), 1),
        (lambda: lines.take(0), 0),
        (lambda: lines.put_event("x"), 1),
        (lambda: lines.end("a"), 1),
        (lines.close, 1),
        (lambda: lines.put("a", [(1, line_at(3))]), 0),
    ):
        wakes.clear()
        call()
        assert len(wakes) == count
    assert lines.take(0) == ["x"], "nothing is added to a closed one"


def test_a_full_buffer_wakes_its_writer_when_a_line_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_BYTES", 10)
    lines = Merge(["a"], window=0.0)
    waits: list[int] = []
    wakes: list[str] = []

    def wait() -> None:
        waits.append(lines._sizes[0])
        wakes.clear()
        lines._take_lines(0.0)

    monkeypatch.setattr(lines._condition, "wait", wait)
    monkeypatch.setattr(lines._condition, "notify_all", lambda: wakes.append("x"))
    lines.put("a", [(4, line_at(1)), (5, line_at(2))])
    assert waits == [], "it is not full"
    lines.put("a", [(1, line_at(3))])
    assert (waits, lines._sizes, len(wakes)) == ([10], [0], 1)
    monkeypatch.setattr(follow, "_BATCH_LINES", 2)
    lines.put("a", [(1, line_at(n)) for n in range(4, 9)])
    assert [lines.take(0) for _ in range(3)] == [[line_at(n) for n in part] for part in ((4, 5), (6, 7), (8,))]


class FakeEvent:
    """An event whose wait ends at once: it records the seconds, lets the clock pass, and takes the next step."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._set, self._looks = clock, False, 0
        self.waits: list[float | None] = []
        self.steps: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        self._looks += 1
        assert self._looks < 1000, "a loop without end"
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, seconds: float | None = None) -> None:
        self.waits.append(seconds)
        self._clock.now += seconds or 0.0
        if self.steps:
            self.steps.pop(0)()


STARTED = "2026-01-31T12:00:00.000Z"
JOB = JobRecord("job01", JobState.RUNNING, hosts=["master-0", "worker-0"], startTime=STARTED)
RUNNING, EXITED = (ReplicaRecord("master-0", state) for state in (ReplicaState.RUNNING, ReplicaState.EXITED))
LOOKING = replace(EXITED, startTime=STARTED)


class World:
    """A follower without threads, whose clock and events are fakes, and whose hosts print given streams."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(100.0)
        monkeypatch.setattr(follow, "time", self.clock)
        self.bucket = FolderBucket(folder)
        self.ledger = Ledger(self.bucket)
        self.streams: list[FakeStream | HostError] = []
        self.commands: list[tuple[str, str]] = []
        put_job(self.ledger, JOB)

    def stream(self, name: str, command: str) -> FakeStream:
        self.commands.append((name, command))
        stream = self.streams.pop(0)
        if isinstance(stream, HostError):
            raise stream
        return stream

    def follower(self, record: JobRecord = JOB, for_screen: bool = False, lines: int | None = None, *names: str) -> Any:
        follower: Any = Follower(self, self.ledger, record, names or ["master-0"], LogFilter(lines), for_screen)  # type: ignore[arg-type]
        for name in ("_ending", "_closed", "_poll_now", "_placed"):
            event = FakeEvent(self.clock)
            event._set = getattr(follower, name).is_set()
            setattr(follower, name, event)
        return follower

    def write(self, *records: ReplicaRecord) -> None:
        for record in records:
            self.ledger.write_replica("job01", record, self.ledger.replica_version("job01", record.name))

    def put(self, state: JobState) -> JobRecord:
        record = replace(JOB, state=state)
        put_job(self.ledger, record)
        return record


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_the_record_is_polled_until_the_job_has_ended(world: World) -> None:
    follower = world.follower()
    world.write(EXITED)
    records: list[JobRecord] = []
    follower._poll_now.steps = [
        lambda: records.append(world.put(JobState.CANCELLING)),
        lambda: world.write(LOOKING),
        lambda: records.append(world.put(JobState.CANCELLED)),
        lambda: None,
        lambda: world.write(replace(LOOKING, unsaved=UnsavedFiles())),
    ]
    follower._watch()
    assert follower._poll_now.waits == [1.0, 1.0, 1.0, 0.25, 0.25]
    assert follower._merge.take(0) == [JOB, *records, records[-1]]
    assert (follower._ending.is_set(), follower._placed.is_set(), follower._poll_now.is_set()) == (True, True, True)
    assert follower._active_at == 103.0, "the last change of state"


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.FAILED])
def test_following_ends_once_the_job_is_deleted(world: World, monkeypatch: pytest.MonkeyPatch, state: JobState) -> None:
    follower = world.follower()
    world.write(LOOKING)
    record = world.put(state)
    follower._poll_now.steps = [lambda: world.bucket.remove("jobs/job01", last="jobs/job01/job.json")]
    follower._watch()
    assert (len(follower._poll_now.waits), follower._ending.is_set()) == (1, True)
    monkeypatch.setattr(follow.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    follower._merge.end("master-0")
    events = follower.events()
    assert next(events) == record
    gone = r"^job job01 has no record any more: fab jobs lists the others$"
    with pytest.raises(OpsError, match=gone) if state is JobState.RUNNING else contextlib.nullcontext():
        assert list(events) == []


def test_a_screen_gets_the_replicas_with_each_poll(world: World) -> None:
    follower = world.follower(for_screen=True)
    world.write(EXITED)
    follower._poll_now.steps = [lambda: world.write(RUNNING) or follower._poll_now.set(), follower._ending.set]
    follower._watch()
    assert not follower._poll_now.is_set(), "each poll needs another reason"
    assert follower._merge.take(0) == [ReplicaRecords({"master-0": EXITED}), JOB, ReplicaRecords({"master-0": RUNNING})]


def test_a_bucket_that_fails_is_reported_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise BucketError("no answer")

    follower, read = world.follower(), world.ledger.store.read
    monkeypatch.setattr(world.ledger.store, "read", fail)
    follower._poll_now.steps = [
        lambda: None,
        lambda: monkeypatch.setattr(world.ledger.store, "read", read),
        lambda: None,
        follower._ending.set,
    ]
    follower._watch()
    assert follower._merge.take(0) == [
        Note("the bucket does not answer (no answer); the job continues, trying again"),
        Note("the bucket answers again"),
        JOB,
    ]


def test_the_hosts_of_a_queued_job_are_awaited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["master-0"]
    queued = JobRecord("job02", candidates={"master-0": hosts})
    put_job(world.ledger, queued)
    ahead = [QueueEntry(f"job0{n}", hosts, has_hosts=n == 0) for n in range(2)]
    world.ledger.change_queue(lambda _: Queue([*ahead, QueueEntry("job02", hosts)]))
    follower, runs = world.follower(queued), list[float]()
    monkeypatch.setattr(follower._queue_monitor, "run_if_due", lambda: runs.append(world.clock.now))
    placed: list[bool] = []
    running = replace(queued, state=JobState.RUNNING, hosts=hosts)
    follower._poll_now.steps = [
        lambda: world.ledger.change_queue(lambda queue: queue.without(ahead[0])),
        lambda: None,
        lambda: world.ledger.change_queue(lambda queue: queue.without(ahead[1])),
        lambda: placed.append(follower._placed.is_set()) or put_job(world.ledger, running),
        follower._ending.set,
    ]
    follower._watch()
    assert follower._merge.take(0) == [
        Note("job02 is QUEUED behind job00, job01"),
        queued,
        Note("job02 is QUEUED behind job01"),
        running,
    ]
    assert (runs, placed, follower._placed.is_set()) == ([100.0, 101.0, 102.0, 103.0], [False], True)
    assert follower._placement == {"master-0": "master-0"}


@pytest.mark.parametrize("lost", [True, False])
def test_a_running_job_whose_hosts_are_all_gone_is_ended(world: World, lost: bool) -> None:
    """No other process may be left that does. A job with a leader costs no further request."""
    world.ledger.create_plan(Plan("job01", ["master-0"], "task", [], {}, lostAfterSeconds=20.0, maxWaitTime=10.0))
    world.ledger.change_queue(lambda _: Queue([QueueEntry("job01", ["master-0"], has_hosts=True)]))
    follower, polls = world.follower(), list[float]()
    monitor = follower._queue_monitor
    run_once, seconds = monitor.run_once, 100

    def renew() -> None:
        record = world.ledger.job("job01").record
        put_job(world.ledger, record if lost else replace(record, lease=record.lease.renewed()))

    monitor.run_once = lambda: polls.append(world.clock.now) or run_once()
    follower._poll_now.steps = [renew] * seconds + [follower._ending.set]
    follower._watch()
    assert world.ledger.job("job01").record.state == (JobState.FAILED if lost else JobState.RUNNING)
    assert bool(polls) == lost


def test_a_log_is_read_once_its_replica_has_a_host(world: World) -> None:
    follower = world.follower(JobRecord("job01", candidates={"master-0": ["worker-0"]}))
    assert (follower._placed.is_set(), world.follower()._placed.is_set()) == (False, True)
    follower._end()
    assert follower._placed.is_set(), "at the end, no thread waits any longer"
    follower._placed.steps = [lambda: setattr(follower, "_placement", {"master-0": "worker-0"})]
    world.streams = [FakeStream("worker-0")]
    follower._tail("master-0")
    assert world.commands == [("worker-0", follow_command("job01", LogFilter()))]
    assert follower._merge.take(0) == []


def test_a_job_that_ended_in_the_queue_has_no_log(world: World) -> None:
    follower = world.follower(JobRecord("job01", candidates={"master-0": ["master-0"]}))
    follower._end()
    follower._guard(follower._tail, "master-0")
    assert (follower._merge.take(0), follower._merge.ended, world.commands) == ([], True, [])


@pytest.mark.parametrize(
    ("replicas", "seconds", "complete"),
    [
        ([EXITED], 0.0, True),
        ([replace(LOOKING, unsaved=UnsavedFiles())], 0.0, True),
        ([RUNNING], 20.0, False),
        ([RUNNING], 20.1, True),
        ([replace(LOOKING, name="worker-0"), RUNNING], 20.1, False),
        ([LOOKING], 50.0, False),
        ([LOOKING], 50.1, True),
        (None, 20.0, False),
        (None, 20.1, True),
    ],
)
def test_the_end_is_awaited_for_a_limited_time(
    world: World, replicas: list[ReplicaRecord] | None, seconds: float, complete: bool
) -> None:
    follower = world.follower()
    if replicas is not None:
        follower._records, follower._records_read_at = {replica.name: replica for replica in replicas}, 100.0
    assert follower._is_complete(seconds) is complete


def test_an_unresponsive_replica_is_not_awaited(world: World) -> None:
    follower = world.follower()
    follower._records_read_at = 100.0
    answers = []
    for beat in range(14):
        beating = replace(RUNNING, name="worker-0", heartbeatSeq=min(beat, 2))
        follower._records = {"master-0": RUNNING, "worker-0": beating}
        answers.append(follower._is_complete(1.0))
        world.clock.now += 5.0
    assert answers == [False] * 14
    assert follower._is_complete(1.0), "both have been silent for a minute"


@pytest.mark.parametrize(
    ("for_screen", "final", "read_at", "active_at", "wanted"),
    [
        (False, False, 90.0, 97.0, True),
        (False, False, 97.0, 90.0, True),
        (False, False, 90.0, 97.1, False),
        (False, False, 97.1, 90.0, False),
        (True, False, 100.0, 100.0, True),
        (False, True, 100.0, 100.0, True),
    ],
)
def test_replicas_are_read_for_a_screen_at_the_end_and_after_a_pause(
    world: World, for_screen: bool, final: bool, read_at: float, active_at: float, wanted: bool
) -> None:
    follower = world.follower(for_screen=for_screen)
    follower._records_read_at, follower._active_at = read_at, active_at
    assert follower._needs_replicas(replace(JOB, state=JobState.FAILED if final else JobState.RUNNING)) is wanted


def test_a_quiet_job_gets_its_reason_once(world: World) -> None:
    follower = world.follower(JOB, False, None, "master-0", "worker-0")
    follower._records, follower._records_read_at = {"master-0": replace(RUNNING, state=ReplicaState.PREPARING)}, 0.0
    seen = []

    def look(at: float, **changes: object) -> None:
        world.clock.now = at
        for name, value in changes.items():
            setattr(follower, name, value)
        seen.append(follower._wait_reasons())

    start = "nothing was printed for 60 s: master-0 is PREPARING; worker-0 has not reported"
    ended = {"_job": replace(JOB, state=JobState.FAILED), "_records": {"master-0": EXITED, "worker-0": EXITED}}
    look(159.9)
    look(160.0)
    look(219.9)
    look(220.0)  # the same reason
    look(222.9, **ended, _active_at=220.0)
    look(223.0)
    follower._ending.set()
    look(223.1)
    look(223.2)
    look(223.3, _active_at=223.3)
    look(300.0, _job=JOB, _records={}, _has_steps=True)
    assert seen == [
        [],
        [Note(start)],
        [],
        [],
        [],
        [],
        [WaitReason("collecting the logs of master-0, worker-0")],
        [],
        [WaitReason("")],
        [],
    ]


def printed_line(n: int) -> tuple[LogLine, bytes]:
    line = LogLine(f"2026-01-31T12:00:0{n}.000Z", "INFO", "master-0", str(n))
    return line, f"7 {n + 1} {line.to_json()}\n".encode()


def test_a_log_is_read_again_from_the_position_that_was_reached(world: World) -> None:
    follower = world.follower()
    (first, first_bytes), (second, second_bytes) = printed_line(0), printed_line(1)
    world.streams = [
        HostError("master-0", "is off"),
        FakeStream("master-0", first_bytes[:9], first_bytes[9:]),
        FakeStream("master-0", second_bytes, HostError("master-0", "broke off")),
        FakeStream("master-0", exit_code=1, stderr="no space"),
        last := FakeStream("master-0"),
    ]
    streams = list(world.streams)
    follower._ending.steps = [lambda: None, lambda: None, lambda: None, follower._ending.set]
    world.clock.now = 200.0
    follower._guard(follower._tail, "master-0")
    positions = [None, None, Position(7, 1), Position(7, 2), Position(7, 2)]
    assert world.commands == [("master-0", follow_command("job01", LogFilter(), position)) for position in positions]
    assert follower._merge.take(0) == [Note("master-0 is off; trying again"), first, second]
    assert (follower._ending.waits, follower._closed.waits) == ([2.0] * 4, [])
    assert [isinstance(stream, HostError) or stream.closed for stream in streams] == [True] * 5
    assert (last.finished, follower._merge.ended, follower._reading) == (True, True, set())
    assert follower._active_at == 204.0


@pytest.mark.parametrize(("known", "tries", "waits"), [(False, 1, []), (True, 3, [2.0, 2.0])])
def test_last_lines_are_requested_a_few_times(world: World, known: bool, tries: int, waits: list[float]) -> None:
    follower = world.follower()
    line, printed = printed_line(0)
    off = HostError("master-0", "is off")
    world.streams = [FakeStream("master-0", printed, off) if known else off, *[off] * 5]
    follower._ending.steps = [follower._ending.set]
    follower._tail("master-0")
    again = "fab logs master-0 --job job01 tries again"
    assert follower._merge.take(0) == [
        Note("master-0 is off; trying again"),
        Note(f"master-0: not all of its lines were shown; {again}"),
        *[line] * known,
    ]
    assert (len(world.commands), follower._ending.waits, follower._closed.waits) == (1 + tries, [2.0], waits)


def test_a_closed_follower_requests_nothing_more(world: World) -> None:
    follower = world.follower()
    world.streams = [FakeStream("master-0", printed_line(0)[1], HostError("master-0", "broke off"))]
    follower._ending.steps = [lambda: (follower._closed.set(), follower._ending.set())]
    follower._tail("master-0")
    assert (len(world.commands), follower._merge.take(0)) == (1, [Note("master-0 broke off; trying again"), printed_line(0)[0]])


def test_an_error_of_a_thread_is_a_note(world: World) -> None:
    follower = world.follower()
    world.streams = [FakeStream("master-0", exit_code=SLOW_PATTERN)]
    follower._log_filter = LogFilter(pattern="(a+)+b")
    follower._guard(follower._tail, "master-0")

    def fail() -> None:
        raise AssertionError

    follower._guard(fail)
    note = "--grep '(a+)+b' takes longer than 1 s on one line: avoid nested repetitions such as (a+)+"
    name = threading.current_thread().name
    assert follower._merge.take(0) == [Note(f"{name}: {note}"), Note(f"{name}: AssertionError")]
    assert follower._merge.ended


@pytest.mark.parametrize(
    ("message", "has_steps", "polls"),
    [("step 5", True, False), ("job SUCCEEDED", False, True), ("a job SUCCEEDED", False, False)],
)
def test_lines_about_steps_and_the_job_are_noticed(world: World, message: str, has_steps: bool, polls: bool) -> None:
    follower = world.follower()
    texts = [LogLine("", "INFO", "master-0", text).to_json() for text in ("hello", message)]
    stream = FakeStream("master-0", b"7 0 \n", "".join(f"7 {n} {text}\n" for n, text in enumerate(texts)).encode(), b"7 9 \n")
    world.streams = [stream]
    world.clock.now = 150.0
    follower._ending.set()
    assert list(follower._read("master-0", None)) == [Position(7, 0), Position(7, 1), Position(7, 9)]
    assert (follower._has_steps, follower._poll_now.is_set(), follower._active_at) == (has_steps, polls, 150.0)


@pytest.mark.parametrize(
    ("names", "lines", "window", "later"),
    [(["master-0"], None, 0.0, 0.0), (["master-0", "worker-0"], None, 0.5, 0.08), (["master-0", "worker-0"], 0, 0.08, 0.08)],
)
def test_the_first_lines_of_several_logs_are_awaited_longer(
    world: World, monkeypatch: pytest.MonkeyPatch, names: list[str], lines: int | None, window: float, later: float
) -> None:
    monkeypatch.setattr(follow.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    follower = world.follower(JOB, True, lines, *names)
    follower._streams["master-0"] = stream = FakeStream("master-0")
    windows = []

    def take(seconds: float) -> list[object]:
        windows.append(follower._merge.window)
        world.clock.now += seconds
        return []

    monkeypatch.setattr(follower._merge, "take", take)
    batches = follower.batches()
    assert [next(batches) for _ in range(6)] == [[TICK]] * 6
    assert windows == [window] * 5 + [later]
    assert not follower._closed.is_set()
    batches.close()
    assert (follower._closed.is_set(), follower._merge._closed, follower._ending.is_set(), stream.finished) == (True,) * 4


def test_only_a_screen_gets_ticks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    follower: Any = Follower(world, world.ledger, JOB, ["master-0"], LogFilter())  # type: ignore[arg-type]
    batches = iter([[], [Note("x")]])

    def take(_: float) -> list[object]:
        batch = next(batches)
        if batch:
            follower._merge.end("master-0")
        return batch

    monkeypatch.setattr(follower._merge, "take", take)
    assert list(follower.events()) == [Note("x")]
