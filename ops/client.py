"""Python client for the jobs of a cluster; `fab` uses it, too.

    from ops.client import Client

    client = Client()
    job = client.submit("job01", package="mytrainer", args=["--rate", "0.1"])
    for line in client.logs(job.id, follow=True):
        print(line.replica, line.message)
    print(client.wait(job.id).state)

All errors are OpsError: the message is one line, `code` is the exit code of `fab`. docs/python.md has examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs import lease
from jobs.bucket import BucketError, Conflict
from jobs.chunks import LogFilter
from jobs.lease import ChangeTimer
from jobs.ledger import Stored
from jobs.progress import JobProgress
from jobs.queue_monitor import QueueMonitor
from jobs.records import CancelRequest, JobRecord, Plan, ReplicaRecord
from jobs.serialization import RecordError
from jobs.states import JobState
from jobs.times import now
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import current_user, existing_job, first_error, replicas_of
from ops.errors import FAILED, OpsError, SeveralHostsError, UsageError, explain
from ops.logs import read
from ops.logs.follow import Follower
from ops.logs.lines import LogLine, merge
from ops.submit.claim import Canceller

if TYPE_CHECKING:
    from jobs.queue import QueueEntry
    from ops.submit.submit import Submission

__all__ = ["Client", "JobHandle", "OpsError"]
_WAIT_SECONDS, _CANCEL_SECONDS = 1.0, 0.5
"""The time between two polls of a job."""
# Beyond the stop time of replicas: a lost leader is replaced first, and unresponsive hosts are waited for.
_SLACK_SECONDS = 6 * lease.SECONDS
OnPoll = Callable[[JobRecord], None]
"""Called with the job's record after each poll, until the job has ended."""


@dataclass(frozen=True)
class JobHandle:
    """The state of a job when it was read: its record, and those of its replicas, the chief first."""

    record: JobRecord
    replicas: tuple[ReplicaRecord, ...] = ()

    @property
    def id(self) -> str:
        return self.record.jobId

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def ended(self) -> bool:
        """True if it has SUCCEEDED, FAILED or been CANCELLED."""
        return self.record.final

    @property
    def error(self) -> str:
        """The first line of the reason why it failed; empty if it did not."""
        return self.record.errorMessage.partition("\n")[0]

    @property
    def progress(self) -> JobProgress | None:
        """The latest progress; None if the job reports nothing."""
        return self.record.progress

    def to_dict(self) -> dict[str, Any]:
        """Return what `fab describe --json` prints."""
        first = first_error(self.record, self.replicas)
        error = {"firstError": {"replica": first[0], **asdict(first[1])}} if first else {}
        return {**self.record.to_dict(), "replicas": [replica.to_dict() for replica in self.replicas], **error}


