"""Decide the transitions of a job: pure functions of the leader's view. Only the leader applies them."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hosts.agent import missing_libraries
from hosts.agent.replica_rules import PREEMPTED, counted_restarts, describe_end, is_fault, termination_reason
from jobs.bucket import with_remedy
from jobs.firsterror import recorded_text
from jobs.records import LATE_HEARTBEATS, Event, JobRecord, Plan, ReplicaRecord, with_events
from jobs.states import JobState, ReplicaState
from jobs.variables import RANK_NAMES

# late: heartbeats were missed. lost: silent for lostAfterSeconds, or preempted. off: the leader must start the host.
# done: exited with 0. kill: an end by a signal, by lack of memory or with a code of restartCodes, after which it may restart.
# fault: an end that the program caused: a code, a crash such as SIGSEGV, too much memory. Some faults are kills, too.
# The job SUCCEEDED once all replicas that count for success, by successPolicy, are done. It can continue without optional ones.

CONSEQUENCE_SECONDS = 30.0
"""If a peer exits within this time after a kill, the kill is taken as the cause."""
DECISION_SECONDS = 1.0
"""The wait before an exit ends a job, or a SIGTERM restarts it: another host may still report the real cause."""
# Roles whose machine type has another key in Cloud ML than `{role}Type`.
_TYPES = {"ps": "parameterServer"}
# The roles that have a rank, and how PyTorch, a lookup in os.environ, and JAX report that there is none.
_RANKED_ROLES = ("master", "worker")
_RANK_MISSED = re.compile(
    r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
    rf"|KeyError: '(?:{'|'.join(RANK_NAMES)})'"
    r"|coordinator_address should be defined"
)
# Errors of Python, rm or mv that remove JOB_DIR, HOME or /tmp, which are mount points in a read-only folder.
# A busy device in /dev has another remedy.
_BUSY_FOLDER = re.compile(
    r"^(?=.*Device or resource busy).*'(?!/dev/)[^'\n]+'"
    r"|^(?=.*Read-only file system).*'(?:/(?:var/)?tmp|/[^'\n]+/jobs/[^/'\n]+/(?:home|output(?:/\d+)?))/?'",
    re.MULTILINE,
)
_BUSY_HINT = "JOB_DIR, HOME and /tmp cannot be removed or renamed: remove what is in them, or a folder below."
_ERROR = "error: "
_SUMMARY = ("name", "state", "exitCode", "starts", "restarts", "startTime", "lastStartTime", "endTime")
_SIGTERM = describe_end(-signal.SIGTERM)
# The beginning of the event that reports a grace period; the rule finds it in the job's events and reports it only once.
_GRACE = "the job is done by its successPolicy, but "


@dataclass(frozen=True)
class View:
    """The leader's view of a job at one moment. All durations are seconds on its own monotonic clock.

    Attributes:
        silence: the time since the leader saw each replica's last new heartbeat.
        since_exit: the time since the leader saw each replica's current exit; absent if it has not exited.
        since_disruption: the time since the leader saw each replica's last kill, restart or silence of lostAfterSeconds in this
            attempt; absent if there was none.
        in_state: the time in the job's current state and attempt; in RUNNING it includes that of earlier leaders.
        since_output: the time since any trainer printed a line.
        startable: the replicas whose hosts the leader can start.
    """

    plan: Plan
    replicas: Mapping[str, ReplicaRecord]
    now: str
    silence: Mapping[str, float] = field(default_factory=dict)
    since_exit: Mapping[str, float] = field(default_factory=dict)
    since_disruption: Mapping[str, float] = field(default_factory=dict)
    in_state: float = 0.0
    since_output: float = 0.0
    cancel_requested: bool = False
    startable: Collection[str] = ()

    def silent_for(self, name: str) -> float:
        """Return the seconds since a replica's last new heartbeat."""
        return self.silence.get(name, 0.0)

    def exited_for(self, name: str) -> float:
        """Return the seconds since the leader saw a replica's exit."""
        return self.since_exit.get(name, 0.0)

    def lost(self, name: str) -> bool:
        """Return True if a replica is not done, and its host is preempted or silent for lostAfterSeconds."""
        record = self.replicas.get(name)
        if record is None or record.succeeded:
            return False
        return record.preempted or self.silent_for(name) >= self.plan.lostAfterSeconds

    def late(self, name: str) -> bool:
        """Return True if a replica is not done, and missed its heartbeats or is lost: it may be lost soon."""
        record = self.replicas.get(name)
        return record is not None and not record.succeeded and (self.lost(name) or self._is_late(name))

    def off(self, name: str) -> bool:
        """Return True if the leader must start this replica's host.

        Such a replica is not done. It was preempted and has stopped, it is silent for lostAfterSeconds, or it never reported.
        """
        record = self.replicas.get(name)
        if name not in self.startable or (record is not None and record.succeeded):
            return False
        if record is not None and record.preempted:
            return self._is_late(name)  # a host that still runs cannot be started
        return self.silent_for(name) >= self.plan.lostAfterSeconds

    def outdated(self, name: str, seconds: float) -> bool:
        """Return True if a replica runs, is not late, and sent no heartbeat in the last seconds: it may have ended since."""
        record = self.replicas.get(name)
        runs = record is not None and record.state is not ReplicaState.EXITED
        return runs and self.silent_for(name) >= seconds and not self.late(name)

    def _is_late(self, name: str) -> bool:
        return self.silent_for(name) >= LATE_HEARTBEATS * self.plan.heartbeatSeconds

    def of_attempt(self, job: JobRecord) -> Iterator[ReplicaRecord]:
        """Yield the records of this attempt, in the plan's order; records of earlier attempts are skipped."""
        records = (self.replicas.get(name) for name in self.plan.replicas)
        return (record for record in records if record is not None and record.attempt == job.attempt)

    @property
    def needed(self) -> list[str]:
        """The replicas that the job cannot continue without: all that are not optional."""
        return [name for name in self.plan.replicas if not self.plan.is_optional(name)]


