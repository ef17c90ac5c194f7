"""A job's logs as they grow: one channel per host, and the job's record, until the job has ended."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from jobs.chunks import TOO_SLOW, LogFilter, Position
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger
from jobs.queue_monitor import QueueMonitor
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.ledger import find_job, me
from ops.cluster.remote import Fleet, Stream
from ops.errors import HostError
from ops.logs import waits
from ops.logs.heuristics import read
from ops.logs.lines import LogLine, follow_command, parse_printed, too_slow
from ops.logs.merge import WINDOW_SECONDS, Merge

_AGAIN_SECONDS = 2.0
_BACKLOG_SECONDS = 1.0
_LOOK_SECONDS, _LAST_LOOK_SECONDS = 1.0, 0.25
"""Between two polls of the job's record while it runs, and once it has ended."""
# The leader stops the others when the job has ended: their last lines are part of the story.
_OTHERS_SECONDS = 20.0
# Ended replicas then look for files that the job wrote beside JOB_DIR, before its folders are deleted.
_UNSAVED_SECONDS = 50.0
# The number of requests for a host's last lines if the connection breaks at the end; one for a host that never answered.
_LAST_TRIES = 3


@dataclass(frozen=True)
class Note:
    """An event beside the logs, for the user's eyes."""

    text: str


@dataclass(frozen=True)
class Replicas:
    """The records of those of the followed replicas that have one."""

    records: Mapping[str, ReplicaRecord]


@dataclass(frozen=True)
class Waiting:
    """Say what is waited for between a job's last line and its end; empty once that is over."""

    text: str


