"""`fab train`: submit a job by the Python client, and follow it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from jobs.chunks import LogFilter
from jobs.records import JobRecord
from jobs.states import JobState
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, failure_hint, format_elapsed, replica_names
from ops.errors import DETACHED, DONE, FAILED, OpsError
from ops.screen import logs
from ops.submit import outcome, preview
from ops.submit.config import JobFlags
from ops.submit.submit import Submission
from ops.submit.train import prepare_job


def train(
    cluster: ClusterClient, flags: JobFlags, folder: str | None, may_wait: bool, follow: bool, as_json: bool, plain: bool = True
) -> int:
    """Run a job; the exit code is 0 if it SUCCEEDED, or was started or QUEUED with `follow` False.

    On a terminal a screen shows the job, or with `plain` its lines.
    """
    return run_submission(cluster, lambda: prepare_job(cluster, flags, folder), may_wait, follow, as_json, plain)


def dry_run(cluster: ClusterClient, flags: JobFlags, folder: str | None, as_json: bool) -> int:
    """Show what `train` would send, and send nothing; query no host, and build no runtime."""
    submission = prepare_job(cluster, flags, folder, dry=True)
    for text in submission.job.notes:
        terminal.note(text)
    return preview.show(submission, as_json)


def run_submission(
    cluster: ClusterClient, prepare: Callable[[], Submission], may_wait: bool, follow: bool, as_json: bool, plain: bool
) -> int:
    """Run the submission that `prepare` returns; for JSON print the job's record, and nothing else, on stdout."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        submission = prepare()
        code = run(cluster, submission, may_wait, follow, plain or as_json)
    if as_json:
        terminal.print_json(existing_job(cluster.ledger, submission.job.id).to_dict())
    return code


def run(cluster: ClusterClient, submission: Submission, may_wait: bool, follow: bool, plain: bool = True) -> int:
    """Check the hosts, submit the job, and follow it; the exit code is that of `train`."""
    ahead, job_id = Client(cluster).start(submission, may_wait), submission.job.id
    if not follow:
        how = f"is QUEUED behind {', '.join(entry.jobId for entry in ahead)}" if ahead else "is started"
        terminal.out(f"{job_id} {how}: fab logs all --job {job_id} --follow, fab describe {job_id}")
        return DONE
    return watch(cluster, submission.record(), plain)


def watch(cluster: ClusterClient, job: JobRecord, plain: bool = True) -> int:
    """Show a job's logs until it ends; the exit code is 0 if it SUCCEEDED, and DETACHED after Ctrl-C."""
    job_id, names = job.jobId, replica_names(job)
    try:
        record = logs.follow_job(cluster, job, names, LogFilter(), False, plain)
    except KeyboardInterrupt as stop:
        what = f"is still {stop.args[0]}" if any(stop.args) else "continues, or waits for its turn"
        how = f"fab logs all --job {job_id} --follow comes back to it, fab cancel {job_id} stops it"
        terminal.note(f"\n{job_id} {what}: {how}")
        return DETACHED
    if record is None:
        raise OpsError(f"job {job_id} has no record any more: fab jobs lists the others")
    return _report_end(cluster, record)


def _report_end(cluster: ClusterClient, record: JobRecord) -> int:
    job_id, state = record.jobId, record.state
    took = f" after {elapsed}" if (elapsed := format_elapsed(record)) else ""
    if state == JobState.SUCCEEDED:
        first, *others = outcome.describe_output(cluster, record) or [""]
        terminal.note(f"{job_id} {state}{took}" + (f": {first}" if first else ""))
        for line in others:
            terminal.note(line)
        return DONE
    why = record.errorMessage.partition("\n")[0].rstrip(".")
    more = "; ".join(filter(None, (f"fab describe {job_id}", failure_hint(record))))
    terminal.error(f"{job_id} {state}{took}{f': {why}' if why else ''} ({more})")
    for line in outcome.describe_unsaved_of(cluster, record):
        terminal.note(line)
    return FAILED
