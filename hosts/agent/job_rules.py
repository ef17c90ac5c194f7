"""Transitions of a job: pure functions of the leader's view, which the leader alone applies."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hosts.agent import missing_libraries, restart_budget
from hosts.agent.replica_rules import PREEMPTED, describe_end, is_fault, termination_reason
from jobs.records import Event, JobRecord, Plan, ReplicaRecord, with_events
from jobs.states import JobState, ReplicaState

CONSEQUENCE_SECONDS = 30.0
"""A peer that exits so soon after a kill exits because of it."""
VERDICT_SECONDS = 1.0
"""The wait before an exit ends a job, or a SIGTERM restarts it, as another host may report the real cause."""
# A peer that missed its heartbeat may have caused the errors that the others report.
_LATE_BEATS = 2.5
# Cloud ML's names of the keys that say what machine a role has.
_TYPES = {"ps": "parameterServer"}
_ERROR = "error: "
_SUMMARY = ("name", "state", "exitCode", "starts", "restarts", "startTime", "lastStartTime", "endTime")
_SIGTERM = describe_end(-signal.SIGTERM)
_GRACE = "the job is done by its successPolicy, but "


@dataclass(frozen=True)
class View:
    """The leader's view at one moment. All durations are in seconds by its own monotonic clock.

    Attributes:
        silence: the time since each replica's last new heartbeat.
        exited: the time since each replica's present exit was seen; absent if it has not exited.
        killed: the time since each replica's latest kill or loss in this attempt was seen; absent if there is none.
        in_state: the time in the job's state and attempt.
        since_output: the time since any trainer printed.
        startable: the replicas whose hosts can be started.
    """

    plan: Plan
    replicas: Mapping[str, ReplicaRecord]
    now: str
    silence: Mapping[str, float] = field(default_factory=dict)
    exited: Mapping[str, float] = field(default_factory=dict)
    killed: Mapping[str, float] = field(default_factory=dict)
    in_state: float = 0.0
    since_output: float = 0.0
    cancel_requested: bool = False
    startable: Collection[str] = ()

    def silent_for(self, name: str) -> float:
        """Return the seconds since a replica's last new heartbeat."""
        return self.silence.get(name, 0.0)

    def exited_for(self, name: str) -> float:
        """Return the seconds since a replica's exit was seen."""
        return self.exited.get(name, 0.0)

    def lost(self, name: str) -> bool:
        """Return True for a replica whose host is preempted or unresponsive, unless its work is done."""
        record = self.replicas.get(name)
        if record is None or record.done:
            return False
        return record.preempted or self.silent_for(name) >= self.plan.lostAfterSeconds

    def late(self, name: str) -> bool:
        """Return True for a replica that is lost, or may be, as it missed its heartbeat."""
        record = self.replicas.get(name)
        return record is not None and not record.done and (self.lost(name) or self._is_late(name))

    def off(self, name: str) -> bool:
        """Return True for a replica whose host is to be started: it is lost and gone, or never reported."""
        record = self.replicas.get(name)
        if name not in self.startable or (record is not None and record.done):
            return False
        if record is not None and record.preempted:
            return self._is_late(name)  # until it is off it cannot be started
        return self.silent_for(name) >= self.plan.lostAfterSeconds

    def _is_late(self, name: str) -> bool:
        return self.silent_for(name) >= _LATE_BEATS * self.plan.heartbeatSeconds

    def of_attempt(self, job: JobRecord) -> Iterator[ReplicaRecord]:
        """Yield the records of this attempt, in the plan's order; earlier attempts are dealt with."""
        records = (self.replicas.get(name) for name in self.plan.replicas)
        return (record for record in records if record is not None and record.attempt == job.attempt)

    @property
    def needed(self) -> list[str]:
        """The replicas that the job cannot do without."""
        return [name for name in self.plan.replicas if not self.plan.is_optional(name)]


def decide(job: JobRecord, view: View) -> JobRecord | None:
    """Return the job's next record, or None if nothing changes.

    One step of the table of states at a time.
    """
    rules = _RULES.get(job.state, (_still_stopping, _facts_found))
    if _succeeded in rules and _done_for(job, view) is not None:
        rules = tuple(rule for rule in rules if rule not in (*_OPEN, _never_up))  # what others do changes nothing any more
    return next((new for rule in rules if (new := rule(job, view)) is not None), None)


