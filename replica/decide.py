"""What becomes of a job: pure functions of the records in the bucket, which the leader alone acts upon."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from replica.record import JobRecord, JobState, Plan, ReplicaRecord, ReplicaState, seconds_since, with_facts

_SUMMARY = ("name", "state", "exitCode", "restarts", "startTime", "endTime")


@dataclass(frozen=True)
class View:
    """What the leader sees at one moment.

    Nobody counts as silent for longer than the leader has been watching: after a reboot of the whole cluster, a suspended
    laptop or an outage of the bucket, every heartbeat is old and says nothing about its host.
    """

    plan: Plan
    replicas: Mapping[str, ReplicaRecord]
    now: str
    watching_since: str
    cancel_requested: bool = False

    def silence(self, record: ReplicaRecord) -> float:
        """Seconds without a heartbeat, as far as this leader can tell."""
        return seconds_since(max(record.heartbeatTime, self.watching_since), self.now)

    def of_attempt(self, attempt: int) -> Iterable[ReplicaRecord]:
        """The records of this attempt: what a replica did in an earlier one has been dealt with."""
        return (record for record in self.replicas.values() if record.attempt == attempt)


def leader(plan: Plan, replicas: Mapping[str, ReplicaRecord], me: str, now: str) -> str:
    """Who writes the job's record: the first of the plan that is me, or whose heartbeat is fresh."""
    for name in plan.replicas:
        record = replicas.get(name)
        if name == me or (record and seconds_since(record.heartbeatTime, now) < plan.lostAfterSeconds):
            return name
    return me


def decide(job: JobRecord, view: View) -> JobRecord | None:
    """The job's next record, or None where nothing changes. One step of the table of states at a time."""
    rules = _RULES.get(JobState(job.state), (_still_stopping, _facts_found) if job.final else _OPEN)
    return next((new for rule in rules if (new := rule(job, view))), None)


def stopped(view: View, among: Iterable[str]) -> bool:
    """True when no trainer of these replicas runs any more, lost hosts aside."""
    records = (view.replicas[name] for name in among if name in view.replicas)
    return all(r.state == ReplicaState.EXITED or view.silence(r) >= view.plan.lostAfterSeconds for r in records)


def succeeded(record: ReplicaRecord) -> bool:
    """True for a trainer that has done its work."""
    return record.state == ReplicaState.EXITED and record.exitCode == 0


def exit_message(record: ReplicaRecord, more: str = "") -> str:
    """Cloud ML's sentence about a replica that failed, and the end of its log."""
    name, code = _name(record.name), record.exitCode
    return f"The replica {name} exited with a non-zero status of {code}{more}.\n{record.errorMessage}"


def killer(record: ReplicaRecord) -> str:
    """What ended a trainer whose exit code is 128 or more: `signal 9 (SIGKILL), out of memory`, or `status 255`."""
    code = record.exitCode or 0
    try:
        name = f"signal {code - 128} ({signal.Signals(code - 128).name})"
    except ValueError:
        name = f"status {code}"
    return f"{name}, out of memory" if record.outOfMemory else name


def _cancelled(job: JobRecord, view: View) -> JobRecord | None:
    return _end(job, view, JobState.CANCELLED) if stopped(view, view.plan.replicas) else None


def _still_stopping(job: JobRecord, view: View) -> JobRecord | None:
    """A job ends before its last replica: the end stands, the list of its replicas follows them."""
    replicas = _summary(view)
    return None if replicas == job.replicas else replace(job, replicas=replicas)


def _facts_found(job: JobRecord, view: View) -> JobRecord | None:
    """The short form of the manifest gets what the chief's host found, as soon as it has."""
    chief = view.replicas.get(view.plan.chief)
    if chief is None or not chief.facts or "data" in job.manifest:
        return None
    return replace(job, manifest=with_facts(job.manifest, chief.facts))


def _prepares(job: JobRecord, view: View) -> JobRecord | None:
    return job.to(JobState.PREPARING) if view.replicas else None


