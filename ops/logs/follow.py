"""A job's logs as they grow: one channel a host, the job's record beside them, until the job has ended."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs.lease import Watch
from jobs.ledger import Ledger
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState
from jobs.tender import Tender
from ops.cluster.ledger import find_job, me
from ops.cluster.remote import Fleet
from ops.errors import HostError
from ops.logs.lines import REORDER_SECONDS, Line, Reorder, follow_command, parse_line

_AGAIN_SECONDS = 2.0
_BACKLOG_SECONDS = 1.0
_DRAIN_SECONDS = 3.0
# The leader stops the others when the job has ended: their last lines are part of the story.
_OTHERS_SECONDS = 20.0


@dataclass(frozen=True)
class Note:
    """Something that happened beside the logs, for the user's eyes."""

    text: str


@dataclass(frozen=True)
class Replicas:
    """The records of those of the followed replicas that have one."""

    records: Mapping[str, ReplicaRecord]


Event = Line | Note | JobRecord | Replicas
TICK = Note("")
"""Nothing has happened for a moment."""
_TICK_SECONDS = 0.25
_QUIET_SECONDS = 0.5
# What the leader says in its log when it has changed the job's record.
_TURN = re.compile(rf"job ({'|'.join(JobState)})\b")


class Follower:
    """Follows replicas of one job. Iterate over `events`; every thread is a daemon and ends with the iteration."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        record: JobRecord,
        replicas: Iterable[str],
        lines: int | None,
        ticks: bool = False,
    ) -> None:
        """With `ticks`, as a screen wants it, there is also a TICK each quarter of a second without an event, and Replicas
        whenever the job's record was read."""
        self._ticks = ticks
        self._fleet, self._ledger, self._job_id, self._lines = fleet, ledger, record.jobId, lines
        self._placement = record.placement
        self._placed = threading.Event()
        if self._placement:
            self._placed.set()
        self._replicas = list(replicas)
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._look = threading.Event()
        self._channels: dict[str, Any] = {}
        self._running = len(self._replicas)
        self._silence = Watch(time.monotonic)
        self._tender = Tender(ledger, Watch(time.monotonic), me())
        self._ahead: list[str] = []

    def events(self) -> Iterator[Event]:
        """Lines in the order of time, notes, and the job's record whenever its state changes; ends when the job has."""
        several = len(self._replicas) > 1
        # At first every log's last lines come at once, from some hosts later than from others.
        reorder = Reorder(_BACKLOG_SECONDS / 2 if several and self._lines != 0 else 0.0)
        began, quiet = time.monotonic(), _TICK_SECONDS if self._ticks else _QUIET_SECONDS
        for name in self._replicas:
            threading.Thread(target=self._guard, args=(self._tail, name), name=f"tail {name}", daemon=True).start()
        threading.Thread(target=self._guard, args=(self._watch,), name="watch", daemon=True).start()
        end_by: float | None = None
        try:
            while self._running and (end_by is None or time.monotonic() < end_by):
                now = time.monotonic()
                if several and now - began > _BACKLOG_SECONDS:
                    reorder.window = REORDER_SECONDS
                yield from reorder.ready(now)
                try:
                    event = self._queue.get(timeout=min(reorder.wait(now) or quiet, quiet))
                except queue.Empty:
                    event = TICK
                if event is None:
                    self._running -= 1
                elif isinstance(event, Line):
                    reorder.add(event, time.monotonic())
                elif self._ticks or event != TICK:
                    yield event
                if self._ending.is_set() and end_by is None:
                    end_by = time.monotonic() + _DRAIN_SECONDS
            yield from reorder.rest()
        finally:
            self._end()

    def _end(self) -> None:
        """Nobody wants more: the hosts print what is written by now, and end their channels."""
        self._ending.set()
        self._placed.set()
        self._look.set()
        for channel in list(self._channels.values()):
            with suppress(OSError):  # it broke off, which who reads it will say
                channel.shutdown_write()

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  a thread's error must be seen, and must not leave the reader waiting
            self._queue.put(Note(f"{threading.current_thread().name}: {error}"))
        finally:
            if args:
                self._queue.put(None)

    def _tail(self, name: str) -> None:
        """Put a replica's lines into the queue, also over a connection that breaks."""
        lines, last, at_last = self._lines, "", set[Line]()
        broken = False
        self._placed.wait()  # for its hosts, or for the end
        while not self._ending.is_set():
            try:
                for text in self._channel_lines(name, lines):
                    line = parse_line(text, name, last)
                    if broken and (line.time < last or line in at_last):
                        continue  # shown before the connection broke
                    if line.time > last:
                        last, at_last = line.time, set()
                    at_last.add(line)
                    self._queue.put(line)
                    if _TURN.match(line.message):
                        self._look.set()
                return
            except HostError as error:
                if not broken:
                    self._queue.put(Note(f"{error}; trying again"))
                broken, lines = True, None if last else lines
                self._ending.wait(_AGAIN_SECONDS)

    def _channel_lines(self, name: str, lines: int | None) -> Iterator[str]:
        """Complete lines of a host's log until the follower ends; HostError where the connection does before."""
        host = self._placement[name]
        connection = self._fleet.connection(host)
        try:
            with connection.create_session() as channel:
                channel.exec_command(follow_command(self._job_id, lines))
                self._channels[name] = channel
                if self._ending.is_set():  # looked at behind that: whoever ends it may not have seen this one
                    channel.shutdown_write()
                rest = b""
                while data := channel.recv(1 << 16):
                    *complete, rest = (rest + data).split(b"\n")
                    yield from (line.decode("utf-8", "replace") for line in complete)
        except (OSError, EOFError) as error:
            raise HostError(host, f"broke off: {error or type(error).__name__}") from error
        except Exception as error:
            if type(error).__module__.startswith("paramiko"):
                raise HostError(host, f"broke off: {error}") from error
            raise
        if not self._ending.is_set():
            raise HostError(host, "broke off")

    def _watch(self) -> None:
        """Put the job's record into the queue when its state changes, and end all when it is final."""
        state, final_since, failing = "", 0.0, False
        while not self._ending.is_set():
            self._look.clear()  # what is told from here on is for the next look
            record = None
            try:
                record = find_job(self._ledger, self._job_id)
                if record and record.state is JobState.QUEUED:
                    self._queued()
                elif record and self._ticks:
                    self._queue.put(Replicas(self._ledger.replicas(self._job_id, self._replicas)))
                if failing:
                    self._queue.put(Note("the bucket answers again"))
                failing = False
            except Exception as error:  # noqa: BLE001  whatever it is, the job goes on
                if not failing:
                    self._queue.put(Note(f"the bucket does not answer ({error}); the job goes on, trying again"))
                failing = True
            if record and record.placement:
                self._placement = record.placement
                self._placed.set()
            if record and record.state != state:
                state = record.state
                self._queue.put(record)
            if record and record.final:
                final_since = final_since or time.monotonic()
                if self._stopped(record) or time.monotonic() - final_since > _OTHERS_SECONDS:
                    self._queue.put(record)  # once more, with what became of each replica
                    self._end()
                    return
            self._look.wait(0.25 if final_since else 1.0)

    def _queued(self) -> None:
        """Say whom the job waits for where that has changed, and do what nobody else may be there to do for the queue."""
        self._tender.now_and_then()
        ahead = [entry.jobId for entry in self._ledger.queue().ahead_of(self._job_id)]
        if ahead and ahead != self._ahead:
            self._queue.put(Note(f"{self._job_id} is QUEUED behind {', '.join(ahead)}"))
        self._ahead = ahead

    def _stopped(self, record: JobRecord) -> bool:
        """True once every followed replica has written its last line, or is gone."""
        try:
            replicas = self._ledger.replicas(record.jobId, self._replicas).values()
        except Exception:  # noqa: BLE001  it is asked again
            return False
        running = [r for r in replicas if r.state is not ReplicaState.EXITED]
        silent = [self._silence.see(r.name, (r.life, r.beat)) for r in running]  # all are looked at, which starts their time
        return all(seconds >= Plan.lostAfterSeconds for seconds in silent)
