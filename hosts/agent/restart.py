"""Transitions of a replica when its trainer, host or job restarts: pure functions of its record."""

from __future__ import annotations

from dataclasses import replace

from hosts.agent.decide import PREEMPTED, killer
from hosts.agent.exit_rules import SIGKILL_STATUS, is_fault, is_restart, shell_code
from jobs.records import Event, Plan, ReplicaRecord, kept
from jobs.states import ReplicaState

LONGEST_WAIT = 30.0
GOOD_SECONDS = 600.0
"""A trainer that ran for so long has its restarts back, but for those that its own faults took."""
AT_ONCE_SECONDS = 10.0
"""A trainer that dies sooner than this after its start dies at once."""
ALIKE = 3
"""So many deaths in a row that are the same, at once or for want of memory, and there is no further start."""


def resume(plan: Plan, name: str, attempt: int, mine: ReplicaRecord | None, now: str) -> ReplicaRecord:
    """Return the record to continue from when the unit starts; `mine` is that in the bucket.

    A record that still says RUNNING is that of a trainer which died with its replica or its host: a kill.
    """
    if mine is None:
        return ReplicaRecord(name, attempt=attempt, heartbeatTime=now)
    preempted = mine.preempted
    mine = replace(mine, preempted=False, death=PREEMPTED if preempted else mine.death.replace(PREEMPTED, ""))
    if outdated(plan, mine, attempt):
        return again(mine, attempt)
    if mine.state is ReplicaState.RUNNING:
        ended = replace(_with_end(mine, SIGKILL_STATUS, now), outOfMemory=False, errorMessage="")
        return after_kill(plan, ended, now, PREEMPTED if preempted else "the replica or its host was stopped", not preempted)
    if mine.state is ReplicaState.EXITED and not mine.hopeless and (mine.exitCode is None or mine.killed):
        ended = mine if mine.exitCode else _with_end(mine, SIGKILL_STATUS, mine.endTime)
        return after_kill(plan, ended, now, PREEMPTED if preempted else "the unit was stopped", not preempted)
    return mine


def after_exit(
    plan: Plan,
    record: ReplicaRecord,
    status: int,
    seconds: float,
    now: str,
    tail: str,
    out_of_memory: bool = False,
    memory_limit: int | None = None,
) -> ReplicaRecord:
    """Return the record after an exit: PREPARING for a restart on this host, else EXITED.

    `status` is as in `replica.exit_rules`, which decide about the restart. It ran for `seconds`; `tail` is the end of its log.
    """
    why = tail if status else ""
    limit = memory_limit if out_of_memory else None
    ended = replace(_with_end(record, status, now), outOfMemory=out_of_memory, memoryLimit=limit, errorMessage=why)
    # The codes of a study are those of its trials, and not of what runs them.
    rules = replace(plan, restartCodes=[], permanentCodes=[]) if plan.study else plan
    if not is_restart(rules, status, out_of_memory, record.preempted):
        return replace(ended, state=ReplicaState.EXITED, killed=False, alike=0)
    death = killer(ended)
    # Faults that come again and again, however late, are no bad luck.
    faults = record.faults + is_fault(status, out_of_memory)
    spent = record.faults if seconds >= GOOD_SECONDS else record.spent
    at_once = seconds < AT_ONCE_SECONDS or (out_of_memory and seconds < GOOD_SECONDS)
    alike = record.alike + 1 if at_once and record.death in (death, "") else int(at_once)
    ended = replace(ended, alike=alike, death=death, spent=spent, faults=faults)
    if alike >= ALIKE:
        return replace(ended, state=ReplicaState.EXITED, killed=True, hopeless=True)
    return after_kill(plan, ended, now, death)


def after_kill(plan: Plan, ended: ReplicaRecord, now: str, cause: str, counts: bool = True) -> ReplicaRecord:
    """Return the record after a kill: PREPARING for a restart by itself, EXITED if the leader decides.

    A kill that does not count against the limit, as no trainer is the cause, is a restart none the less.
    """
    if (plan.whole and not plan.is_expendable(ended.name)) or (counts and ended.spent >= plan.maxRestarts):
        return replace(ended, state=ReplicaState.EXITED, killed=True)
    events, spent = kept(ended.events, Event(now, cause)), ended.spent + counts
    pending = replace(ended, state=ReplicaState.PREPARING, killed=False, restarts=ended.restarts + 1, spent=spent)
    return replace(pending, events=events)


def after_stop(record: ReplicaRecord, status: int | None, now: str, killed: bool = False) -> ReplicaRecord:
    """Return the record after the trainer was stopped, or never started.

    One that had ended by itself stays as it is. It was `killed` if it is to start again when its unit does.
    """
    if record.state is ReplicaState.EXITED:
        return record
    return replace(_with_end(record, status, now), state=ReplicaState.EXITED, killed=killed)


def _with_end(record: ReplicaRecord, status: int | None, now: str | None) -> ReplicaRecord:
    code = None if status is None else shell_code(status)
    return replace(record, exitCode=code, signal=-status if status is not None and status < 0 else None, endTime=now)


def outdated(plan: Plan, record: ReplicaRecord, attempt: int) -> bool:
    """Return True for a record of an earlier attempt, unless its replica stays done."""
    return record.attempt < attempt and not (record.done and plan.stays_done(record.name))


def again(record: ReplicaRecord, attempt: int) -> ReplicaRecord:
    """Return the record for a restart of the whole job; repeated immediate exits still count."""
    fresh = replace(record, state=ReplicaState.PREPARING, attempt=attempt, restarts=0, spent=0, faults=0, hopeless=False)
    return replace(fresh, killed=False, errorMessage="")


def started(record: ReplicaRecord, now: str) -> ReplicaRecord:
    """Return the record of a running trainer; startTime stays that of the first."""
    fresh = replace(record, state=ReplicaState.RUNNING, exitCode=None, signal=None, killed=False, endTime=None, errorMessage="")
    return replace(fresh, startTime=record.startTime or now, lastStartTime=now, starts=record.starts + 1)


def recovered(record: ReplicaRecord, seconds: float) -> ReplicaRecord:
    """Return the record of a restarted trainer at its first sign of life, `seconds` after the last end."""
    if not record.events or record.events[-1].seconds is not None:
        return record
    return replace(record, events=[*record.events[:-1], replace(record.events[-1], seconds=round(seconds, 3))])


def wait_before_start(record: ReplicaRecord) -> float:
    """Return the seconds before the trainer starts: 0, 0 at the first restart, then 1, doubling."""
    return min(2.0 ** (min(record.spent, 10) - 2), LONGEST_WAIT) if record.spent > 1 else 0.0
