"""The records in the bucket: a job, its replicas, and the one table of the states that a job goes through.

Names are Cloud ML's (`projects.jobs`). Standard library only: `ops` reads and writes the same records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

JOB_ID = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,127}$")


class JobState(StrEnum):
    """Cloud ML's states of a job."""

    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        """True for the states that are never left."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PREPARING, JobState.CANCELLING, JobState.FAILED}),
    JobState.PREPARING: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class ReplicaState(StrEnum):
    """What a replica's trainer process does."""

    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    EXITED = "EXITED"


class TransitionError(ValueError):
    """A move that the table of states does not have."""


class RecordError(ValueError):
    """JSON that is not the record it should be."""


def now() -> str:
    """This moment as RFC 3339 in UTC with milliseconds: `2026-01-31T12:00:00.250Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_since(moment: str, until: str | None = None) -> float:
    """Seconds from one RFC 3339 moment until another, or until now."""
    end = datetime.fromisoformat(until) if until else datetime.now(UTC)
    return (end - datetime.fromisoformat(moment)).total_seconds()


def with_facts(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest, or its short form, together with what the chief's host found."""
    return {**manifest, **facts, "versions": {**manifest.get("versions", {}), **facts.get("versions", {})}}


class _Json:
    """A dataclass that travels as JSON; keys that this version does not know are dropped, so that old and new can meet."""

    def to_json(self) -> str:
        """As JSON; an argument that was not UTF-8 on the command line stays a lone surrogate, escaped."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1)  # type: ignore[call-overload]
        return text.encode("utf-8", "backslashreplace").decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record of this JSON; ValueError where it is none, RecordError where it lacks a key that has no default."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise RecordError(f"a {cls.__name__} is a JSON object, not {type(data).__name__}")
        known = fields(cls)  # type: ignore[arg-type]
        required = (f.name for f in known if f.default is MISSING and f.default_factory is MISSING)
        if missing := [name for name in required if name not in data]:
            raise RecordError(f"{cls.__name__} lacks {', '.join(missing)}")
        return cls(**{f.name: data[f.name] for f in known if f.name in data})


@dataclass(frozen=True)
class ReplicaRecord(_Json):
    """`jobs/<id>/replicas/<name>.json`, written by that replica alone; heartbeatTime tells that its host lives.

    exitCode is the shell's: 0 to 127 as the trainer exited, 128 + n where signal n killed it. outOfMemory is that of
    the trainer that ended last. facts are the chief's alone: what its host found for the manifest.
    """

    name: str
    state: str = ReplicaState.PREPARING
    exitCode: int | None = None
    outOfMemory: bool = False
    restarts: int = 0
    attempt: int = 0
    startTime: str | None = None
    endTime: str | None = None
    heartbeatTime: str = field(default_factory=now)
    errorMessage: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobRecord(_Json):
    """`jobs/<id>/job.json`: by `fab train` until the replicas start, from then on by the leader of the replicas alone.

    hourlyCost is that of all hosts in US dollars when the job was made, None where they have no price; cost is what they cost
    from its start to its end, None until then. manifest is the short form of manifest.json: package, cluster, versions, and
    data once the chief's host has hashed it.
    """

    jobId: str
    state: str = JobState.QUEUED
    createTime: str = field(default_factory=now)
    startTime: str | None = None
    endTime: str | None = None
    hourlyCost: float | None = None
    cost: float | None = None
    errorMessage: str = ""
    attempt: int = 0
    submittedBy: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    trainingInput: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    replicas: list[dict[str, Any]] = field(default_factory=list)

    @property
    def final(self) -> bool:
        return JobState(self.state).final

    def to(self, state: JobState, **changes: Any) -> JobRecord:
        """This record in another state, its startTime, or its endTime and cost, set.

        A job that never started costs from its creation. TransitionError for a move that is not in the table.
        """
        if state not in TRANSITIONS[JobState(self.state)]:
            raise TransitionError(f"job {self.jobId} cannot go from {self.state} to {state}")
        if state is JobState.RUNNING:
            changes.setdefault("startTime", now())
        if state.final:
            hours = seconds_since(self.startTime or self.createTime, changes.setdefault("endTime", now())) / 3600
            changes["cost"] = None if self.hourlyCost is None else round(self.hourlyCost * max(hours, 0), 4)
        return replace(self, state=str(state), **changes)


@dataclass(frozen=True)
class Plan(_Json):
    """`/etc/scaletier/replica.json`: all that a replica needs to know, written by `fab train`.

    `replicas` names every replica of the job, the chief first: the first of them that is alive leads. `data` are the paths,
    directories or globs of what the job trains on, which the chief's host hashes.
    A host is lost after lostAfterSeconds without a heartbeat and the job with it after lostForGoodSeconds; a job may be
    PREPARING for preparingSeconds. The wait before a restart starts at pollSeconds and doubles.
    """

    jobId: str
    replica: str
    replicas: list[str]
    module: str
    args: list[str]
    bucket: str
    packageDir: str
    data: list[str] = field(default_factory=list)
    python: str = "/opt/scaletier/venv/bin/python"
    maxRestarts: int = 5
    maxRetries: int = 3
    pollSeconds: float = 1.0
    heartbeatSeconds: float = 5.0
    lostAfterSeconds: float = 60.0
    lostForGoodSeconds: float = 120.0
    preparingSeconds: float = 300.0
    stopSeconds: float = 10.0

    @property
    def chief(self) -> str:
        return self.replicas[0]
