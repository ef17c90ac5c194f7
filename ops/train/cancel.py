"""`fab cancel`: ask the leader of the replicas, wait for it, and end the record where there is no leader left."""

from __future__ import annotations

import time

from ops.cluster.cluster import Cluster
from ops.errors import DONE, OpsError, UsageError
from ops.ledger import LOST_SECONDS, Ledger, cancelled
from ops.show import terminal
from replica.record import JobRecord, JobState, ReplicaState

# A host that is gone counts as lost after a while, and only then is its job CANCELLED.
_WAIT_SECONDS = LOST_SECONDS + 30


def cancel(cluster: Cluster, job_id: str) -> int:
    """Cancel a job and wait until it is; exit code 0 once it is CANCELLED."""
    ledger = cluster.ledger
    record = ledger.existing_job(job_id)
    if record.final:
        raise UsageError(f"job {job_id} is {record.state} already: there is nothing to cancel")
    ledger.request_cancel(job_id)
    with terminal.Step(f"cancelling {job_id}") as step:
        record = wait(ledger, record, waiting=step)
    if record.state != JobState.CANCELLED:
        raise OpsError(f"job {job_id} ended before it could be cancelled: it is {record.state}")
    terminal.out(f"{job_id} {record.state}")
    return DONE


def wait(
    ledger: Ledger, record: JobRecord, seconds: float = _WAIT_SECONDS, poll: float = 0.5, waiting: terminal.Step | None = None
) -> JobRecord:
    """The job's final record; OpsError where it does not come, and replicas still live."""
    deadline = time.monotonic() + seconds
    while not record.final:
        # Not at once: replicas may be about to start, or their leader about to end the job.
        if ledger.last_sign(record) > LOST_SECONDS:
            return cancelled(ledger, record, "cancelled; no replica was alive")
        if time.monotonic() > deadline:
            raise OpsError(
                f"job {record.jobId} is {record.state} after {seconds:.0f} s; its replicas know that they are to stop, "
                f"look again with fab describe {record.jobId}"
            )
        if waiting:
            running = [replica.name for replica in ledger.replicas(record) if replica.state != ReplicaState.EXITED]
            waiting.count = f"({record.state}, waiting for {', '.join(running) or 'its leader'})"
        time.sleep(poll)
        record = ledger.existing_job(record.jobId)
    return record