def to_start(job: JobRecord, view: View) -> list[str]:
    """Return the replicas whose hosts are off while the job needs them; the leader has them started."""
    if job.state not in (JobState.PREPARING, JobState.RUNNING) or view.cancel_requested:
        return []
    return [name for name in view.plan.replicas if view.off(name) and name not in job.droppedReplicas]


def stopped(job: JobRecord, view: View) -> bool:
    """Return True once no trainer of the job runs, as far as unresponsive hosts let one know."""
    silent = 2 * view.plan.leaseSeconds if job.state is JobState.CANCELLING else view.plan.lostAfterSeconds
    records = view.replicas.values()
    return all(r.state is ReplicaState.EXITED or view.silent_for(r.name) >= silent for r in records)


def exit_message(record: ReplicaRecord, more: str = "") -> str:
    """Return Cloud ML's sentence about a failed replica, and the end of its log."""
    name, code = _name(record.name), record.exitCode
    hint = _memory_hint(record) or missing_libraries.remedy(record.errorMessage.splitlines())
    sentence = f"The replica {name} exited with a non-zero status of {code}{more}."
    return " ".join(filter(None, (sentence, hint))) + f"\n{record.errorMessage}"


def _cause(record: ReplicaRecord) -> str:
    """Return the cause in brackets, behind its exit code; empty if the code says it all."""
    return f" ({termination_reason(record)})" if record.signal or record.outOfMemory else ""


def _memory_hint(record: ReplicaRecord) -> str:
    """Return a remedy for an out-of-memory kill: Cloud ML's key, or that of local hosts."""
    if not record.outOfMemory:
        return ""
    role = record.name.rpartition("-")[0]
    of = f"{record.memoryLimit / 1e9:.1f} GB are" if record.memoryLimit else "its memory is"
    return (
        f"For this trainer {of} too little: pulumi config has {_TYPES.get(role, role)}Type, and memory.{role} for local hosts."
    )


def _cancelled(job: JobRecord, view: View) -> JobRecord | None:
    return _end(job, view, JobState.CANCELLED, job.errorMessage) if stopped(job, view) else None


def _still_stopping(job: JobRecord, view: View) -> JobRecord | None:
    """Record who still stops: a job's end stands, and the list of its replicas follows."""
    replicas = _summary(view)
    return None if replicas == job.replicas else replace(job, replicas=replicas)


def _facts_found(job: JobRecord, view: View) -> JobRecord | None:
    """Add the facts of the chief's host to the short manifest as soon as they are known."""
    chief = view.replicas.get(view.plan.chief)
    if chief is None or not chief.facts or "data" in job.manifest:
        return None
    return replace(job, manifest=with_facts(job.manifest, chief.facts))


