"""What becomes of one replica when its trainer, its host or the whole job starts again: pure functions of its record."""

from __future__ import annotations

from dataclasses import replace

from jobs.records import Event, Plan, ReplicaRecord, kept
from jobs.states import ReplicaState
from replica.decide import PREEMPTED, killer

LONGEST_WAIT = 30.0
GOOD_SECONDS = 600.0
"""A trainer that ran for so long has its restarts back."""
AT_ONCE_SECONDS = 10.0
"""A trainer that dies sooner than this after its start dies at once."""
ALIKE = 3
"""So many deaths in a row that are the same, at once or for want of memory, and there is no further start."""
SIGKILL_CODE = 128 + 9
SIGTERM_CODE = 128 + 15


def resume(plan: Plan, name: str, attempt: int, mine: ReplicaRecord | None, now: str) -> ReplicaRecord:
    """The record to go on with when the unit starts; `mine` is what its last life left in the bucket.

    A record that still says RUNNING is that of a trainer which died with its replica or its host: a kill.
    """
    if mine is None:
        return ReplicaRecord(name, attempt=attempt, heartbeatTime=now)
    preempted = mine.preempted
    mine = replace(mine, preempted=False, death=PREEMPTED if preempted else mine.death.replace(PREEMPTED, ""))
    if outdated(plan, mine, attempt):
        return again(mine, attempt)
    if mine.state is ReplicaState.RUNNING:
        ended = replace(mine, exitCode=SIGKILL_CODE, outOfMemory=False, endTime=now, errorMessage="")
        return after_kill(plan, ended, now, PREEMPTED if preempted else "the replica or its host was stopped", not preempted)
    if mine.state is ReplicaState.EXITED and not mine.hopeless and (mine.exitCode is None or mine.exitCode >= 128):
        ended = replace(mine, exitCode=mine.exitCode or SIGKILL_CODE)
        return after_kill(plan, ended, now, PREEMPTED if preempted else "the unit was stopped", not preempted)
    return mine


def after_exit(
    plan: Plan,
    record: ReplicaRecord,
    exit_code: int,
    seconds: float,
    now: str,
    tail: str,
    out_of_memory: bool = False,
    memory_limit: int | None = None,
) -> ReplicaRecord:
    """The record after the trainer ended by itself: PREPARING where it is to start again on this host, else EXITED.

    A kill (128 or more) is passing, any other code is the trainer's own verdict. It ran for `seconds`; `tail` is the end of its
    log.
    """
    why = tail if exit_code else ""
    limit = memory_limit if out_of_memory else None
    ended = replace(record, exitCode=exit_code, outOfMemory=out_of_memory, memoryLimit=limit, endTime=now, errorMessage=why)
    if exit_code < 128:
        return replace(ended, state=ReplicaState.EXITED, alike=0)
    went_well = seconds >= GOOD_SECONDS
    death = killer(ended)
    at_once = seconds < AT_ONCE_SECONDS or (out_of_memory and not went_well)
    alike = record.alike + 1 if at_once and record.death in (death, "") else int(at_once)
    ended = replace(ended, alike=alike, death=death, spent=0 if went_well else record.spent)
    if alike >= ALIKE:
        return replace(ended, state=ReplicaState.EXITED, hopeless=True)
    return after_kill(plan, ended, now, death)


def after_kill(plan: Plan, ended: ReplicaRecord, now: str, cause: str, counts: bool = True) -> ReplicaRecord:
    """A kill counted: PREPARING where the replica starts again by itself, EXITED where that is for the leader to say.

    One that does not count against the limit, as nobody's trainer is the cause, is a restart none the less.
    """
    if plan.whole and not plan.is_expendable(ended.name):
        return replace(ended, state=ReplicaState.EXITED)
    if counts and ended.spent >= plan.maxRestarts:
        return replace(ended, state=ReplicaState.EXITED)
    events, spent = kept(ended.events, Event(now, cause)), ended.spent + counts
    return replace(ended, state=ReplicaState.PREPARING, restarts=ended.restarts + 1, spent=spent, events=events)


def after_stop(record: ReplicaRecord, exit_code: int | None, now: str) -> ReplicaRecord:
    """The record after the trainer was made to end, or was never started; one that had ended by itself stays as it is."""
    if record.state is ReplicaState.EXITED:
        return record
    return replace(record, state=ReplicaState.EXITED, exitCode=exit_code, endTime=now)


def outdated(plan: Plan, record: ReplicaRecord, attempt: int) -> bool:
    """True for a record of an earlier attempt; but a chief that is done stays done."""
    return record.attempt < attempt and not (record.name == plan.chief and record.done)


def again(record: ReplicaRecord, attempt: int) -> ReplicaRecord:
    """The record with which the whole job starts again; a trainer that never runs longer than a moment is still found out."""
    fresh = replace(record, state=ReplicaState.PREPARING, attempt=attempt, restarts=0, spent=0, hopeless=False)
    return replace(fresh, errorMessage="")


def started(record: ReplicaRecord, now: str) -> ReplicaRecord:
    """The record of a trainer that runs; startTime stays that of the first."""
    start = record.startTime or now
    return replace(record, state=ReplicaState.RUNNING, startTime=start, endTime=None, exitCode=None, errorMessage="")


def recovered(record: ReplicaRecord, seconds: float) -> ReplicaRecord:
    """The record of a trainer that has shown its first sign of life so long after the one before it ended."""
    if not record.events or record.events[-1].seconds is not None:
        return record
    return replace(record, events=[*record.events[:-1], replace(record.events[-1], seconds=round(seconds, 3))])


def wait_before_start(record: ReplicaRecord) -> float:
    """Seconds to wait before the trainer starts: none at first and at the first restart, then 1 and twice as long each time."""
    return min(2.0 ** (min(record.spent, 10) - 2), LONGEST_WAIT) if record.spent > 1 else 0.0
