"""Keep the queue moving if processes are gone. Leaders, idle hosts and commands that follow a job run this monitor."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from jobs import lease
from jobs.bucket import Conflict
from jobs.host_power import HostStarter
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger, Stored
from jobs.queue import QueueEntry
from jobs.records import JobRecord, Plan
from jobs.serialization import RecordError
from jobs.states import JobState
from jobs.times import now

NOT_HANDED_OVER = "its fab train ended before the job was handed to its hosts"
PAUSE_SECONDS = 3.0
"""The time between two polls of the queue."""


class QueueMonitor:
    """Poll the queue every few seconds, and end or start jobs that no other process takes care of.

    A process counts as gone once its record has not changed for the time of a lease, on this monitor's own clock. Several
    monitors may run at once: each write is conditional.
    """

    def __init__(
        self, ledger: Ledger, timer: ChangeTimer, me: str, seconds: float = lease.SECONDS, starter: HostStarter | None = None
    ) -> None:
        """Prepare to monitor the queue; `starter` starts the hosts of a job if none of them is up."""
        self._ledger, self._timer, self._me, self._seconds = ledger, timer, me, seconds
        self._starter = starter
        self._next = 0.0
        self._first_signs: dict[tuple[str, str], str] = {}
        self.stalled = False
        """True while the record of a job that has hosts has not changed since the first poll: its hosts may all be gone."""

    def run_if_due(self) -> None:
        """Poll the queue every few seconds, however often this is called."""
        if self._timer.clock() >= self._next:
            self.run_once()
            self._next = self._timer.clock() + PAUSE_SECONDS

    def run_for(self, job: JobRecord) -> None:
        """Poll the queue, if due, while `job` waits in it or its leader has not renewed the lease for a lease time."""
        silent = self._timer.observe(("followed", job.jobId), job.lease)
        if job.state is JobState.QUEUED or (not job.final and silent >= self._seconds):
            self.run_if_due()

    def run_once(self) -> None:
        """Poll the queue once; a later poll does what is left. BucketError if the bucket fails."""
        queue = self._ledger.change_queue(lambda queue: queue.promoted())
        jobs = self._ledger.jobs_named(entry.jobId for entry in queue.entries)
        signs = {
            (entry.jobId, entry.submission_id): _sign_of_life(jobs.get(entry.jobId))
            for entry in queue.entries
            if entry.has_hosts
        }
        self.stalled = any(self._first_signs.setdefault(key, sign) == sign for key, sign in signs.items())
        for entry in queue.entries:
            with suppress(Conflict, RecordError):  # another process changed it
                if self._end_if_abandoned(entry, jobs.get(entry.jobId)):
                    self._ledger.change_queue(lambda queue, entry=entry: queue.without(entry))  # type: ignore[misc]
        if self._starter:
            self._starter.request_starts(
                host for entry in queue.entries if self._is_leaderless(entry, jobs.get(entry.jobId)) for host in entry.hosts
            )

    def _is_leaderless(self, entry: QueueEntry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        """Return True if a job has its hosts and no leader for two lease times. The first host that starts leads the job."""
        if not entry.has_hosts or not isinstance(stored, Stored):
            return False
        job = stored.record
        if job.final or job.lease.submitter or job.state is JobState.CANCELLING:
            return False
        return self._leaderless_seconds(entry, job) >= 2 * self._seconds

    def _end_if_abandoned(self, entry: QueueEntry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        """End a job if no other process will; return True if its entry is to be removed."""
        if isinstance(stored, RecordError):
            return self._unchanged_for_lease(entry, "unreadable")
        if stored is None:
            if self._unchanged_for_lease(entry, "missing", lease.SUBMITTER_FACTOR):
                # Its submitter is gone; with this record, a late write of the submitter cannot create the job.
                self._ledger.create_job(_missing_job(entry).with_holder(self._me))
                return True
            return False
        job = stored.record
        if job.final:
            # Its leader removes the entry as soon as all replicas have stopped.
            return self._unchanged_for_lease(entry, job.lease)
        if job.lease.submitter:
            if self._unchanged_for_lease(entry, job.lease, lease.SUBMITTER_FACTOR):
                self._end(stored, NOT_HANDED_OVER)
                return True
            return False
        if entry.has_hosts and (why := self._abandoned_reason(entry, job)):
            self._end(replace(stored, record=replace(job, lostReplicas=entry.replica_names)), why)
            return True
        if job.state is JobState.QUEUED and job.lease.free:
            if self._ledger.cancel_requested(job.jobId):
                self._end(stored, "", cancelled=True)
                return True
            if not entry.has_hosts and entry.maxWaitTime is not None and self._waited(entry) >= entry.maxWaitTime:
                self._end(
                    stored, f"it waited for its hosts for longer than maxWaitTime, {entry.maxWaitTime:g} s", cancelled=True
                )
                return True
        return False

    def _abandoned_reason(self, entry: QueueEntry, job: JobRecord) -> str:
        """Return why a job without a leader must end, as all its hosts are gone; empty while the monitor waits for them.

        As long as one host is alive, it leads the job, and decides about the other hosts.
        """
        silent = self._leaderless_seconds(entry, job)
        if silent < self._seconds:
            return ""
        try:
            plan = self._ledger.plan(job.jobId) or Plan
        except RecordError:
            plan = Plan  # its defaults
        started = job.state not in (JobState.QUEUED, JobState.PREPARING)
        patience = plan.lostAfterSeconds + plan.maxWaitTime if started else plan.preparingSeconds
        if silent < patience:
            return ""
        what = "are lost" if started else "did not start it, and count as lost"
        return f"its hosts ({', '.join(entry.hosts)}) {what}: none of them sent a heartbeat for {patience:g} s"

    def _leaderless_seconds(self, entry: QueueEntry, job: JobRecord) -> float:
        """Return the seconds since the last renewal by a leader."""
        return self._timer.observe(("leads", entry.jobId, entry.submission_id), str(job.lease))

    def _unchanged_for_lease(self, entry: QueueEntry, value: object, times: int = 1) -> bool:
        """Return True once this value of a submission has not changed for `times` lease times."""
        return self._timer.observe(("entry", entry.jobId, entry.submission_id), str(value)) >= times * self._seconds

    def _waited(self, entry: QueueEntry) -> float:
        return self._timer.observe(("waits", entry.jobId, entry.submission_id), True)

    def _end(self, stored: Stored[JobRecord], why: str, cancelled: bool = False) -> None:
        self._ledger.change_job(stored, stored.record.with_holder(self._me).ended(why, cancelled))


def _sign_of_life(stored: Stored[JobRecord] | RecordError | None) -> str:
    """Return a text that changes as long as another process takes care of a job."""
    return str(stored.record.lease) if isinstance(stored, Stored) else type(stored).__name__


def _missing_job(entry: QueueEntry) -> JobRecord:
    created = entry.createTime or now()
    record = JobRecord(
        entry.jobId, hosts=entry.hosts, candidates=entry.candidates, createTime=created, submittedBy=entry.submittedBy
    )
    return record.ended(NOT_HANDED_OVER)
