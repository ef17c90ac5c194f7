"""`fab cancel`: the end of a job, asked for."""

from __future__ import annotations

import time
from contextlib import suppress

from jobs import lease
from jobs.canceller import Canceller
from jobs.checked import RecordError
from jobs.lease import Watch
from jobs.records import CancelRequest, JobRecord, Plan
from jobs.states import JobState, ReplicaState
from jobs.store import StoreError
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job, me, replicas_of
from ops.errors import DONE, HostsError, OpsError, UsageError

_POLL_SECONDS = 0.5
# A leader that is gone is replaced first, and hosts that say nothing are waited for.
_SLACK_SECONDS = 6 * lease.SECONDS


def cancel(cluster: Cluster, job_id: str | None, as_json: bool = False) -> int:
    """Cancel a job, the only one that goes on where none is named, and wait until it is; exit code 0 once it is CANCELLED."""
    job_id = job_id or _only_one(cluster)
    record = existing_job(cluster.ledger, job_id)
    if record.final:
        raise UsageError(f"job {job_id} is {record.state} already: there is nothing to cancel")
    with terminal.Step(f"cancelling {job_id}") as step:
        record = until_cancelled(cluster, record, step)
    if record.state is not JobState.CANCELLED:
        raise OpsError(f"job {job_id} ended before it could be cancelled: it is {record.state}")
    if as_json:
        terminal.as_json(record.to_dict())
    else:
        terminal.out(f"{job_id} {record.state}")
    return DONE


def _only_one(cluster: Cluster) -> str:
    """The job that goes on, where that needs no choice."""
    going_on = [entry.jobId for entry in cluster.ledger.queue().entries]
    if len(going_on) != 1:
        raise UsageError(f"cancel which? There are {', '.join(going_on)}" if going_on else "no job goes on: nothing to cancel")
    return going_on[0]


def until_cancelled(
    cluster: Cluster, record: JobRecord, step: terminal.Step | None = None, poll: float = _POLL_SECONDS
) -> JobRecord:
    """The job's final record; OpsError where it does not come, and replicas still live."""
    job_id, ledger = record.jobId, cluster.ledger
    request = CancelRequest(me(), now()).to_json()
    canceller = Canceller(ledger, Watch(time.monotonic), me(), job_id, request)
    seconds = _stop_seconds(cluster, job_id) + _SLACK_SECONDS
    deadline = time.monotonic() + seconds
    while True:
        try:
            record = canceller.step() or record
        except (StoreError, HostsError):
            if time.monotonic() > deadline:
                raise
        if record.final:
            return record
        if time.monotonic() > deadline:
            raise OpsError(
                f"job {job_id} is {record.state} after {seconds:.0f} s; its replicas know that they are to stop, "
                f"look again with fab describe {job_id}"
            )
        if step:
            running = [r.name for r in replicas_of(ledger, record) if r.state is not ReplicaState.EXITED]
            step.count = f"({record.state}, waiting for {', '.join(running) or 'its leader'})"
        time.sleep(poll)


def _stop_seconds(cluster: Cluster, job_id: str) -> float:
    with suppress(StoreError, RecordError):
        if plan := cluster.ledger.plan(job_id):
            return plan.stopSeconds
    return Plan.stopSeconds