class Client:
    """Runs jobs on a cluster, and reads their state. Every method raises only OpsError."""

    def __init__(self, cluster: ClusterClient | None = None) -> None:
        """Use the given cluster, or that of the selected Pulumi stack."""
        with _as_ops_error():
            self._cluster = cluster or ClusterClient.load()

    def submit(
        self,
        job_id: str | None = None,
        *,
        package: str | None = None,
        module: str | None = None,
        script: str | None = None,
        command: str | None = None,
        args: Sequence[str] = (),
        config: str | None = None,
        strategy: str | None = None,
        scale_tier: str | None = None,
        replicas: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        secret: Sequence[str] = (),
        job_dir: str | None = None,
        resume: str | None = None,
        runtime: str | None = None,
        runtime_version: str | None = None,
        priority: int | None = None,
        notify: str | None = None,
        start_hosts: bool = False,
        queue: bool = True,
    ) -> JobHandle:
        """Start a job, or have it QUEUED; the parameters are the flags of `fab train`.

        Args:
            args: arguments of the trainer.
            secret: names of environment variables of this process, whose values are sent as secrets.
            queue: if False, refuse the job if other jobs have its hosts.
        """
        options = locals()
        from ops.submit.config import JobFlags
        from ops.submit.train import prepare_job

        texts = {"labels": _pairs(labels), "env": _pairs(env), "priority": None if priority is None else str(priority)}
        flags = JobFlags.of({**options, **texts, "args": None}, [str(word) for word in args])
        with _as_ops_error():
            submission = prepare_job(self._cluster, flags, package)
            self.start(submission, queue)
            return self.get(submission.job.id)

    def start(self, submission: Submission, queue: bool = True) -> list[QueueEntry]:
        """Check the hosts and submit a prepared job.

        Returns: the jobs that it waits for; none if it got its hosts.
        """
        from ops.submit import submit, train

        with _as_ops_error():
            for text in submission.job.notes:
                terminal.note(text)
            return submit.submit(self._cluster, train.check_hosts(self._cluster, submission), queue)

    def get(self, job_id: str | None = None) -> JobHandle:
        """Read a job, by default the newest one that has hosts, else the newest that started."""
        with _as_ops_error():
            record = existing_job(self._cluster.ledger, job_id)
            return JobHandle(record, tuple(replicas_of(self._cluster.ledger, record)))

    def wait(self, job_id: str | None = None, timeout: float | None = None, on_poll: OnPoll | None = None) -> JobHandle:
        """Wait until a job has ended, also while the bucket does not answer; OpsError after `timeout` seconds."""
        with _as_ops_error():
            record, failing = existing_job(self._cluster.ledger, job_id), False
            deadline = None if timeout is None else time.monotonic() + timeout
            monitor = QueueMonitor(self._cluster.ledger, ChangeTimer(time.monotonic), current_user())
            while not record.final:
                if deadline is not None and time.monotonic() >= deadline:
                    raise OpsError(f"job {record.jobId} is {record.state} after {timeout:g} s: wait again, or cancel it")
                if on_poll:
                    on_poll(record)
                time.sleep(_WAIT_SECONDS)
                try:
                    with suppress(Conflict, RecordError):
                        monitor.run_for(record)  # perhaps no other process monitors the queue
                    record = existing_job(self._cluster.ledger, record.jobId)
                    failing = False
                except (BucketError, SeveralHostsError) as error:
                    if not failing:
                        terminal.note(f"the bucket does not answer ({error}); the job continues, still waiting")
                    failing = True
            return JobHandle(record, tuple(replicas_of(self._cluster.ledger, record)))

    def logs(
        self, job_id: str | None = None, replicas: str = "all", *, lines: int | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """Read the logs of replicas, merged by time.

        Args:
            replicas: such as `master-0,worker-1`, a role, or `all`.
            lines: the number of last lines of each replica; None for all.
            follow: yield new lines until the job has ended.
        """
        with _as_ops_error():
            record = existing_job(self._cluster.ledger, job_id)
            names = read.select_replicas(record, replicas)
            if follow and not record.final:
                events = self.follow(record, names, LogFilter(lines)).events()
                yield from (event for event in events if isinstance(event, LogLine))
            else:
                yield from self.read_logs(record, names, LogFilter(lines))

    def read_logs(self, record: JobRecord, replicas: list[str], log_filter: LogFilter) -> Iterator[LogLine]:
        """Read the lines that replicas of a job have printed, merged by time."""
        with _as_ops_error():
            yield from merge(read.read_logs(self._cluster, record, replicas, log_filter).values())

    def follow(self, record: JobRecord, replicas: list[str], log_filter: LogFilter, for_screen: bool = False) -> Follower:
        """Return a follower, which yields the job's log lines, records and reasons to wait until it has ended."""
        return Follower(self._cluster.fleet, self._cluster.ledger, record, replicas, log_filter, for_screen)

    def cancel(self, job_id: str | None = None, on_poll: OnPoll | None = None) -> JobHandle:
        """Cancel a job, by default the only one that has not ended, and wait until it is CANCELLED."""
        with _as_ops_error():
            record = existing_job(self._cluster.ledger, self._only_job() if job_id is None else job_id)
            if record.final:
                raise UsageError(f"job {record.jobId} is {record.state} already: there is nothing to cancel")
            record = self._await_cancelled(record, on_poll)
            if record.state is not JobState.CANCELLED:
                raise OpsError(f"job {record.jobId} ended before it could be cancelled: it is {record.state}")
            return JobHandle(record, tuple(replicas_of(self._cluster.ledger, record)))

    def _only_job(self) -> str:
        """Return the only job that has not ended."""
        ledger = self._cluster.ledger
        queued = [entry.jobId for entry in ledger.queue().entries]
        records = ledger.jobs_named(queued)  # an ended job stays in the queue until its replicas have stopped
        jobs = [name for name in queued if not (isinstance(job := records.get(name), Stored) and job.record.final)]
        if len(jobs) != 1:
            raise UsageError(f"cancel which? There are {', '.join(jobs)}" if jobs else "every job has ended: nothing to cancel")
        return jobs[0]

    def _await_cancelled(self, record: JobRecord, on_poll: OnPoll | None) -> JobRecord:
        """Return the job's final record; OpsError if the job does not end in time."""
        job_id, ledger = record.jobId, self._cluster.ledger
        canceller = Canceller(
            ledger, ChangeTimer(time.monotonic), current_user(), job_id, CancelRequest(current_user(), now()).to_json()
        )
        seconds = self._stop_seconds(job_id) + _SLACK_SECONDS
        deadline = time.monotonic() + seconds
        while True:
            try:
                record = canceller.step() or existing_job(ledger, job_id)
            except (BucketError, SeveralHostsError):
                if time.monotonic() > deadline:
                    raise
            if record.final:
                return record
            if time.monotonic() > deadline:
                raise OpsError(
                    f"job {job_id} is {record.state} after {seconds:.0f} s; its replicas were asked to stop, "
                    f"check it with fab describe {job_id}"
                )
            if on_poll:
                on_poll(record)
            time.sleep(_CANCEL_SECONDS)

    def _stop_seconds(self, job_id: str) -> float:
        with suppress(BucketError, RecordError):
            if plan := self._cluster.ledger.plan(job_id):
                return plan.stopSeconds
        return Plan.stopSeconds


def _pairs(values: Mapping[str, str] | None) -> list[str]:
    return [f"{key}={value}" for key, value in (values or {}).items()]


@contextmanager
def _as_ops_error() -> Iterator[None]:
    """Raise an error of any library as an OpsError, with the line and the exit code that `fab` has for it."""
    try:
        yield
    except OpsError:
        raise
    except Exception as error:
        line, code = explain(error)
        raise (OpsError(line) if code == FAILED else UsageError(line)) from error