def decide(job: JobRecord, view: View) -> JobRecord | None:
    """Return the job's next record, or None if nothing changes; one call makes at most one transition of `TRANSITIONS`."""
    rules = _RULES.get(job.state, (_replicas_changed, _facts_found))
    if _succeeded in rules and _seconds_since_done(job, view) is not None:
        rules = tuple(rule for rule in rules if rule not in (*_UNTIL_DONE, _start_timed_out))
    return next((new for rule in rules if (new := rule(job, view)) is not None), None)


def replicas_to_start(job: JobRecord, view: View) -> list[str]:
    """Return the replicas whose hosts the leader must start: they are off, and the job has not dropped them."""
    if job.state not in (JobState.PREPARING, JobState.RUNNING) or view.cancel_requested:
        return []
    return [name for name in view.plan.replicas if view.off(name) and name not in job.droppedReplicas]


def stopped(job: JobRecord, view: View) -> bool:
    """Return True once no trainer of the job runs. A host that is silent for long enough counts as stopped."""
    patience = 2 * view.plan.leaseSeconds if job.state is JobState.CANCELLING else view.plan.lostAfterSeconds
    records = view.replicas.values()
    return all(r.state is ReplicaState.EXITED or view.silent_for(r.name) >= patience for r in records)


def exit_message(record: ReplicaRecord, more: str = "") -> str:
    """Return Cloud ML's sentence about a failed replica with `more`, a remedy or its last line, and the end of its log."""
    name, code = _name(record.name), record.exitCode
    hint = (
        _memory_hint(record)
        or _rank_hint(record)
        or _busy_hint(record)
        or missing_libraries.remedy(record.errorMessage.splitlines())
        or with_remedy(_cause(record))
    )
    sentence = f"The replica {name} exited with a non-zero status of {code}{more}."
    return " ".join(filter(None, (sentence, hint))) + f"\n{record.errorMessage}"


