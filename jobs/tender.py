"""Keeps the queue moving when those who should do it are gone. Leaders, idle hosts and who follows a job that waits tend it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from jobs import lease
from jobs.checked import RecordError
from jobs.lease import Watch
from jobs.ledger import Ledger, Stored
from jobs.power import Starter
from jobs.queue import Entry
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.store import Conflict
from jobs.submitter import NOT_HANDED_OVER
from jobs.times import now

_PAUSE_SECONDS = 3.0


class Tender:
    """Looks at every entry of the queue, every few seconds, and does what nobody else will.

    Whoever is silent is given the time of a lease on this tender's own clock. Several may tend at once: each write is
    conditional.
    """

    def __init__(
        self, ledger: Ledger, watch: Watch, me: str, seconds: float = lease.SECONDS, starter: Starter | None = None
    ) -> None:
        """`starter` has the hosts of a job started of which none lives; without one nobody does."""
        self._ledger, self._watch, self._me, self._seconds = ledger, watch, me, seconds
        self._starter = starter
        self._next = 0.0

    def now_and_then(self) -> None:
        """For whoever comes by often: a look every few seconds."""
        if self._watch.clock() >= self._next:
            self.tend()
            self._next = self._watch.clock() + _PAUSE_SECONDS

    def tend(self) -> None:
        """One look. StoreError where the bucket fails; a later look does what is left."""
        queue = self._ledger.change_queue(lambda queue: queue.promoted())
        jobs = self._ledger.jobs_named(entry.jobId for entry in queue.entries)
        for entry in queue.entries:
            with suppress(Conflict, RecordError):  # somebody else moved it on
                if self._is_over(entry, jobs.get(entry.jobId)):
                    self._ledger.change_queue(lambda queue, entry=entry: queue.without(entry))  # type: ignore[misc]
        if self._starter:
            self._starter.want(
                host for entry in queue.entries if self._forsaken(entry, jobs.get(entry.jobId)) for host in entry.hosts
            )

    def _forsaken(self, entry: Entry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        """True for a job that has its hosts, and nothing is heard of any of them: whoever of them starts first leads it."""
        if not entry.held or not isinstance(stored, Stored):
            return False
        job = stored.record
        if job.final or job.lease.submitter or job.state is JobState.CANCELLING:
            return False
        return self._unled(entry, job) >= 2 * self._seconds

    def _is_over(self, entry: Entry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        """True where an entry is to go, after its job was ended if need be."""
        if isinstance(stored, RecordError):
            return self._same(entry, "unreadable")
        if stored is None:
            if self._same(entry, "missing", lease.OF_A_SUBMITTER):
                # Its submitter is gone; this keeps what it may still have under way from making the job.
                self._ledger.create_job(_never_made(entry).passed(self._me))
                return True
            return False
        job = stored.record
        if job.final:
            return self._same(entry, job.lease)  # its leader does it as soon as all replicas have stopped
        if job.lease.submitter:
            if self._same(entry, job.lease, lease.OF_A_SUBMITTER):
                self._end(stored, NOT_HANDED_OVER)
                return True
            return False
        if entry.held and (why := self._nobody_leads(entry, job)):
            self._end(replace(stored, record=replace(job, lost=list(entry.wanted))), why)
            return True
        if job.state is JobState.QUEUED and job.lease.free:
            if self._ledger.cancel_requested(job.jobId):
                self._end(stored, "", cancelled=True)
                return True
            if not entry.held and entry.maxWaitTime is not None and self._waited(entry) >= entry.maxWaitTime:
                self._end(stored, f"it waited for its hosts for longer than maxWaitTime, {entry.maxWaitTime:g} s")
                return True
        return False

    def _nobody_leads(self, entry: Entry, job: JobRecord) -> str:
        """Why a job must end of which no replica says a thing, as all its hosts are gone; empty while it may be waited for.

        As long as one of them lives, it leads, and decides what is to become of the others.
        """
        silent = self._unled(entry, job)
        if silent < self._seconds or (plan := self._ledger.plan(job.jobId)) is None:
            return ""
        begun = job.state not in (JobState.QUEUED, JobState.PREPARING)
        patience = plan.lostAfterSeconds + plan.maxWaitTime if begun else plan.preparingSeconds
        if silent < patience:
            return ""
        what = "are lost" if begun else "have not taken it up, and count as lost"
        return f"its hosts ({', '.join(entry.hosts)}) {what}: nothing was heard of any of them for {patience:g} s"

    def _unled(self, entry: Entry, job: JobRecord) -> float:
        """The seconds for which nobody who leads it gave a sign of life."""
        return self._watch.see(("leads", entry.jobId, entry.token), str(job.lease))

    def _same(self, entry: Entry, value: object, times: int = 1) -> bool:
        """True once this has been so for the time of a lease, or that of several."""
        return self._watch.see(("tended", entry.jobId, entry.token), str(value)) >= times * self._seconds

    def _waited(self, entry: Entry) -> float:
        return self._watch.see(("waits", entry.jobId, entry.token), True)

    def _end(self, stored: Stored[JobRecord], why: str, cancelled: bool = False) -> None:
        self._ledger.change_job(stored, stored.record.passed(self._me).ended(why, cancelled))


def _never_made(entry: Entry) -> JobRecord:
    created = entry.createTime or now()
    made = JobRecord(entry.jobId, hosts=entry.hosts, wants=entry.wants, createTime=created, submittedBy=entry.submittedBy)
    return made.ended(NOT_HANDED_OVER)
