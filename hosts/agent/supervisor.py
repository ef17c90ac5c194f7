"""Start, restart by the rules, and stop the trainer of one job on this host; never wait for the bucket."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hosts.agent import replica_rules
from hosts.agent.log import Log
from hosts.agent.process import HostBusyError
from hosts.agent.replica_rules import SIGKILL_STATUS, SIGTERM_CODE, Exit, termination_reason
from hosts.agent.trainer import Trainer
from jobs import variables
from jobs.background import Background
from jobs.lease import Clock
from jobs.progress import JobProgress
from jobs.records import Plan, ReplicaRecord, UnsavedFiles
from jobs.states import ReplicaState

# The longest wait for a start within one step; the unit's WatchdogSec is longer.
_STEP_SECONDS = 5.0
_TUNER = Path(__file__).resolve().parents[1] / "tuner" / "__main__.py"


@dataclass(frozen=True)
class Assignment:
    """A job on this host: what to run, where, in what environment, and the log that it writes to."""

    plan: Plan
    name: str
    directory: Path
    environment: Mapping[str, str]
    python: str
    log: Log

    @property
    def argv(self) -> list[str]:
        """The command line of the job's program; of a tuning job, that of the tuner, run by the agent's own Python."""
        if self.plan.study:
            return [sys.executable, "-I", str(_TUNER), self.plan.jobId, self.name]
        return variables.expand_command(self.plan.program(self.python), self.environment)


Spawn = Callable[[Assignment], Trainer]


class Supervisor:
    """The supervisor of one assignment's trainer. One thread calls `step`; the rest is thread-safe."""

    def __init__(
        self, assignment: Assignment, record: ReplicaRecord, spawn: Spawn, clock: Clock, now: Callable[[], str]
    ) -> None:
        """Prepare to continue from `record`; nothing runs before `set_target_state`."""
        self.assignment, self._spawn, self._clock, self._now = assignment, spawn, clock, now
        self._record = record
        self._child: Trainer | None = None
        self._starting: Background[Trainer | Exception] | None = None
        self._attempt = -1
        self._ending = ""
        self._terminated = False
        # If an earlier run of the agent began a restart, the seconds until its first line count from now.
        pending = bool(record.events) and record.events[-1].seconds is None
        self._ended_at = clock() if pending else None
        self._started_at, self._start_time = 0.0, ""
        self._printed_before = record.lines
        self._progress = record.progress
        self._start_at = clock() + replica_rules.wait_before_start(record)
        self._lock = threading.RLock()

    @property
    def record(self) -> ReplicaRecord:
        """The current record; what each line of output changes is in `lines`, `run_seconds` and `progress`."""
        with self._lock:
            self._record_recovery()
            self._record_error()
            return self._record

    @property
    def lines(self) -> int:
        """The number of lines that its trainers have printed."""
        with self._lock:
            return self._printed_before + (self._child.lines if self._child else 0)

    @property
    def run_seconds(self) -> float:
        """The seconds since the trainer started; 0 while none runs."""
        with self._lock:
            return round(self._clock() - self._started_at, 3) if self._child else 0.0

    @property
    def progress(self) -> JobProgress | None:
        """The progress of the trainer or of the one before; None in a tuning job, which has several trials."""
        with self._lock:
            if self.assignment.plan.study:
                return None
            return (self._child.progress if self._child else None) or self._progress

    @property
    def idle(self) -> bool:
        """True while no trainer runs and none is about to be started."""
        with self._lock:
            return self._child is None and self._record.state is ReplicaState.EXITED

    def set_facts(self, facts: Mapping[str, object]) -> None:
        """Set the facts of the chief's host for the manifest."""
        with self._lock:
            self._record = replace(self._record, facts=dict(facts))

    def set_unsaved(self, unsaved: UnsavedFiles) -> None:
        """Record the files that an ended job wrote outside JOB_DIR."""
        with self._lock:
            self._record = replace(self._record, unsaved=unsaved)

    def set_preempted(self) -> None:
        """Note that this host is being preempted."""
        with self._lock:
            self._record = replace(self._record, preempted=True)

    def set_target_state(self, attempt: int, ending: str) -> None:
        """Set the job's attempt, and in `ending` why the trainer must end, empty while it must not."""
        with self._lock:
            self._attempt, self._ending = max(self._attempt, attempt), ending

    def terminate(self) -> None:
        """Stop the trainer, as the unit is being stopped. The job continues when the unit starts again."""
        with self._lock:
            self._terminated = True

    def step(self) -> float:
        """Do what is due; return the seconds until the next step, unless a signal comes first.

        A start that is slow continues in the next step. While a step waits for it, other threads can read the record.
        """
        with self._lock:
            self._reap()
            self._start_or_stop()
        if self._starting and (started := self._started_trainer(self._starting)):
            with self._lock:
                self._end_start(started)
                self._start_or_stop()  # the target state may have changed meanwhile
        with self._lock:
            if self._starting:
                return 0.0
            waits = [self._child.due()] if self._child else []
            if self._record.state is ReplicaState.PREPARING and self._attempt >= 0:
                waits.append(self._start_at - self._clock())
            return max(min(waits, default=float("inf")), 0.0)

    def _reap(self) -> None:
        """Record a trainer that has ended."""
        child = self._child
        if child is None or (end := child.poll()) is None:
            return
        self._record_recovery()
        self._record_error()
        self._printed_before = self.lines
        self._progress = self.progress
        self._child = None
        self._ended_at = self._clock()
        ran = self._ended_at - self._started_at
        if self._terminated or child.stopping:
            self._record = self._stopped(end.status, ran)
            return
        record = replica_rules.after_exit(self.assignment.plan, self._record, end, ran, self._now(), child.tail)
        self._record = record
        wait = replica_rules.wait_before_start(record)
        self._start_at = self._clock() + wait
        self._log_end(record, wait)

    def _stopped(self, status: int | None, seconds: float = 0.0) -> ReplicaRecord:
        """Return the record of a stopped trainer. While its job continues, exit 0 at SIGTERM is no success."""
        status = SIGTERM_CODE if self._terminated or not self._ending else status
        return replica_rules.after_stop(self._record, status, self._now(), self._terminated, seconds)

    def _record_recovery(self) -> None:
        """Record the first line after a restart, also of a trainer that has ended meanwhile."""
        if self._child and self._ended_at is not None and self._child.lines:
            self._record = replica_rules.recovered(self._record, self._clock() - self._ended_at)
            self._ended_at = None

    def _record_error(self) -> None:
        """Record the first error, at once when it begins; its last lines may follow."""
        error, previous = self._child.first_error if self._child else None, self._record.firstError
        if error and error != previous and (previous is None or previous.time == error.time):
            self._record = replace(self._record, firstError=error)

    def _log_end(self, record: ReplicaRecord, wait: float) -> None:
        log, limit, code = self.assignment.log, self.assignment.plan.maxRestarts, record.exitCode
        if record.state is ReplicaState.PREPARING:
            when = f", in {wait:g} s" if wait else ""
            log.write_message(
                f"restarting after {termination_reason(record)} ({record.restartsUsed} of {limit}){when}", "WARNING"
            )
        elif record.crashLooping:
            log.write_message(
                f"trainer ended by {termination_reason(record)}, the same {record.consecutiveFailures} times in a row", "ERROR"
            )
        elif record.signal:
            log.write_message(f"trainer ended by {termination_reason(record)}", "ERROR")
        else:
            log.write_message(f"trainer exited with status {code}", "ERROR" if code else "INFO")

    def _start_or_stop(self) -> None:
        """Start or stop the trainer by the target state."""
        if self._starting or (self._attempt < 0 and not self._terminated):
            return
        plan, record, log = self.assignment.plan, self._record, self.assignment.log
        outdated = replica_rules.outdated(plan, record, self._attempt)
        if self._child:
            if (self._terminated or self._ending or outdated) and not self._child.stopping:
                why = self._ending or "the whole job starts again"
                log.write_message(f"stopping: {'the unit is stopped' if self._terminated else why}")
                self._child.stop(plan.stopSeconds)
        elif self._terminated or self._ending:
            self._record = self._stopped(None)
        elif outdated:
            log.write_message(f"the whole job starts again, attempt {self._attempt}", "WARNING")
            self._record = replica_rules.for_attempt(record, self._attempt)
            self._start()
        elif record.state is ReplicaState.PREPARING and self._clock() >= self._start_at:
            self._start()

    def _start(self) -> None:
        """Start the trainer in a thread: the launcher of a slow host takes longer than the watchdog allows."""
        self._started_at, self._start_time = self._clock(), self._now()
        self._starting = Background(self._spawn_or_error)

    def _spawn_or_error(self) -> Trainer | Exception:
        try:
            return self._spawn(self.assignment)
        except (OSError, ValueError) as error:
            return error

    @staticmethod
    def _started_trainer(start: Background[Trainer | Exception]) -> Trainer | Exception | None:
        """Return the trainer that has started, or why it could not; None if it is still starting."""
        try:
            return start.join(_STEP_SECONDS)
        except TimeoutError:
            return None

    def _end_start(self, started: Trainer | Exception) -> None:
        """Record the trainer that has started, or why it could not."""
        self._starting = None
        log = self.assignment.log
        if isinstance(started, HostBusyError):  # no start, so no restart: `step` tries again
            if not self._record.hostBusy:
                log.write_message(f"the trainer waits to start: {started}", "WARNING")
            self._record = replace(self._record, hostBusy=True)
            return
        record = replica_rules.started(self._record, self._start_time)
        if isinstance(started, Exception):
            program = self.assignment.argv[0]
            reason = f"{program}: {started.strerror}" if isinstance(started, OSError) and started.strerror else started
            why = f"the trainer cannot start: {reason}"
            # A slow host is no fault of the program.
            status = SIGKILL_STATUS if isinstance(started, TimeoutError) else 127
            took = self._clock() - self._started_at
            record = replica_rules.after_exit(self.assignment.plan, record, Exit(status), took, self._now(), why)
            self._start_at = self._clock() + replica_rules.wait_before_start(record)
            log.write_message(record.errorMessage, "ERROR")
        else:
            self._child = started
            log.write_message(f"started trainer pid {started.pid}: {shlex.join(self.assignment.argv)}")
        self._record = record