def _cause(record: ReplicaRecord) -> str:
    """Return the first error of a program that exited, or its last line, such as the text of `sys.exit`; else empty.

    A first error that is no longer in the end of its log need not be why it exited.
    """
    if record.signal:
        return ""
    end = "\n".join(map(recorded_text, record.errorMessage.split("\n")))
    if record.firstError and (message := recorded_text(record.firstError.message)) in end:
        return f"First error: {message.removeprefix('error: ')}"
    return next((f"Last line: {line}" for line in reversed(record.errorMessage.split("\n")) if line.strip()), "")


def _reason_in_brackets(record: ReplicaRecord) -> str:
    """Return a signal or lack of memory in brackets, for a message with the exit code; else empty."""
    return f" ({termination_reason(record)})" if record.signal or record.outOfMemory else ""


def _memory_hint(record: ReplicaRecord) -> str:
    """Return a remedy for an out-of-memory kill: the keys of `pulumi config` for more memory; else empty."""
    if not record.outOfMemory:
        return ""
    role = record.name.rpartition("-")[0]
    limit = f"{record.memoryLimit / 1e9:.1f} GB" if record.memoryLimit else "its host has"
    keys = f"{_TYPES.get(role, role)}Type, or memory.{role} for local hosts"
    return f"This trainer needs more memory than {limit}: set a larger {keys}, by pulumi config, and run pulumi up."


def _rank_hint(record: ReplicaRecord) -> str:
    """Return a remedy for a program of PyTorch or JAX on a host without a rank; else empty."""
    role = record.name.rpartition("-")[0]
    if role in _RANKED_ROLES or not _RANK_MISSED.search(record.errorMessage):
        return ""
    return "Only the master and workers have RANK and MASTER_ADDR: --replicas master, or worker if there are some, is enough."


def _busy_hint(record: ReplicaRecord) -> str:
    """Return a remedy for a program that removes one of its own folders; else empty."""
    return _BUSY_HINT if _BUSY_FOLDER.search(record.errorMessage) else ""


def _cancelled(job: JobRecord, view: View) -> JobRecord | None:
    return _end(job, view, JobState.CANCELLED, job.errorMessage) if stopped(job, view) else None


def _replicas_changed(job: JobRecord, view: View) -> JobRecord | None:
    """Update the list of replicas of an ended job. The result is final; only this list is still updated."""
    replicas = _summary(view)
    return None if replicas == job.replicas else replace(job, replicas=replicas)


def _facts_found(job: JobRecord, view: View) -> JobRecord | None:
    """Add the facts of the chief's host, versions and the data's hash, to the manifest's summary once they are known."""
    chief = view.replicas.get(view.plan.chief)
    if chief is None or not chief.facts or "data" in job.manifest:
        return None
    return replace(job, manifest=with_facts(job.manifest, chief.facts))


