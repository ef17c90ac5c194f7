"""Follow a job's logs, by one SSH channel per replica and merged by time, and its record, until the job has ended."""

from __future__ import annotations

import heapq
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from jobs.chunks import SLOW_PATTERN, LogFilter, Position
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger
from jobs.queue_monitor import QueueMonitor
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.ledger import current_user, find_job
from ops.cluster.remote import Fleet, Stream
from ops.errors import HostError, OpsError
from ops.logs import waits
from ops.logs.heuristics import parse_metrics
from ops.logs.lines import LogLine, follow_command, parse_pieces, slow_pattern_error

WINDOW_SECONDS = 0.08
"""The longest time that a line waits for earlier lines of other logs."""
MAX_BYTES = 512 * 1024
"""The most bytes of one log that wait in a `Merge`."""
_BATCH_LINES = 4096
_RETRY_SECONDS = 2.0
_BACKLOG_SECONDS = 1.0
_POLL_SECONDS, _LAST_POLL_SECONDS = 1.0, 0.25
"""Between two polls of the job's record while it runs, and once it has ended."""
# When the job has ended, the leader stops the other replicas; their last lines are shown, too.
_STOP_SECONDS = 20.0
# Then their hosts look for files that the job wrote outside JOB_DIR, before they delete its folders.
_UNSAVED_SECONDS = 50.0
# The number of tries to get a host's last lines after the job's end; one if the host never answered.
_LAST_TRIES = 3
_TICK_SECONDS = 0.25
# The leader's log line after a change of the job's record.
_STATE_LINE = re.compile(rf"job ({'|'.join(JobState)})\b")


