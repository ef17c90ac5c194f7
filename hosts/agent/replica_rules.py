"""Decide how a replica's record changes when its trainer, host or job ends or restarts, and which ends restart a program.

All functions are pure. A kill is an end after which a trainer must start again (`should_restart`). A status is that of
`subprocess`: 0 to 255 if the program exited, negative if a signal ended it; so a program's own 137 is not mistaken for a
SIGKILL. A code is the shell's: 128 + n if signal n ended it.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import NamedTuple

from jobs.records import Event, JobRecord, Plan, ReplicaRecord, with_events
from jobs.states import ReplicaState

PREEMPTED = "its host was preempted"
"""The reason of an end that the job did not cause, which counts against no limit."""
LONGEST_WAIT = 30.0
STABLE_SECONDS = 600.0
"""After a run of this length, only the restarts that its own faults used still count for a replica or a job."""
AT_ONCE_SECONDS = 10.0
"""A trainer that dies sooner than this after its start dies at once."""
CRASH_LOOP_EXITS = 3
"""The number of equal failures in a row, at once or out of memory, after which there is no further start."""


class Exit(NamedTuple):
    """The end of a program: its status, and whether the kernel killed one of its processes for lack of memory.

    `memory_limit` is in bytes, None if unknown; `processes_left` counts the processes that it left running, 0 if unknown.
    """

    status: int
    out_of_memory: bool = False
    memory_limit: int | None = None
    processes_left: int = 0


SIGKILL_STATUS = -int(signal.SIGKILL)
SIGTERM_CODE = 128 + int(signal.SIGTERM)
# Ends that others cause: their signals, 143 for a handled SIGTERM, and 0 for a program that ends well when asked to.
_FROM_OUTSIDE = frozenset({0, SIGTERM_CODE, *(-int(n) for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))})


def resume(plan: Plan, name: str, attempt: int, previous: ReplicaRecord | None, now: str) -> ReplicaRecord:
    """Return the record to continue from when the agent starts; `previous` is that in the bucket.

    A record that still says RUNNING is that of a trainer that was killed with its agent or its host.
    """
    if previous is None:
        return ReplicaRecord(name, attempt=attempt, heartbeatTime=now)
    preempted = previous.preempted
    reason = PREEMPTED if preempted else ""
    previous = replace(previous, preempted=False, terminationReason=reason or previous.terminationReason.replace(PREEMPTED, ""))
    if previous.state is ReplicaState.RUNNING:
        previous = credit_run(previous, previous.runSeconds)
    if outdated(plan, previous, attempt):
        return for_attempt(previous, attempt)
    if previous.state is ReplicaState.RUNNING:
        ended = replace(_with_end(previous, SIGKILL_STATUS, now), outOfMemory=False, errorMessage="", terminationReason=reason)
        return prepare_restart(
            plan, ended, now, PREEMPTED if preempted else "the replica or its host was stopped", not preempted
        )
    if (
        previous.state is ReplicaState.EXITED
        and not previous.crashLooping
        and (previous.exitCode is None or previous.awaits_restart)
    ):
        ended = (
            previous
            if previous.exitCode
            else replace(_with_end(previous, SIGKILL_STATUS, previous.endTime), terminationReason=reason)
        )
        return prepare_restart(plan, ended, now, PREEMPTED if preempted else "the agent was stopped", not preempted)
    return previous


def after_exit(plan: Plan, record: ReplicaRecord, end: Exit, seconds: float, now: str, tail: str) -> ReplicaRecord:
    """Return the record after an exit: PREPARING for a restart on this host, else EXITED.

    `should_restart` decides about the restart. The trainer ran for `seconds`; `tail` is the end of its log.
    """
    status, out_of_memory = end.status, end.out_of_memory
    why = tail if status else ""
    limit = end.memory_limit if out_of_memory else None
    ended = replace(_with_end(record, status, now), outOfMemory=out_of_memory, memoryLimit=limit, errorMessage=why)
    # In a tuning job these codes apply to the trials, not to the tuner.
    rules = replace(plan, restartCodes=[], permanentCodes=[]) if plan.study else plan
    if not should_restart(rules, status, out_of_memory, record.preempted):
        return replace(ended, state=ReplicaState.EXITED, awaits_restart=False, consecutiveFailures=0)
    reason = termination_reason(ended)
    # Repeated faults are no accident, however late they come.
    faults = record.faults + is_fault(status, out_of_memory)
    restarts_used = counted_restarts(record, seconds)
    at_once = seconds < AT_ONCE_SECONDS or (out_of_memory and seconds < STABLE_SECONDS)
    failures = record.consecutiveFailures + 1 if at_once and record.terminationReason in (reason, "") else int(at_once)
    ended = replace(ended, consecutiveFailures=failures, terminationReason=reason, restartsUsed=restarts_used, faults=faults)
    if failures >= CRASH_LOOP_EXITS:
        return replace(ended, state=ReplicaState.EXITED, awaits_restart=True, crashLooping=True)
    return prepare_restart(plan, ended, now, reason)


def prepare_restart(plan: Plan, ended: ReplicaRecord, now: str, cause: str, counts: bool = True) -> ReplicaRecord:
    """Return the record after a kill: PREPARING if this host restarts the trainer, EXITED if the leader decides.

    A kill that no trainer caused, such as a preemption, does not use up the limit, but counts in `restarts`.
    """
    if (plan.restarts_all and not plan.is_optional(ended.name)) or (counts and ended.restartsUsed >= plan.maxRestarts):
        return replace(ended, state=ReplicaState.EXITED, awaits_restart=True)
    events, restarts_used = with_events(ended.events, Event(now, cause)), ended.restartsUsed + counts
    pending = replace(
        ended, state=ReplicaState.PREPARING, awaits_restart=False, restarts=ended.restarts + 1, restartsUsed=restarts_used
    )
    return replace(pending, events=events)


def after_stop(
    record: ReplicaRecord, status: int | None, now: str, awaits_restart: bool, seconds: float = 0.0
) -> ReplicaRecord:
    """Return the record after the trainer was stopped, or never started; it ran for `seconds`.

    The record of a trainer that had ended by itself stays. Set `awaits_restart` if it must start again with its agent.
    """
    if record.state is ReplicaState.EXITED:
        return record
    return replace(
        _with_end(credit_run(record, seconds), status, now), state=ReplicaState.EXITED, awaits_restart=awaits_restart
    )


def killed_if_running(previous: ReplicaRecord) -> ReplicaRecord:
    """Return the record of a replica whose job ended while its host was off: killed with it, if the record says RUNNING."""
    if previous.state is not ReplicaState.RUNNING:
        return previous
    return after_stop(previous, SIGKILL_STATUS, previous.heartbeatTime, False, previous.runSeconds)


def credit_run(record: ReplicaRecord, seconds: float) -> ReplicaRecord:
    """Return the record with its counters reset as in `after_exit`, for a run of `seconds` that was ended from outside."""
    limit = STABLE_SECONDS if record.outOfMemory else AT_ONCE_SECONDS
    failures = 0 if seconds >= limit else record.consecutiveFailures
    return replace(record, consecutiveFailures=failures, restartsUsed=counted_restarts(record, seconds))


def _with_end(record: ReplicaRecord, status: int | None, now: str | None) -> ReplicaRecord:
    code = None if status is None else shell_code(status)
    return replace(record, exitCode=code, signal=-status if status is not None and status < 0 else None, endTime=now)


def outdated(plan: Plan, record: ReplicaRecord, attempt: int) -> bool:
    """Return True for a record of an earlier attempt, unless its replica stays done."""
    return record.attempt < attempt and not (record.succeeded and plan.stays_done(record.name))


def for_attempt(record: ReplicaRecord, attempt: int) -> ReplicaRecord:
    """Return the record for a restart of the whole job; repeated immediate exits still count."""
    fresh = replace(
        record, state=ReplicaState.PREPARING, attempt=attempt, restarts=0, restartsUsed=0, faults=0, crashLooping=False
    )
    return replace(fresh, awaits_restart=False, errorMessage="")


def started(record: ReplicaRecord, now: str) -> ReplicaRecord:
    """Return the record of a running trainer; startTime stays that of the first start."""
    fresh = replace(
        record, state=ReplicaState.RUNNING, exitCode=None, signal=None, awaits_restart=False, endTime=None, errorMessage=""
    )
    return replace(fresh, startTime=record.startTime or now, lastStartTime=now, starts=record.starts + 1, hostBusy=False)


def recovered(record: ReplicaRecord, seconds: float) -> ReplicaRecord:
    """Return the record of a restarted trainer at its first sign of life, `seconds` after the last end."""
    if not record.events or record.events[-1].seconds is not None:
        return record
    return replace(record, events=[*record.events[:-1], replace(record.events[-1], seconds=round(seconds, 3))])


def counted_restarts(record: ReplicaRecord | JobRecord, seconds: float) -> int:
    """Return how many restarts count against the limit after a run of `seconds`."""
    return record.faults if seconds >= STABLE_SECONDS else record.restartsUsed


def wait_before_start(record: ReplicaRecord) -> float:
    """Return the seconds before the trainer starts: 0, 0 at the first restart, then 1, doubling."""
    return min(2.0 ** (min(record.restartsUsed, 10) - 2), LONGEST_WAIT) if record.restartsUsed > 1 else 0.0


def shell_code(status: int) -> int:
    """Return the exit code as a shell gives it."""
    return 128 - status if status < 0 else status


def should_restart(plan: Plan, status: int, out_of_memory: bool = False, asked_to_end: bool = False) -> bool:
    """Return True for an end that starts the program again, False for a final one.

    Args:
        plan: has the user's rules, which come first.
        status: how the program ended.
        out_of_memory: True if the kernel killed one of its processes for lack of memory.
        asked_to_end: True if the program was asked to end.
    """
    code = shell_code(status)
    if code == 0 or code in plan.permanentCodes:
        return False
    if code in plan.restartCodes or status < 0:
        return True
    return out_of_memory or (asked_to_end and code == SIGTERM_CODE)


def is_fault(status: int, out_of_memory: bool) -> bool:
    """Return True for an end that the program brought about itself: a code, a fault such as SIGSEGV, or too much memory."""
    return out_of_memory or status not in _FROM_OUTSIDE


def describe_end(status: int, out_of_memory: bool = False) -> str:
    """Return how a program ended, in words: `signal 9 (SIGKILL), out of memory`, or `status 255`."""
    try:
        text = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
    except ValueError:
        text = f"signal {-status}"  # of real time, which have no names
    return f"{text}, out of memory" if out_of_memory else text


def termination_reason(record: ReplicaRecord) -> str:
    """Return the cause of a trainer's end: `signal 9 (SIGKILL), out of memory`, or `status 42`."""
    return describe_end(record.status, record.outOfMemory)
