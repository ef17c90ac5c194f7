"""The states of a job and of a replica, and the one table of a job's transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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
    """The state of a replica's trainer process. Only the job's record and `fab` have LOST: its host is unresponsive."""

    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    LOST = "LOST"


class TransitionError(ValueError):
    """A transition that is not in TRANSITIONS."""