class Merge:
    """Merges several logs by time as they arrive, each from its own thread, for one reader.

    A line waits at most `window` seconds for earlier ones of other logs, and not at all if each open log has a line waiting. A
    line that arrives later is passed on when it arrives; lines of one log keep their order. The cost of a line does not depend
    on how many wait. A thread that adds more than MAX_BYTES of a log blocks until the reader has taken some of it; so does its
    host, over the connection. Events other than lines do not wait.
    """

    def __init__(self, names: Iterable[str], window: float = WINDOW_SECONDS) -> None:
        self.window = window
        names = list(names)
        self._index = {name: index for index, name in enumerate(names)}
        self._logs: list[deque[tuple[float, int, LogLine]]] = [deque() for _ in names]
        self._sizes = [0] * len(names)
        self._open = set(range(len(names)))
        self._empty = set(self._open)  # the open logs without a waiting line
        self._heads: list[tuple[str, int]] = []
        self._events: deque[Event] = deque()
        self._closed = False
        self._condition = threading.Condition()

    def put(self, name: str, lines: Sequence[tuple[int, LogLine]]) -> None:
        """Add lines of a log, each with its size in bytes; block until there is room for more, or the merge closes."""
        index = self._index[name]
        log = self._logs[index]
        with self._condition:
            if not lines or self._closed:
                return
            now = time.monotonic()
            if not log:
                heapq.heappush(self._heads, (lines[0][1].time, index))
                self._empty.discard(index)
            log.extend((now, size, line) for size, line in lines)
            self._sizes[index] += sum(size for size, _ in lines)
            self._condition.notify_all()
            while self._sizes[index] >= MAX_BYTES and not self._closed:
                self._condition.wait()

    def put_event(self, event: Event) -> None:
        """Add an event that is no line."""
        with self._condition:
            self._events.append(event)
            self._condition.notify_all()

    def end(self, name: str) -> None:
        """Mark the end of a log."""
        with self._condition:
            self._open.discard(self._index[name])
            self._empty.discard(self._index[name])
            self._condition.notify_all()

    def close(self) -> None:
        """Close the merge, and release all waiting threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    @property
    def ended(self) -> bool:
        """True once every log has ended, and all lines and events were taken."""
        with self._condition:
            return not self._open and not self._heads and not self._events

    def take(self, seconds: float) -> list[Event]:
        """Return events and the lines that need not wait, in order; wait at most `seconds` for the first."""
        until = time.monotonic() + seconds
        with self._condition:
            while True:
                now = time.monotonic()
                events: list[Event] = [*self._events]
                self._events.clear()
                events += self._take_lines(now)
                if events or now >= until or (not self._open and not self._heads):
                    return events
                self._condition.wait(min(until, self._oldest() + self.window) - now if self._heads else until - now)

    def _take_lines(self, now: float) -> list[LogLine]:
        lines: list[LogLine] = []
        oldest: float | None = None
        full = False
        while self._heads and len(lines) < _BATCH_LINES:
            if self._empty:
                oldest = self._oldest() if oldest is None else oldest
                if now - oldest < self.window:
                    break
            _, index = heapq.heappop(self._heads)
            log = self._logs[index]
            arrived, size, line = log.popleft()
            lines.append(line)
            full = full or self._sizes[index] >= MAX_BYTES
            self._sizes[index] -= size
            if arrived == oldest:
                oldest = None
            if log:
                heapq.heappush(self._heads, (log[0][2].time, index))
            elif index in self._open:
                self._empty.add(index)
        if full:
            self._condition.notify_all()
        return lines

    def _oldest(self) -> float:
        """Return when the line that waits longest arrived; it is the first of its log."""
        return min(self._logs[index][0][0] for _, index in self._heads)


@dataclass(frozen=True)
class Note:
    """A message for the user beside the logs."""

    text: str


@dataclass(frozen=True)
class ReplicaRecords:
    """The records of the followed replicas, as far as they have one."""

    records: Mapping[str, ReplicaRecord]


@dataclass(frozen=True)
class WaitReason:
    """The reason to wait between the last line of a job and its end; empty once the wait is over."""

    text: str


Event = LogLine | Note | JobRecord | ReplicaRecords | WaitReason
TICK = Note("")
"""No event for _TICK_SECONDS."""


class Follower:
    """Follows replicas of one job.

    Iterate over `batches` or `events`; every thread is a daemon and ends with the iteration.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        record: JobRecord,
        replicas: Iterable[str],
        log_filter: LogFilter,
        for_screen: bool = False,
    ) -> None:
        """Follow these replicas.

        Args:
            for_screen: also yield a TICK each quarter of a second without an event and, unless the job is QUEUED,
                ReplicaRecords each time the job's record was read.
        """
        self._for_screen = for_screen
        self._fleet, self._ledger, self._job_id, self._log_filter = fleet, ledger, record.jobId, log_filter
        self._placement = record.placement
        self._placed = threading.Event()
        if self._placement:
            self._placed.set()
        self._replicas = list(replicas)
        several = len(self._replicas) > 1
        self._window = WINDOW_SECONDS if several else 0.0
        # At first the last lines of every log arrive at once, from some hosts later than from others.
        backlog = several and log_filter.lines != 0
        self._merge = Merge(self._replicas, _BACKLOG_SECONDS / 2 if backlog else self._window)
        self._ending, self._closed = threading.Event(), threading.Event()
        self._poll_now = threading.Event()
        self._streams: dict[str, Stream] = {}
        self._heartbeats = ChangeTimer(time.monotonic)
        self._queue_monitor = QueueMonitor(ledger, ChangeTimer(time.monotonic), current_user())
        self._ahead: list[str] = []
        self._job = record
        self._records: Mapping[str, ReplicaRecord] = {}
        self._records_read_at = -math.inf
        self._reading = set(self._replicas)
        self._active_at = time.monotonic()
        self._has_steps = False
        self._waiting = self._start = ""
        self._deleted = False

    def events(self) -> Iterator[Event]:
        """Yield lines by time, notes, and the job's record at each change of state, until the job has ended."""
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events in batches of all that are available; OpsError at the end if the job was deleted before it ended."""
        began = time.monotonic()
        for name in self._replicas:
            threading.Thread(target=self._guard, args=(self._tail, name), name=f"tail {name}", daemon=True).start()
        threading.Thread(target=self._guard, args=(self._watch,), name="watch", daemon=True).start()
        try:
            while not self._merge.ended:
                if time.monotonic() - began > _BACKLOG_SECONDS:
                    self._merge.window = self._window
                events = self._merge.take(_TICK_SECONDS)
                events += self._wait_reasons()
                if events or self._for_screen:
                    yield events or [TICK]
        finally:
            self._closed.set()
            self._merge.close()
            self._end()
        if self._deleted:
            raise OpsError(f"job {self._job_id} has no record any more: fab jobs lists the others")

    def _wait_reasons(self) -> list[Event]:
        """Return the reason why the job prints nothing, each time it changes."""
        quiet = time.monotonic() - self._active_at
        notes: list[Event] = []
        reading = self._reading if self._ending.is_set() else ()
        waiting = (
            waits.waiting_at_end(self._job, self._records, self._replicas, reading) if quiet >= waits.END_QUIET_SECONDS else ""
        )
        if waiting != self._waiting:
            self._waiting = waiting
            notes.append(WaitReason(waiting))
        is_read = math.isfinite(self._records_read_at)
        if is_read and not self._has_steps and quiet >= waits.START_QUIET_SECONDS and not waiting:
            start = waits.waiting_at_start(self._job, self._records, self._replicas)
            if start and start != self._start:
                self._start, self._active_at = start, time.monotonic()
                notes.append(Note(f"nothing was printed for {waits.START_QUIET_SECONDS:.0f} s: {start}"))
        return notes

    def _end(self) -> None:
        """End the streams once the job or the iteration ends; each host first sends what its log has by now."""
        self._ending.set()
        self._placed.set()
        self._poll_now.set()
        for stream in list(self._streams.values()):
            stream.finish()

    def _guard(self, work: Callable[..., None], *args: str) -> None:
        """Run a thread's work; show its error, and end its log, so that the reader does not wait for it."""
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001
            self._merge.put_event(Note(f"{threading.current_thread().name}: {str(error) or type(error).__name__}"))
        finally:
            for name in args:
                self._reading.discard(name)
                self._merge.end(name)

    def _tail(self, name: str) -> None:
        """Merge a replica's lines; if a connection breaks, continue from the last position."""
        position: Position | None = None
        broken, tries = False, 0
        self._placed.wait()  # until the job has hosts, or ends
        if name not in self._placement:
            return  # the replica never ran, and has no log
        while not self._ending.is_set() or (tries < (_LAST_TRIES if position else 1) and not self._closed.is_set()):
            try:
                for reached in self._read(name, position):
                    position, tries = reached, 0
                return
            except HostError as error:
                if not broken:
                    self._merge.put_event(Note(f"{error}; trying again"))
                broken = True
                tries += self._ending.is_set()
                if tries < _LAST_TRIES and (position or not tries):
                    (self._closed if tries else self._ending).wait(_RETRY_SECONDS)
        if not self._closed.is_set():
            again = f"fab logs {name} --job {self._job_id} tries again"
            self._merge.put_event(Note(f"{name}: not all of its lines were shown; {again}"))

    def _read(self, name: str, position: Position | None) -> Iterator[Position]:
        """Merge a replica's lines until the end, and yield the position after them; HostError if the connection breaks."""
        stream = self._fleet.stream(self._placement[name], follow_command(self._job_id, self._log_filter, position))
        self._streams[name] = stream
        try:
            if self._ending.is_set():  # checked after the stream is stored, as _end() may have missed it
                stream.finish()
            for reached, lines in parse_pieces(stream.pieces(), name):
                if lines:
                    self._active_at = time.monotonic()
                    self._has_steps = self._has_steps or parse_metrics(lines[-1][1].message) is not None
                    if any(_STATE_LINE.match(line.message) for _, line in lines):
                        self._poll_now.set()
                if reached:
                    self._merge.put(name, lines)
                    yield reached
            if stream.exit_code == SLOW_PATTERN:
                raise slow_pattern_error(self._log_filter)
            if stream.exit_code:
                raise HostError(stream.host, "cannot read its log", stream.exit_code, stream.stderr)
            if not self._ending.is_set():
                raise HostError(stream.host, "broke off")
        finally:
            stream.close()

    def _watch(self) -> None:
        """Report the job's record when its state changes; end all streams when it is final or deleted."""
        state, final_since, failing = "", 0.0, False
        while not self._ending.is_set():
            self._poll_now.clear()  # before the record is read, so that no later change is missed
            record = None
            try:
                record = find_job(self._ledger, self._job_id)
                if record:
                    self._queue_monitor.run_for(record)  # perhaps no other process monitors the queue
                if record and record.state is JobState.QUEUED:
                    self._check_queue()
                elif record and self._needs_replicas(record):
                    self._records = self._ledger.replicas(self._job_id, self._replicas)
                    self._records_read_at = time.monotonic()
                    if self._for_screen:
                        self._merge.put_event(ReplicaRecords(self._records))
                if failing:
                    self._merge.put_event(Note("the bucket answers again"))
                failing = False
            except Exception as error:  # noqa: BLE001  the job continues after any error here
                if not failing:
                    self._merge.put_event(Note(f"the bucket does not answer ({error}); the job continues, trying again"))
                failing = True
            if record is None and not failing:
                self._deleted = not final_since
                self._end()
                return
            if record and record.placement:
                self._placement = record.placement
                self._placed.set()
            self._job = record or self._job
            if record and record.state != state:
                state = record.state
                self._active_at = time.monotonic()
                self._merge.put_event(record)
            if record and record.final:
                final_since = final_since or time.monotonic()
                if self._is_complete(time.monotonic() - final_since):
                    self._merge.put_event(record)  # once more, with the results of the replicas
                    self._end()
                    return
            self._poll_now.wait(_LAST_POLL_SECONDS if final_since else _POLL_SECONDS)

    def _needs_replicas(self, record: JobRecord) -> bool:
        """Return True if the replicas' records should be read: at the end, for a screen, or when the job is quiet."""
        quiet = time.monotonic() - max(self._records_read_at, self._active_at) >= waits.END_QUIET_SECONDS
        return record.final or self._for_screen or quiet

    def _check_queue(self) -> None:
        """Report a change of the jobs ahead in the queue."""
        ahead = [entry.jobId for entry in self._ledger.queue().ahead_of(self._job_id)]
        if ahead and ahead != self._ahead:
            self._merge.put_event(Note(f"{self._job_id} is QUEUED behind {', '.join(ahead)}"))
        self._ahead = ahead

    def _is_complete(self, seconds: float) -> bool:
        """Return True once every replica has ended and looked for unsaved files, is unresponsive, or timed out."""
        if seconds > _UNSAVED_SECONDS:
            return True
        if math.isinf(self._records_read_at):  # the records cannot be read
            return seconds > _STOP_SECONDS
        replicas = self._records.values()
        running = [r for r in replicas if r.state is not ReplicaState.EXITED]
        looking = [r for r in replicas if r.state is ReplicaState.EXITED and r.startTime and r.unsaved is None]
        if running and seconds > _STOP_SECONDS:
            running = []
        # Every replica is observed, as the first observation starts its timer.
        silent = [self._heartbeats.observe(r.name, (r.incarnation, r.heartbeatSeq)) for r in (*running, *looking)]
        return all(each >= Plan.lostAfterSeconds for each in silent)