def with_facts(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest, or its short form, with the facts of the chief's host."""
    return {**manifest, **facts, "versions": {**manifest.get("versions", {}), **facts.get("versions", {})}}


def _prepares(job: JobRecord, view: View) -> JobRecord | None:
    return job.to(JobState.PREPARING, hosts=list(view.plan.hosts.values()) or job.hosts)


def _succeeded(job: JobRecord, view: View) -> JobRecord | None:
    """End a job whose deciding replicas are done, once the others are, or their grace period is over.

    It ends also if it is to be cancelled. A short job may be done before it was seen to run: then its start is its chief's.
    """
    plan, since = view.plan, _done_for(job, view)
    if since is None:
        return None
    working = _at_work(job, view) if plan.gracePeriod else []
    if working and since < plan.gracePeriod and not view.cancel_requested:
        if any(event.cause.startswith(_GRACE) for event in job.events):
            return None
        reason = f"{_GRACE}{_still_work(working)}: up to {plan.gracePeriod:g} s are given (gracePeriod)"
        return replace(job, events=with_events(job.events, Event(view.now, reason)))
    events = list(job.events)
    for record in view.of_attempt(job):
        if record.state is ReplicaState.EXITED and record.exitCode and not plan.is_server(record.name):
            events = (
                with_events(events, Event(view.now, _passed_over(record, plan)))
                if record.name not in job.droppedReplicas
                else events
            )
    if working:
        more = "a longer gracePeriod, or successPolicy: all, waits for that"
        events = with_events(events, Event(view.now, f"{_still_work(working)} when the job ended, and were stopped: {more}"))
    started = job.startTime or view.replicas[plan.chief].startTime
    return _end(replace(job, startTime=started, events=events), view, JobState.SUCCEEDED)


def _passed_over(record: ReplicaRecord, plan: Plan) -> str:
    optional = plan.is_optional(record.name)
    otherwise = "its role is in optionalRoles" if optional else "successPolicy: all makes the job depend on it"
    return f"{record.name} ended with {termination_reason(record)}, and its work may be missing: {otherwise}"


def _done_for(job: JobRecord, view: View) -> float | None:
    """Return the seconds since the last of the deciding replicas was done; None while one is not."""
    deciding = [name for name in view.plan.replicas if view.plan.decides(name)]
    return min(view.exited_for(name) for name in deciding) if all(_is_done(job, view, name) for name in deciding) else None


def _is_done(job: JobRecord, view: View, name: str) -> bool:
    record = view.replicas.get(name)
    return record is not None and record.done and (record.attempt == job.attempt or view.plan.stays_done(name))


def _at_work(job: JobRecord, view: View) -> list[str]:
    """List the replicas that should finish by themselves and have not."""
    ended = {r.name for r in view.of_attempt(job) if r.state is ReplicaState.EXITED}
    others = [
        name for name in view.plan.replicas if not view.plan.is_server(name) and name not in (*ended, *job.droppedReplicas)
    ]
    return [name for name in others if not view.lost(name) and not _is_done(job, view, name)]


def _still_work(names: Sequence[str]) -> str:
    return f"{', '.join(names)} still worked"


def _cancel_requested(job: JobRecord, view: View) -> JobRecord | None:
    return job.to(JobState.CANCELLING) if view.cancel_requested else None


def _ran_too_long(job: JobRecord, view: View) -> JobRecord | None:
    """Cancel a job at its time limit, with a message, as Cloud ML does."""
    limit = view.plan.maxRunningTime
    if job.runSeconds < limit:
        return None
    return job.to(JobState.CANCELLING, errorMessage=f"The job ran for longer than maxRunningTime, {limit:g} s.")


def _exited(job: JobRecord, view: View) -> JobRecord | None:
    """End the job after an exit that the rules do not restart, unless it follows from a peer's kill.

    A kill may be reported a moment later than the exits that follow from it, so the verdict waits for a moment, and for late
    hosts. The first exit is the cause; the others follow from it.
    """
    failed = [r for r in view.of_attempt(job) if r.state is ReplicaState.EXITED and r.exitCode and not r.killed]
    if not failed:
        return None
    culprit = max(failed, key=lambda r: view.exited_for(r.name))
    if killed_name := _find_cause(view, failed):
        record = view.replicas.get(killed_name)
        preempted = record is not None and record.terminationReason == PREEMPTED
        end = _own_end(record)
        how = "was preempted" if preempted else f"ended ({end})" if end else "was killed"
        cause = f"{_name(killed_name)} {how}, and the others could not continue without it"
        fault = record is not None and record.faults > 0
        return _restart_job(job, view, cause, counts=not preempted, fault=fault, follows=exit_message(culprit))
    peers = [name for name in view.needed if name not in {r.name for r in failed}]
    if any(view.late(name) for name in peers):
        return None  # whether it is lost will be clear soon; the job then waits for its host
    if max(view.exited_for(r.name) for r in failed) < _verdict_seconds(view):
        return None
    return _end(job, view, JobState.FAILED, _of_study(view.plan, culprit) or exit_message(culprit))


def _of_study(plan: Plan, record: ReplicaRecord) -> str:
    """Return the tuner's last error, which concerns the job and not a replica; empty for any other job."""
    errors = [line for line in record.errorMessage.splitlines() if line.startswith(_ERROR)] if plan.study else []
    return errors[-1].removeprefix(_ERROR) if errors else ""


def _find_cause(view: View, failed: Sequence[ReplicaRecord]) -> str | None:
    """Return the replica whose kill caused the exits.

    A kill, or the loss of a host, may be seen later than the exits that follow from it. A restart code seen after the exits is
    their result. So is a SIGTERM, even if seen up to VERDICT_SECONDS before them: our library sends it to itself if a peer is
    missing.
    """
    since = max(view.exited_for(r.name) for r in failed)
    exited = {r.name for r in failed}
    for name in view.plan.replicas:
        ago = view.killed.get(name, math.inf)
        reason = _own_end(view.replicas.get(name))
        follows = reason and ago < since + (_verdict_seconds(view) if reason == _SIGTERM else 0.0)
        if name not in exited and ago - since <= CONSEQUENCE_SECONDS and not follows and not view.lost(name):
            return name
    return None


def _own_end(record: ReplicaRecord | None) -> str:
    """Return how a replica to restart ended, if by a code or by SIGTERM, which a program may send itself; else empty."""
    reason = record.terminationReason if record is not None else ""
    return reason if reason == _SIGTERM or reason.startswith("status ") else ""


def _verdict_seconds(view: View) -> float:
    return min(VERDICT_SECONDS, view.plan.heartbeatSeconds)


def _crash_loops(job: JobRecord, view: View) -> JobRecord | None:
    """End the job if a replica repeatedly dies at once in the same way: restarts are useless."""
    for record in view.of_attempt(job):
        if record.crashLooping and record.name not in job.droppedReplicas:
            spent = f"{_cause(record)}, the same {record.consecutiveFailures} times in a row"
            return _without(job, view, record, spent) or _end(job, view, JobState.FAILED, exit_message(record, spent))
    return None


def _killed(job: JobRecord, view: View) -> JobRecord | None:
    """Handle a kill that its host does not restart: restart dependent peers together, or end the job.

    The job ends if its restarts are used up.
    """
    for record in view.of_attempt(job):
        if not record.killed or record.name in job.droppedReplicas or record.preempted:
            continue  # who is preempted starts when its host does, or is lost
        if view.plan.whole and not view.plan.is_optional(record.name):
            if any(view.lost(name) for name in view.needed):
                return None  # all start once it is back
            if preempted_names := [r.name for r in view.of_attempt(job) if r.killed and r.terminationReason == PREEMPTED]:
                return _restart_job(job, view, f"{_name(preempted_names[0])} was preempted", counts=False)
            if record.terminationReason == _SIGTERM and view.killed.get(record.name, math.inf) < _verdict_seconds(view):
                continue  # it may follow from an exit that is not reported yet
            how = "was killed" if record.signal else "ended"
            return _restart_job(job, view, f"{_name(record.name)} {how} ({termination_reason(record)})", record)
        if not restart_budget.is_spent(view.plan, record):
            continue  # its unit was stopped: it continues when that starts again, or is lost
        spent = f" ({termination_reason(record)}) after {view.plan.maxRestarts} restarts"
        return _without(job, view, record, spent) or _restart_job(job, view, f"{_name(record.name)} ended{spent}", record)
    return None


def _lost_for_good(job: JobRecord, view: View) -> JobRecord | None:
    """Fail the job if a needed replica has been lost for too long."""
    limit = view.plan.lostAfterSeconds + view.plan.maxWaitTime
    missing = [name for name in view.needed if view.lost(name) and view.silent_for(name) > limit]
    if missing:
        return _end(job, view, JobState.FAILED, f"{_names(missing)} lost: no heartbeat for {limit:g} s.")
    return None


def _record_lost(job: JobRecord, view: View) -> JobRecord | None:
    """Record lost replicas and those that are back."""
    lost_names = [name for name in view.plan.replicas if view.lost(name)]
    if lost_names == job.lostReplicas:
        return None
    events = [_lost_event(name, view) for name in lost_names if name not in job.lostReplicas]
    back = [Event(view.now, f"{name} is heard of again") for name in job.lostReplicas if name not in lost_names]
    return replace(job, lostReplicas=lost_names, events=with_events(job.events, *events, *back))


def _lost_event(name: str, view: View) -> Event:
    limit = view.plan.maxWaitTime
    otherwise = "the job does without it" if view.plan.is_optional(name) else f"else the job is FAILED in {limit:g} s"
    preempted, startable = view.replicas[name].preempted, name in view.startable
    text = f"{name} is {'preempted' if preempted else f'lost, no heartbeat for {view.plan.lostAfterSeconds:g} s'}"
    how = "its host is to be started again" if startable else "pulumi up brings it back"
    return Event(view.now, f"{text}: {how}, {otherwise}")


def _stalled(job: JobRecord, view: View) -> JobRecord | None:
    limit = view.plan.stallTimeout
    if limit is None or view.since_output < limit or any(view.lost(name) for name in view.needed):
        return None
    return _restart_job(job, view, f"no replica printed a line for {limit:g} s (stallTimeout)", fault=True)


def _all_run(job: JobRecord, view: View) -> JobRecord | None:
    missing = _not_up(job, view)
    if any(not view.plan.is_optional(name) for name in missing):
        return None
    if missing and view.in_state < view.plan.preparingSeconds:
        return None
    events = [Event(view.now, f"continues without {', '.join(missing)}, which did not start")] if missing else []
    return job.to(JobState.RUNNING, startTime=view.now, events=[*job.events, *events])


def _never_up(job: JobRecord, view: View) -> JobRecord | None:
    missing = _not_up(job, view)
    limit = view.plan.preparingSeconds + (view.plan.maxWaitTime if any(view.off(name) for name in missing) else 0.0)
    if view.in_state <= limit:
        return None
    return _end(job, view, JobState.FAILED, f"{_names(missing)} not up {limit:g} s after the first replica.")


def _not_up(job: JobRecord, view: View) -> list[str]:
    """Return the replicas that have not started in this attempt; one that is done did start."""
    up = {r.name for r in view.of_attempt(job) if r.state is ReplicaState.RUNNING or r.done}
    up |= {name for name in view.plan.replicas if _is_done(job, view, name)}
    return [name for name in view.plan.replicas if name not in up and name not in job.droppedReplicas]


def _without(job: JobRecord, view: View, record: ReplicaRecord, why: str) -> JobRecord | None:
    """Return the job without an optional replica; None if the job needs it."""
    if not view.plan.is_optional(record.name):
        return None
    event = Event(view.now, f"continues without {record.name}{why}")
    return replace(job, droppedReplicas=[*job.droppedReplicas, record.name], events=with_events(job.events, event))


def _restart_job(
    job: JobRecord,
    view: View,
    cause: str,
    record: ReplicaRecord | None = None,
    counts: bool = True,
    fault: bool = False,
    follows: str = "",
) -> JobRecord:
    """Restart the whole job from its last checkpoint, within its limit.

    After GOOD_SECONDS only the restarts that the program caused are counted. `record` is that of the replica whose end is the
    cause. It is a `fault` if the program caused it, or any restart of this replica. `follows` is the error of a peer that could
    not go on: the job's last message has it too.
    """
    plan = view.plan
    limit = restart_budget.job_limit(plan)
    fault = fault or (record is not None and (record.faults > 0 or is_fault(record.status, record.outOfMemory)))
    spent = restart_budget.used(job.restartsUsed, job.faults, view.in_state)
    if counts and spent >= limit:
        more = f", and the job was started again {limit} time{'s' if limit != 1 else ''}"
        message = exit_message(record, f"{_cause(record)}{more}") if record else f"{_sentence(cause)}{more}. {follows}".rstrip()
        return _end(job, view, JobState.FAILED, message)
    faults, events = job.faults + (counts and fault), with_events(job.events, Event(view.now, cause))
    return replace(job, attempt=job.attempt + 1, restartsUsed=spent + counts, faults=faults, droppedReplicas=[], events=events)


def _end(job: JobRecord, view: View, state: JobState, message: str = "") -> JobRecord:
    return job.to(state, endTime=view.now, errorMessage=message.rstrip("\n"), replicas=_summary(view))


def _summary(view: View) -> list[dict[str, Any]]:
    records = (view.replicas.get(name, ReplicaRecord(name)) for name in view.plan.replicas)
    current = (replace(r, state=ReplicaState.LOST) if view.lost(r.name) else r for r in records)
    return [{key: getattr(record, key) for key in _SUMMARY} for record in current]


def _name(replica: str) -> str:
    """Return `worker 0`, in Cloud ML's form."""
    role, _, index = replica.rpartition("-")
    return f"{role} {index}"


def _names(replicas: Iterable[str]) -> str:
    names = [_name(name) for name in replicas]
    return f"The replica {names[0]} is" if len(names) == 1 else f"The replicas {', '.join(names)} are"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# The first rule that has something to say wins. Success comes first: what fails after that does not matter.
_OPEN = (_cancel_requested, _ran_too_long, _exited, _crash_loops, _killed, _lost_for_good, _stalled)
_RULES = {
    JobState.QUEUED: (_cancel_requested, _prepares),
    JobState.PREPARING: (_succeeded, *_OPEN, _all_run, _never_up, _record_lost, _facts_found),
    JobState.RUNNING: (_succeeded, *_OPEN, _record_lost, _facts_found),
    JobState.CANCELLING: (_cancelled, _facts_found),
}
