"""The restart budget: how many restarts a replica and its job may use up, and when they get them back."""

from __future__ import annotations

from jobs.records import Plan, ReplicaRecord

GOOD_SECONDS = 600.0
"""After a run of so many seconds a replica, or a job, has its restarts back, but for those that its own faults used."""


def used(restarts_used: int, faults: int, seconds: float) -> int:
    """Return how many restarts count against the limit after a run of so many seconds."""
    return faults if seconds >= GOOD_SECONDS else restarts_used


def is_spent(plan: Plan, replica: ReplicaRecord) -> bool:
    """Return True if a replica may not be restarted by itself any more."""
    return replica.restartsUsed >= plan.maxRestarts


def job_limit(plan: Plan) -> int:
    """Return how many times the whole job may start again."""
    return plan.maxRestarts if plan.whole else plan.maxRetries
