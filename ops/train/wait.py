"""`fab wait`: the end of a job, waited for."""

from __future__ import annotations

from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import Cluster
from ops.errors import DONE, FAILED


def wait(cluster: Cluster, job_id: str | None, as_json: bool) -> int:
    """Wait until a job has ended; exit code 0 where it SUCCEEDED."""
    with terminal.Step(f"waiting for {job_id or 'the job'}") as step:

        def show(record: JobRecord) -> None:
            step.what, step.count = f"waiting for {record.jobId}", f"({record.state})"

        job = Client(cluster).wait(job_id, on_poll=show)
    if as_json:
        terminal.as_json(job.record.to_dict())
    else:
        terminal.out(f"{job.id} {job.state}" + (f": {job.error}" if job.error else ""))
    return DONE if job.state is JobState.SUCCEEDED else FAILED