def _chief_succeeded(job: JobRecord, view: View) -> JobRecord | None:
    """A short job may be done before it was seen to run: then it started when its chief did."""
    chief = view.replicas.get(view.plan.chief)
    if chief is None or not succeeded(chief):
        return None
    return _end(replace(job, startTime=job.startTime or chief.startTime), view, JobState.SUCCEEDED)


def _cancel_requested(job: JobRecord, view: View) -> JobRecord | None:
    return job.to(JobState.CANCELLING) if view.cancel_requested else None


def _exited(job: JobRecord, view: View) -> JobRecord | None:
    """The first to exit is named: the others fail for want of it."""
    failed = [r for r in view.of_attempt(job.attempt) if r.state == ReplicaState.EXITED and 0 < (r.exitCode or 0) < 128]
    if not failed:
        return None
    return _end(job, view, JobState.FAILED, exit_message(min(failed, key=lambda r: r.endTime or view.now)))


def _killed_too_often(job: JobRecord, view: View) -> JobRecord | None:
    plan = view.plan
    for record in view.of_attempt(job.attempt):
        killed = record.state == ReplicaState.EXITED and (record.exitCode or 0) >= 128
        if killed and record.restarts >= plan.maxRestarts:
            if job.attempt < plan.maxRetries:
                return replace(job, attempt=job.attempt + 1)
            spent = f"after {plan.maxRestarts} restarts and {plan.maxRetries} retries of the job"
            return _end(job, view, JobState.FAILED, exit_message(record, f" ({killer(record)}) {spent}"))
    return None


def _lost(job: JobRecord, view: View) -> JobRecord | None:
    limit = view.plan.lostForGoodSeconds
    lost = [name for name, r in view.replicas.items() if not succeeded(r) and view.silence(r) > limit]
    return _end(job, view, JobState.FAILED, f"{_names(lost)} lost: no heartbeat for {limit:g} s.") if lost else None


def _all_run(job: JobRecord, view: View) -> JobRecord | None:
    return None if _not_up(job, view) else job.to(JobState.RUNNING, startTime=view.now)


def _never_up(job: JobRecord, view: View) -> JobRecord | None:
    limit = view.plan.preparingSeconds
    first = min((r.startTime for r in view.replicas.values() if r.startTime), default=view.now)
    if seconds_since(max(first, view.watching_since), view.now) <= limit:
        return None
    return _end(job, view, JobState.FAILED, f"{_names(_not_up(job, view))} not up {limit:g} s after the first replica.")


def _not_up(job: JobRecord, view: View) -> list[str]:
    """Who has not started in this attempt; one that is already done did start."""
    up = {r.name for r in view.of_attempt(job.attempt) if r.state == ReplicaState.RUNNING or succeeded(r)}
    return [name for name in view.plan.replicas if name not in up]


def _end(job: JobRecord, view: View, state: JobState, message: str = "") -> JobRecord:
    ended = {"endTime": view.now, "errorMessage": message.rstrip("\n"), "replicas": _summary(view)}
    return job.to(state, **ended)


def _summary(view: View) -> list[dict[str, Any]]:
    records = (view.replicas.get(name, ReplicaRecord(name)) for name in view.plan.replicas)
    return [{key: getattr(record, key) for key in _SUMMARY} for record in records]


def _name(replica: str) -> str:
    return replica.replace("-", " ")


def _names(replicas: list[str]) -> str:
    listed = ", ".join(map(_name, replicas))
    return f"The replica {listed} is" if len(replicas) == 1 else f"The replicas {listed} are"


# The first rule that has something to say wins. Success comes first: what fails after the chief is done does not matter.
_OPEN = (_chief_succeeded, _cancel_requested, _exited, _killed_too_often, _lost)
_RULES = {
    JobState.QUEUED: (_cancel_requested, _prepares),
    JobState.PREPARING: (*_OPEN, _all_run, _never_up, _facts_found),
    JobState.RUNNING: (*_OPEN, _facts_found),
    JobState.CANCELLING: (_cancelled, _facts_found),
}
