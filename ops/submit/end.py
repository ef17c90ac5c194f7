"""`fab wait` and `fab cancel`: wait for the end of a job, or ask for it."""

from __future__ import annotations

from jobs.records import JobRecord
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import replicas_of
from ops.errors import DONE, FAILED


def cancel(cluster: Cluster, job_id: str | None, as_json: bool = False) -> int:
    """Cancel a job, by default the only running one, and wait; the exit code is 0 once it is CANCELLED."""
    with terminal.Step(f"cancelling {job_id or 'the job'}") as step:

        def show(record: JobRecord) -> None:
            running = [r.name for r in replicas_of(cluster.ledger, record) if r.state is not ReplicaState.EXITED]
            step.what = f"cancelling {record.jobId}"
            step.count = f"({record.state}, waiting for {', '.join(running) or 'its leader'})"

        job = Client(cluster).cancel(job_id, show)
    if as_json:
        terminal.as_json(job.record.to_dict())
    else:
        terminal.out(f"{job.id} {job.state}")
    return DONE


def wait(cluster: Cluster, job_id: str | None, as_json: bool) -> int:
    """Wait until a job has ended; exit code 0 if it SUCCEEDED."""
    with terminal.Step(f"waiting for {job_id or 'the job'}") as step:

        def show(record: JobRecord) -> None:
            step.what, step.count = f"waiting for {record.jobId}", f"({record.state})"

        job = Client(cluster).wait(job_id, on_poll=show)
    if as_json:
        terminal.as_json(job.record.to_dict())
    else:
        terminal.out(f"{job.id} {job.state}" + (f": {job.error}" if job.error else ""))
    return DONE if job.state is JobState.SUCCEEDED else FAILED