def with_facts(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest, or its summary, with the facts of the chief's host."""
    return {**manifest, **facts, "versions": {**manifest.get("versions", {}), **facts.get("versions", {})}}


def _prepares(job: JobRecord, view: View) -> JobRecord | None:
    return job.to(JobState.PREPARING, prepareTime=view.now, hosts=list(view.plan.hosts.values()) or job.hosts)


def _succeeded(job: JobRecord, view: View) -> JobRecord | None:
    """End a job whose replicas that count for success are done, once the others have finished or their grace period is over.

    A request to cancel ends the grace period, too. A short job may be done before the leader saw it run: then its start time is
    its chief's.
    """
    plan, done_seconds = view.plan, _seconds_since_done(job, view)
    if done_seconds is None:
        return None
    unfinished = _unfinished(job, view) if plan.gracePeriod else []
    if unfinished and done_seconds < plan.gracePeriod and not view.cancel_requested:
        if any(event.cause.startswith(_GRACE) for event in job.events):
            return None
        if any(view.silent_for(name) and view.outdated(name, done_seconds) for name in unfinished):
            return None  # it may have ended, too
        reason = f"{_GRACE}{_still_worked(unfinished)}: up to {plan.gracePeriod:g} s are given (gracePeriod)"
        return replace(job, events=with_events(job.events, Event(view.now, reason)))
    events = list(job.events)
    for record in view.of_attempt(job):
        failed = record.state is ReplicaState.EXITED and record.exitCode and record.name not in job.droppedReplicas
        # A parameter server never ends by itself, so it is named only for an error of its own.
        if failed and not (plan.is_parameter_server(record.name) and record.awaits_restart):
            events = with_events(events, Event(view.now, _describe_ignored_exit(record, plan)))
    if unfinished:
        remedy = "to wait longer, set a longer gracePeriod, or successPolicy: all"
        verb = "was" if len(unfinished) == 1 else "were"
        text = f"{_still_worked(unfinished)} when the job ended, and {verb} stopped: {remedy}"
        events = with_events(events, Event(view.now, text))
    started = job.startTime or view.replicas[plan.chief].startTime
    return _end(replace(job, startTime=started, events=events), view, JobState.SUCCEEDED)


def _describe_ignored_exit(record: ReplicaRecord, plan: Plan) -> str:
    """Return the event for a failed replica of a job that SUCCEEDED."""
    if plan.is_optional(record.name):
        why = "its role is in optionalRoles"
    elif plan.is_parameter_server(record.name):
        why = "its log has the cause"
    else:
        why = "set successPolicy: all if the job depends on it"
    return f"{record.name} ended with {termination_reason(record)}, and its work may be missing: {why}"


def _seconds_since_done(job: JobRecord, view: View) -> float | None:
    """Return the seconds since the last replica that counts for success was done; None while one is not."""
    names = [name for name in view.plan.replicas if view.plan.counts_for_success(name)]
    return min(view.exited_for(name) for name in names) if all(_is_done(job, view, name) for name in names) else None


def _is_done(job: JobRecord, view: View, name: str) -> bool:
    """Return True if a replica is done in this attempt, or was in an earlier one and does not start again."""
    record = view.replicas.get(name)
    return record is not None and record.succeeded and (record.attempt == job.attempt or view.plan.stays_done(name))


def _unfinished(job: JobRecord, view: View) -> list[str]:
    """List the replicas that should finish by themselves and have not; without lost ones."""
    ended = {r.name for r in view.of_attempt(job) if r.state is ReplicaState.EXITED}
    others = [
        name
        for name in view.plan.replicas
        if not view.plan.is_parameter_server(name) and name not in (*ended, *job.droppedReplicas)
    ]
    return [name for name in others if not view.lost(name) and not _is_done(job, view, name)]


def _still_worked(names: Sequence[str]) -> str:
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
    """Restart the job if a peer's kill caused an exit; otherwise end it after an exit that does not restart its replica.

    A kill can be reported later than the exits that it caused. So wait before deciding, until each running peer has sent a
    heartbeat since the first exit, and wait for hosts that missed heartbeats. Without a kill the first exit is taken as the
    cause of the others.
    """
    failed = [r for r in view.of_attempt(job) if r.state is ReplicaState.EXITED and r.exitCode and not r.awaits_restart]
    if not failed:
        return None
    first_failed = max(failed, key=lambda r: view.exited_for(r.name))
    if killed_name := _find_cause(view, failed):
        record = view.replicas.get(killed_name)
        preempted = record is not None and record.terminationReason == PREEMPTED
        reason = _exit_or_sigterm_reason(record)
        how = "was preempted" if preempted else f"ended ({reason})" if reason else "was killed"
        cause = f"{_name(killed_name)} {how}, and the others could not continue without it"
        fault = record is not None and record.faults > 0
        return _restart_job(job, view, cause, counts=not preempted, fault=fault, peer_error=exit_message(first_failed))
    exit_age = view.exited_for(first_failed.name)
    peers = [name for name in view.plan.replicas if name not in {r.name for r in failed}]
    if any(view.late(name) for name in peers if not view.plan.is_optional(name)):
        return None  # it either answers soon or becomes lost; then the job waits for its host
    if exit_age < _decision_seconds(view) or any(view.outdated(name, exit_age) for name in peers):
        return None
    return _end(job, view, JobState.FAILED, _tuner_error(view.plan, first_failed) or exit_message(first_failed))


def _tuner_error(plan: Plan, record: ReplicaRecord) -> str:
    """Return the last error that the tuner printed, for a tuning job; it concerns the job, not a replica. Else empty."""
    errors = [line for line in record.errorMessage.splitlines() if line.startswith(_ERROR)] if plan.study else []
    return errors[-1].removeprefix(_ERROR) if errors else ""


def _find_cause(view: View, failed: Sequence[ReplicaRecord]) -> str | None:
    """Return the replica whose kill caused the exits, or None.

    The leader may see the kill up to CONSEQUENCE_SECONDS before the exits, or at any time after them. These are not causes, but
    consequences of the exits: a code of restartCodes seen after them, and a SIGTERM seen after them or up to DECISION_SECONDS
    before. The library sends itself SIGTERM when a peer is missing.
    """
    exit_age = max(view.exited_for(r.name) for r in failed)  # of the first exit
    exited = {r.name for r in failed}
    for name in view.plan.replicas:
        age = view.since_disruption.get(name, math.inf)
        reason = _exit_or_sigterm_reason(view.replicas.get(name))
        is_consequence = reason and age < exit_age + (_decision_seconds(view) if reason == _SIGTERM else 0.0)
        if name not in exited and age - exit_age <= CONSEQUENCE_SECONDS and not is_consequence and not view.lost(name):
            return name
    return None


def _exit_or_sigterm_reason(record: ReplicaRecord | None) -> str:
    """Return the reason if a replica to restart ended with an exit code or SIGTERM; else empty.

    A program can end itself so; it need not have been killed from outside.
    """
    reason = record.terminationReason if record is not None else ""
    return reason if reason == _SIGTERM or reason.startswith("status ") else ""


def _decision_seconds(view: View) -> float:
    """Return DECISION_SECONDS, or less if heartbeats are more frequent."""
    return min(DECISION_SECONDS, view.plan.heartbeatSeconds)


def _crash_loops(job: JobRecord, view: View) -> JobRecord | None:
    """Drop an optional replica, or end the job, if a replica repeatedly dies at once in the same way."""
    for record in view.of_attempt(job):
        if record.crashLooping and record.name not in job.droppedReplicas:
            why = f"{_reason_in_brackets(record)}, the same {record.consecutiveFailures} times in a row"
            return _drop_optional(job, view, record, why) or _end(job, view, JobState.FAILED, exit_message(record, why))
    return None


def _awaits_restart(job: JobRecord, view: View) -> JobRecord | None:
    """Handle a kill after which the host does not restart its replica: drop an optional one, or restart the whole job.

    The job ends if its restarts are used up.
    """
    for record in view.of_attempt(job):
        if not record.awaits_restart or record.name in job.droppedReplicas or record.preempted:
            continue  # a preempted one restarts with its host; if that never returns, `_lost_for_good` handles it
        if view.plan.restarts_all and not view.plan.is_optional(record.name):
            if any(view.lost(name) for name in view.needed):
                return None  # all replicas restart once the lost one is back
            if preempted_names := [
                r.name for r in view.of_attempt(job) if r.awaits_restart and r.terminationReason == PREEMPTED
            ]:
                return _restart_job(job, view, f"{_name(preempted_names[0])} was preempted", counts=False)
            age = view.since_disruption.get(record.name, math.inf)
            if record.terminationReason == _SIGTERM and age < _decision_seconds(view):
                continue  # an exit that is not reported yet may have caused it
            how = "was killed" if record.signal else "ended"
            return _restart_job(job, view, f"{_name(record.name)} {how} ({termination_reason(record)})", record)
        if record.restartsUsed < view.plan.maxRestarts:
            continue  # its agent was stopped: it restarts with its agent; if that never starts, it is lost
        why = f" ({termination_reason(record)}) after {view.plan.maxRestarts} restarts"
        return _drop_optional(job, view, record, why) or _restart_job(job, view, f"{_name(record.name)} ended{why}", record)
    return None


def _lost_for_good(job: JobRecord, view: View) -> JobRecord | None:
    """Fail the job if a needed replica has been lost for too long."""
    limit = view.plan.lostAfterSeconds + view.plan.maxWaitTime
    missing = [name for name in view.needed if view.lost(name) and view.silent_for(name) > limit]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return _end(job, view, JobState.FAILED, f"{_subject(missing)} {verb} lost: no heartbeat for {limit:g} s.")
    return None


def _record_lost(job: JobRecord, view: View) -> JobRecord | None:
    """Update the list of lost replicas, with an event for each new one and for each that is back."""
    lost_names = [name for name in view.plan.replicas if view.lost(name)]
    if lost_names == job.lostReplicas:
        return None
    events = [_lost_event(name, view) for name in lost_names if name not in job.lostReplicas]
    back = [Event(view.now, f"{name} sends heartbeats again") for name in job.lostReplicas if name not in lost_names]
    return replace(job, lostReplicas=lost_names, events=with_events(job.events, *events, *back))


def _lost_event(name: str, view: View) -> Event:
    limit = view.plan.maxWaitTime
    otherwise = "the job continues without it" if view.plan.is_optional(name) else f"else the job is FAILED in {limit:g} s"
    preempted, startable = view.replicas[name].preempted, name in view.startable
    text = f"{name} is {'preempted' if preempted else f'lost, no heartbeat for {view.plan.lostAfterSeconds:g} s'}"
    how = "its host will be started" if startable else "run pulumi up to start its host"
    return Event(view.now, f"{text}: {how}, {otherwise}")


def _stalled(job: JobRecord, view: View) -> JobRecord | None:
    """Restart the job if no trainer printed for stallTimeout, unless a needed replica is lost."""
    limit = view.plan.stallTimeout
    if limit is None or view.since_output < limit or any(view.lost(name) for name in view.needed):
        return None
    return _restart_job(job, view, f"no replica printed a line for {limit:g} s (stallTimeout)", fault=True)


def _all_run(job: JobRecord, view: View) -> JobRecord | None:
    """Set the job RUNNING once all replicas have started; it waits preparingSeconds for optional ones."""
    missing = _not_started(job, view)
    if any(not view.plan.is_optional(name) for name in missing):
        return None
    if missing and view.in_state < view.plan.preparingSeconds:
        return None
    events = [Event(view.now, f"continues without {', '.join(missing)}, which did not start")] if missing else []
    return job.to(JobState.RUNNING, startTime=view.now, events=[*job.events, *events])


def _start_timed_out(job: JobRecord, view: View) -> JobRecord | None:
    """Fail the job if a replica did not start in preparingSeconds; maxWaitTime is added if a host is off.

    There is no limit while each such replica waits for an earlier program on its host: the next job would have to wait, too.
    """
    missing = _not_started(job, view)
    busy = {record.name for record in view.of_attempt(job) if record.hostBusy and not view.lost(record.name)}
    limit = view.plan.preparingSeconds + (view.plan.maxWaitTime if any(view.off(name) for name in missing) else 0.0)
    if view.in_state <= limit or busy >= set(missing):
        return None
    return _end(job, view, JobState.FAILED, f"{_subject(missing)} did not start within {limit:g} s after the first one.")


def _not_started(job: JobRecord, view: View) -> list[str]:
    """Return the replicas that have not started in this attempt, without dropped ones. One that is done did start."""
    started = {r.name for r in view.of_attempt(job) if r.state is ReplicaState.RUNNING or r.succeeded}
    started |= {name for name in view.plan.replicas if _is_done(job, view, name)}
    return [name for name in view.plan.replicas if name not in started and name not in job.droppedReplicas]


def _drop_optional(job: JobRecord, view: View, record: ReplicaRecord, why: str) -> JobRecord | None:
    """Return the job without an optional replica; None if the job needs this one."""
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
    peer_error: str = "",
) -> JobRecord:
    """Restart the whole job from its last checkpoint, or fail it if its restarts are used up.

    If this attempt ran for STABLE_SECONDS, only the restarts that the program caused are counted.

    Args:
        job: the job.
        view: the leader's view of it.
        cause: the text of the event.
        record: the replica whose end is the cause; the message of a failed job has its exit code and its log's end.
        counts: False if the restart does not count against the limit.
        fault: True if the program caused this end, or an earlier restart of this replica; `record` may say so, too.
        peer_error: the error of a peer that could not continue; it is added to the message of a failed job.
    """
    plan = view.plan
    limit = plan.maxRestarts if plan.restarts_all else plan.maxRetries
    fault = fault or (record is not None and (record.faults > 0 or is_fault(record.status, record.outOfMemory)))
    restarts_used = counted_restarts(job, view.in_state)
    if counts and restarts_used >= limit:
        more = f", and the job was started again {limit} time{'s' if limit != 1 else ''}"
        if record:
            message = exit_message(record, f"{_reason_in_brackets(record)}{more}")
        else:
            message = f"{_capitalize(cause)}{more}. {peer_error}".rstrip()
        return _end(job, view, JobState.FAILED, message)
    faults, events = job.faults + (counts and fault), with_events(job.events, Event(view.now, cause))
    used = restarts_used + counts
    attempt = replace(job, attempt=job.attempt + 1, attemptSeconds=0.0, droppedReplicas=[])
    return replace(attempt, restartsUsed=used, faults=faults, events=events)


