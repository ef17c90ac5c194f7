"""`fab wait`: the end of a job, waited for."""

from __future__ import annotations

import time

from jobs.states import JobState
from jobs.store import StoreError
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job
from ops.errors import DONE, FAILED, HostsError


def wait(cluster: Cluster, job_id: str | None, as_json: bool, poll: float = 1.0) -> int:
    """Wait until a job has ended; exit code 0 where it SUCCEEDED."""
    record, failing = existing_job(cluster.ledger, job_id), False
    job_id = record.jobId
    with terminal.Step(f"waiting for {job_id}") as step:
        while not record.final:
            step.count = f"({record.state})"
            time.sleep(poll)
            try:
                record = existing_job(cluster.ledger, job_id)
                failing = False
            except (StoreError, HostsError) as error:
                if not failing:
                    terminal.note(f"the bucket does not answer ({error}); the job goes on, and so does the waiting")
                failing = True
    if as_json:
        terminal.as_json(record.to_dict())
    else:
        why = record.errorMessage.partition("\n")[0]
        terminal.out(f"{job_id} {record.state}" + (f": {why}" if why else ""))
    return DONE if record.state is JobState.SUCCEEDED else FAILED
