"""What becomes of one replica when its trainer, its host or the whole job starts again: pure functions of its record."""

from __future__ import annotations

from dataclasses import replace

from replica.decide import succeeded
from replica.record import Plan, ReplicaRecord, ReplicaState

LONGEST_WAIT = 30.0
SIGKILL_CODE = 128 + 9
SIGTERM_CODE = 128 + 15


def resume(plan: Plan, attempt: int, mine: ReplicaRecord | None, now: str) -> ReplicaRecord:
    """The record to go on with when the unit starts; `mine` is what its last life left in the bucket.

    A record that still says RUNNING is that of a trainer which died with its replica or its host: a kill.
    """
    if mine is None:
        return ReplicaRecord(plan.replica, attempt=attempt, heartbeatTime=now)
    mine = replace(mine, heartbeatTime=now)
    if outdated(plan, mine, attempt):
        return again(mine, attempt)
    if mine.state == ReplicaState.RUNNING:
        return after_exit(plan, mine, SIGKILL_CODE, now, "")
    if mine.state == ReplicaState.EXITED and (mine.exitCode is None or mine.exitCode >= 128):
        return after_exit(plan, mine, mine.exitCode or SIGKILL_CODE, now, mine.errorMessage, mine.outOfMemory)
    return mine


def after_exit(
    plan: Plan, record: ReplicaRecord, exit_code: int, now: str, tail: str, out_of_memory: bool = False
) -> ReplicaRecord:
    """The record after the trainer ended by itself: PREPARING where it is to start again on this host, else EXITED.

    A kill (128 or more) is passing, any other code is the trainer's own verdict. `tail` is the end of its log.
    """
    why = tail if exit_code else ""
    ended = replace(record, exitCode=exit_code, outOfMemory=out_of_memory, endTime=now, errorMessage=why)
    if exit_code >= 128 and record.restarts < plan.maxRestarts:
        return replace(ended, state=str(ReplicaState.PREPARING), restarts=record.restarts + 1)
    return replace(ended, state=str(ReplicaState.EXITED))


def after_stop(record: ReplicaRecord, exit_code: int | None, now: str) -> ReplicaRecord:
    """The record after the trainer was made to end, or was never started; one that had ended by itself stays as it is."""
    if record.state == ReplicaState.EXITED:
        return record
    return replace(record, state=str(ReplicaState.EXITED), exitCode=exit_code, endTime=now)


def outdated(plan: Plan, record: ReplicaRecord, attempt: int) -> bool:
    """True for a record of an earlier attempt; but a chief that is done stays done."""
    return record.attempt < attempt and not (record.name == plan.chief and succeeded(record))


def again(record: ReplicaRecord, attempt: int) -> ReplicaRecord:
    """The record with which the whole job starts again."""
    return replace(record, state=str(ReplicaState.PREPARING), attempt=attempt, restarts=0, exitCode=None, errorMessage="")


def started(record: ReplicaRecord, now: str) -> ReplicaRecord:
    """The record of a trainer that runs; startTime stays that of the first."""
    start = record.startTime or now
    return replace(record, state=str(ReplicaState.RUNNING), startTime=start, endTime=None, exitCode=None, errorMessage="")


def wait_before_start(plan: Plan, record: ReplicaRecord) -> float:
    """Seconds to wait before the trainer starts: none the first time, then pollSeconds and twice as long each time."""
    return min(plan.pollSeconds * 2.0 ** (record.restarts - 1), LONGEST_WAIT) if record.restarts else 0.0
