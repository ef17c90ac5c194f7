"""`fab cancel`: ask the leader of the replicas, wait for it, and end the record where there is no leader left."""

from __future__ import annotations

import time

from ops import show
from ops.errors import DONE, OpsError, UsageError
from ops.inventory import Inventory
from ops.ledger import LOST_SECONDS, Ledger, cancelled
from ops.views import open_ledger
from replica.record import JobRecord, JobState

_WAIT_SECONDS = 60.0


def cancel(inventory: Inventory, job_id: str) -> int:
    """Cancel a job and wait until it is; exit code 0 once it is CANCELLED."""
    ledger = open_ledger(inventory)
    record = ledger.existing_job(job_id)
    if record.final:
        raise UsageError(f"job {job_id} is {record.state} already: there is nothing to cancel")
    ledger.request_cancel(job_id)
    with show.Step(f"cancelling {job_id}"):
        record = wait(ledger, record)
    if record.state != JobState.CANCELLED:
        raise OpsError(f"job {job_id} ended before it could be cancelled: it is {record.state}")
    show.out(f"{job_id} {record.state}")
    return DONE


def wait(ledger: Ledger, record: JobRecord, seconds: float = _WAIT_SECONDS, poll: float = 0.5) -> JobRecord:
    """The job's final record; OpsError where it does not come, and replicas still live."""
    deadline = time.monotonic() + seconds
    while not record.final:
        if not ledger.alive(record) and _started_long_ago(ledger, record):
            return cancelled(ledger, record, "cancelled; no replica was alive")
        if time.monotonic() > deadline:
            raise OpsError(
                f"job {record.jobId} is {record.state} after {seconds:.0f} s; its replicas know that they are to stop, "
                f"look again with fab describe {record.jobId}"
            )
        time.sleep(poll)
        record = ledger.existing_job(record.jobId)
    return record


def _started_long_ago(ledger: Ledger, record: JobRecord) -> bool:
    """False for a job whose replicas may be about to start, or whose leader may be about to end it."""
    return ledger.last_sign(record) > LOST_SECONDS