Event = LogLine | Note | JobRecord | Replicas | Waiting
TICK = Note("")
"""Nothing has happened for a moment."""
_TICK_SECONDS = 0.25
# The leader's log line after a change of the job's record.
_TURN = re.compile(rf"job ({'|'.join(JobState)})\b")


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
        wanted: LogFilter,
        ticks: bool = False,
    ) -> None:
        """Follow these replicas.

        Args:
            ticks: for a screen, also yield a TICK each quarter of a second without an event, and Replicas whenever the job's
              record was
                read.
        """
        self._ticks = ticks
        self._fleet, self._ledger, self._job_id, self._wanted = fleet, ledger, record.jobId, wanted
        self._placement = record.placement
        self._placed = threading.Event()
        if self._placement:
            self._placed.set()
        self._replicas = list(replicas)
        several = len(self._replicas) > 1
        self._window = WINDOW_SECONDS if several else 0.0
        # At first every log's last lines arrive at once, from some hosts later than from others.
        backlog = several and wanted.lines != 0
        self._merge: Merge[LogLine, Event] = Merge(self._replicas, _BACKLOG_SECONDS / 2 if backlog else self._window)
        self._ending, self._left = threading.Event(), threading.Event()
        self._look = threading.Event()
        self._streams: dict[str, Stream] = {}
        self._silence = ChangeTimer(time.monotonic)
        self._tender = QueueMonitor(ledger, ChangeTimer(time.monotonic), me())
        self._ahead: list[str] = []
        self._job = record
        self._records: Mapping[str, ReplicaRecord] = {}
        self._records_read_at = -math.inf
        self._reading = set(self._replicas)
        self._heard_at = time.monotonic()
        self._steps = False
        self._waiting = self._start = ""

    def events(self) -> Iterator[Event]:
        """Yield lines by time, notes, and the job's record at each change of state, until the job has ended."""
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events in batches of all that are available."""
        began = time.monotonic()
        for name in self._replicas:
            threading.Thread(target=self._guard, args=(self._tail, name), name=f"tail {name}", daemon=True).start()
        threading.Thread(target=self._guard, args=(self._watch,), name="watch", daemon=True).start()
        try:
            while not self._merge.over:
                if time.monotonic() - began > _BACKLOG_SECONDS:
                    self._merge.window = self._window
                events = self._merge.take(_TICK_SECONDS)
                events += self._waits()
                if events or self._ticks:
                    yield events or [TICK]
        finally:
            self._left.set()
            self._merge.close()
            self._end()

    def _waits(self) -> list[Event]:
        """Return what is to be said of a job that has printed nothing for a while, once for each change."""
        quiet = time.monotonic() - self._heard_at
        notes: list[Event] = []
        reading = self._reading if self._ending.is_set() else ()
        waiting = waits.at_the_end(self._job, self._records, self._replicas, reading) if quiet >= waits.SILENT_SECONDS else ""
        if waiting != self._waiting:
            self._waiting = waiting
            notes.append(Waiting(waiting))
        if not self._steps and quiet >= waits.START_SECONDS and not waiting:
            start = waits.at_the_start(self._job, self._records, self._replicas)
            if start and start != self._start:
                self._start, self._heard_at = start, time.monotonic()
                notes.append(Note(f"nothing was printed for {waits.START_SECONDS:.0f} s: {start}"))
        return notes

    def _end(self) -> None:
        """End the channels: hosts print what is written by now. Called once the job or the iteration ends."""
        self._ending.set()
        self._placed.set()
        self._look.set()
        for stream in list(self._streams.values()):
            stream.finish()

    def _guard(self, work: Callable[..., None], *args: str) -> None:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  a thread's error must be seen, and must not leave the reader waiting
            self._merge.tell(Note(f"{threading.current_thread().name}: {str(error) or type(error).__name__}"))
        finally:
            for name in args:
                self._reading.discard(name)
                self._merge.end(name)

    def _tail(self, name: str) -> None:
        """Bring a replica's lines, also over a connection that breaks: from the place on that was reached."""
        position: Position | None = None
        broken, tries = False, 0
        self._placed.wait()  # for its hosts, or for the end
        while not self._ending.is_set() or (tries < (_LAST_TRIES if position else 1) and not self._left.is_set()):
            try:
                for place in self._bring(name, position):
                    position, tries = place, 0
                return
            except HostError as error:
                if not broken:
                    self._merge.tell(Note(f"{error}; trying again"))
                broken = True
                tries += self._ending.is_set()
                if tries < _LAST_TRIES and (position or not tries):
                    (self._left if tries else self._ending).wait(_AGAIN_SECONDS)
        if not self._left.is_set():
            self._merge.tell(Note(f"{name}: not all of its lines were shown; fab logs {name} --job {self._job_id} looks again"))

    def _bring(self, name: str, position: Position | None) -> Iterator[Position]:
        """Put lines into the queue to show until the follower ends, and yield each position.

        Raises:
            HostError: if the connection ends before.
        """
        stream = self._fleet.stream(self._placement[name], follow_command(self._job_id, self._wanted, position))
        self._streams[name] = stream
        try:
            if self._ending.is_set():  # looked at behind that: whoever ends it may not have seen this one
                stream.finish()
            rest, before = b"", ""
            for data in stream.pieces():
                *complete, rest = (rest + data).split(b"\n")
                lines = []
                for printed in filter(None, complete):
                    position, line = parse_printed(printed, name, before)
                    if line:
                        before = line.time
                        lines.append((len(printed), line))
                        if _TURN.match(line.message):
                            self._look.set()
                if lines:
                    self._heard_at = time.monotonic()
                    self._steps = self._steps or read(lines[-1][1].message) is not None
                if position:
                    self._merge.put(name, lines)
                    yield position
            if stream.exited == TOO_SLOW:
                raise too_slow(self._wanted)
            if stream.exited:
                raise HostError(stream.host, "cannot read its log", stream.exited, stream.complaint)
            if not self._ending.is_set():
                raise HostError(stream.host, "broke off")
        finally:
            stream.close()

    def _watch(self) -> None:
        """Tell the job's record when its state changes, and end all when it is final."""
        state, final_since, failing = "", 0.0, False
        while not self._ending.is_set():
            self._look.clear()  # what is told from here on is for the next look
            record = None
            try:
                record = find_job(self._ledger, self._job_id)
                if record and record.state is JobState.QUEUED:
                    self._queued()
                elif record and self._wants_replicas(record):
                    self._records = self._ledger.replicas(self._job_id, self._replicas)
                    self._records_read_at = time.monotonic()
                    if self._ticks:
                        self._merge.tell(Replicas(self._records))
                if failing:
                    self._merge.tell(Note("the bucket answers again"))
                failing = False
            except Exception as error:  # noqa: BLE001  whatever it is, the job goes on
                if not failing:
                    self._merge.tell(Note(f"the bucket does not answer ({error}); the job goes on, trying again"))
                failing = True
            if record and record.placement:
                self._placement = record.placement
                self._placed.set()
            self._job = record or self._job
            if record and record.state != state:
                state = record.state
                self._heard_at = time.monotonic()
                self._merge.tell(record)
            if record and record.final:
                final_since = final_since or time.monotonic()
                if self._stopped(time.monotonic() - final_since):
                    self._merge.tell(record)  # once more, with what became of each replica
                    self._end()
                    return
            self._look.wait(_LAST_LOOK_SECONDS if final_since else _LOOK_SECONDS)

    def _wants_replicas(self, record: JobRecord) -> bool:
        """Return True if the replicas' records should be read: at the end, for a screen, else now and then."""
        quiet = time.monotonic() - max(self._records_read_at, self._heard_at) >= waits.SILENT_SECONDS
        return record.final or self._ticks or quiet

    def _queued(self) -> None:
        """Report a change of the hosts the job waits for, and run the queue, as no other process may do it."""
        self._tender.now_and_then()
        ahead = [entry.jobId for entry in self._ledger.queue().ahead_of(self._job_id)]
        if ahead and ahead != self._ahead:
            self._merge.tell(Note(f"{self._job_id} is QUEUED behind {', '.join(ahead)}"))
        self._ahead = ahead

    def _stopped(self, seconds: float) -> bool:
        """Return True once every replica has ended and looked for unsaved files, is gone, or timed out."""
        if seconds > _UNSAVED_SECONDS:
            return True
        if math.isinf(self._records_read_at):  # they cannot be read
            return seconds > _OTHERS_SECONDS
        replicas = self._records.values()
        running = [r for r in replicas if r.state is not ReplicaState.EXITED]
        looking = [r for r in replicas if r.state is ReplicaState.EXITED and r.startTime and r.unsaved is None]
        if running and seconds > _OTHERS_SECONDS:
            running = []
        # All are evaluated, which starts their timers.
        silent = [self._silence.see(r.name, (r.life, r.beat)) for r in (*running, *looking)]
        return all(each >= Plan.lostAfterSeconds for each in silent)