def _end(job: JobRecord, view: View, state: JobState, message: str = "") -> JobRecord:
    return job.to(state, endTime=view.now, errorMessage=message.rstrip("\n"), replicas=_summary(view))


def _summary(view: View) -> list[dict[str, Any]]:
    """Return the list of replicas for the job's record; lost ones are in state LOST."""
    records = (view.replicas.get(name, ReplicaRecord(name)) for name in view.plan.replicas)
    current = (replace(r, state=ReplicaState.LOST) if view.lost(r.name) else r for r in records)
    return [{key: getattr(record, key) for key in _SUMMARY} for record in current]


def _name(replica: str) -> str:
    """Return `worker 0`, in Cloud ML's form."""
    role, _, index = replica.rpartition("-")
    return f"{role} {index}"


def _subject(replicas: Iterable[str]) -> str:
    names = [_name(name) for name in replicas]
    return f"The replica {names[0]}" if len(names) == 1 else f"The replicas {', '.join(names)}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


# Rules that apply until all replicas that count for success are done; what the others do after that does not change the result.
_UNTIL_DONE = (_cancel_requested, _ran_too_long, _exited, _crash_loops, _awaits_restart, _lost_for_good, _stalled)
# The first rule that returns a record is applied. Success is checked before failures.
_RULES = {
    JobState.QUEUED: (_cancel_requested, _prepares),
    JobState.PREPARING: (_succeeded, *_UNTIL_DONE, _all_run, _start_timed_out, _record_lost, _facts_found),
    JobState.RUNNING: (_succeeded, *_UNTIL_DONE, _record_lost, _facts_found),
    JobState.CANCELLING: (_cancelled, _facts_found),
}
