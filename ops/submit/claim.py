"""The submitter's side of a job: claim id and hosts, hold the first lease, and hand off the job.

If the submitting process is killed before the hand-off, it no longer renews the lease: the next process that polls the queue
ends the job and frees its hosts (`jobs.queue_monitor`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from jobs import lease
from jobs.bucket import Conflict
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger, Stored
from jobs.queue import Queue, QueueEntry
from jobs.queue_monitor import NOT_HANDED_OVER
from jobs.records import JobRecord
from jobs.states import JobState
from ops.errors import OpsError, UsageError


class DuplicateIdError(UsageError):
    """The id is that of another job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job id {job_id!r} was used before, and an id is used once: take another (fab jobs lists them)")


class BusyError(Exception):
    """The hosts are not free and queueing was not requested; `ahead` are the entries in front."""

    def __init__(self, ahead: Sequence[QueueEntry]) -> None:
        super().__init__(", ".join(entry.jobId for entry in ahead))
        self.ahead = list(ahead)


class LeaseLostError(OpsError):
    """The submitter has lost the job's lease: it expired and another holder has it, or the job has ended.

    `record` is the job's present record, None if there is none.
    """

    def __init__(self, job_id: str, record: JobRecord | None) -> None:
        self.record = record
        if record is None:
            super().__init__(f"the record of job {job_id} is gone from the bucket: start it again under another id")
        else:
            why = f": {first}" if (first := record.errorMessage.partition("\n")[0]) else ""
            super().__init__(f"job {job_id} continued without this fab train, and is {record.state}{why}")


class CancelledError(OpsError):
    """The job's cancellation was requested while it was being submitted."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} was cancelled while it was being submitted")


class Submitter:
    """One submission. `renew` may be called from another thread than the rest."""

    def __init__(self, ledger: Ledger, record: JobRecord, me: str, max_wait: float | None = None) -> None:
        """Prepare the submission of a record; `me` identifies this submission alone."""
        self._ledger = ledger
        self._record = replace(record.with_holder(me, submitter=True), state=JobState.QUEUED)
        self._me = me
        self._entry = QueueEntry(
            record.jobId,
            record.hosts,
            candidates=record.candidates,
            priority=record.priority,
            submission_id=me,
            submittedBy=record.submittedBy,
            createTime=record.createTime,
            maxWaitTime=max_wait,
        )
        self._stored: Stored[JobRecord] | None = None
        self._creating = False
        self._lock = threading.Lock()

    def claim(self, may_wait: bool) -> list[QueueEntry]:
        """Enter the queue and create the job; return the entries that it waits for, none if its hosts are assigned.

        DuplicateIdError if the id is used, and BusyError if it would wait and may not: nothing was changed. LeaseLostError if
        the bucket was so slow that a queue monitor has ended the job.
        """

        def enter(queue: Queue) -> Queue:
            before = queue.entry(self._entry.jobId)
            if before is not None:
                if before.submission_id != self._me:
                    raise DuplicateIdError(self._entry.jobId)
                return queue
            new = queue.added(self._entry)
            if not may_wait and (ahead := new.ahead_of(self._entry.jobId)):
                raise BusyError(ahead)
            return new

        self._ledger.change_queue(enter)
        try:
            self._creating = True
            with self._lock:
                self._stored = self._ledger.create_job(self._record)
        except Conflict:
            self._creating = False
            self._ledger.change_queue(lambda queue: queue.without(self._entry))
            there = self._ledger.job(self._entry.jobId)
            if there and (there.record.createTime, there.record.errorMessage) == (self._entry.createTime, NOT_HANDED_OVER):
                raise LeaseLostError(self._entry.jobId, there.record) from None  # created by a queue monitor in our place
            raise DuplicateIdError(self._entry.jobId) from None
        return self.ahead()

    def ahead(self) -> list[QueueEntry]:
        """Return the entries that the job waits for; empty if it has its hosts."""
        queue = self._ledger.queue()
        mine = queue.entry(self._entry.jobId)
        if mine and mine.submission_id == self._me:
            self._entry = mine
        return queue.ahead_of(self._entry.jobId)

    @property
    def usable_hosts(self) -> set[str]:
        """The hosts that the job had at the last `claim` or `ahead`; its candidates if it had none."""
        return self._entry.usable_hosts()

    def renew(self) -> None:
        """Renew the lease, every few seconds; CancelledError if the job's end was requested, LeaseLostError if it is lost."""
        if self._ledger.cancel_requested(self._entry.jobId):
            raise CancelledError(self._entry.jobId)
        self._write(lambda job: job)

    def prepare(self) -> None:
        """Set the state to PREPARING: the plan is in the bucket, and hosts may start; LeaseLostError if the lease is lost."""
        hosts = self._entry.hosts
        self._write(lambda job: job if job.state is JobState.PREPARING else job.to(JobState.PREPARING, hosts=hosts))

    def hand_over(self) -> None:
        """Free the lease for the job's replicas, as all that they need is in the bucket; LeaseLostError if it is lost."""
        try:
            self._write(lambda job: job.with_holder(""))
        except LeaseLostError as error:
            # Our write may have succeeded although its answer was lost, and a replica may have the lease already.
            if error.record is None or error.record.lease.submitter or error.record.errorMessage == NOT_HANDED_OVER:
                raise

    def give_up(self, why: str, cancelled: bool = False) -> JobRecord | None:
        """End the submission, wherever it was interrupted; a job that was handed over continues.

        Returns: the job's present record; None if there is none.
        """
        if self._stored is None and self._creating:
            # The answer was lost, so the record may exist, or appear later: create it here, with the job ended.
            with suppress(Conflict):
                self._ledger.create_job(self._record.ended(why, cancelled))
            stored = self._ledger.job(self._entry.jobId)
            if stored is not None and stored.record.lease.holder == self._me:
                self._stored = stored
        if self._stored is not None and self._stored.record.lease.holder != self._me:
            return self._stored.record  # it was handed over
        record = None
        try:
            self._write(lambda job: job if job.final else job.ended(why, cancelled))
            record = self._stored.record if self._stored else None
        except LeaseLostError as error:
            record = error.record
        if record is None or record.final:
            self._ledger.change_queue(lambda queue: queue.without(self._entry))
        return record

    def _write(self, change: Callable[[JobRecord], JobRecord]) -> None:
        with self._lock:
            while True:
                if self._stored is None:
                    raise LeaseLostError(self._entry.jobId, None)
                try:
                    new = change(self._stored.record)
                    if new.lease == self._stored.record.lease:
                        new = replace(new, lease=new.lease.renewed())  # every write is a sign of life
                    self._stored = self._ledger.change_job(self._stored, new)
                except Conflict:
                    # The other version may be of our own last write, whose answer was lost.
                    fresh = self._ledger.job(self._entry.jobId)
                    mine = self._stored.record.lease
                    if (
                        fresh is None
                        or fresh.record.final
                        or fresh.record.lease != replace(mine, heartbeatSeq=fresh.record.lease.heartbeatSeq)
                    ):
                        raise LeaseLostError(self._entry.jobId, fresh.record if fresh else None) from None
                    self._stored = fresh
                    continue
                return


class Canceller:
    """Cancels a job: requests that from its leader, and ends the job itself if the leader is silent."""

    def __init__(
        self, ledger: Ledger, watch: ChangeTimer, me: str, job_id: str, request: bytes, seconds: float = lease.SECONDS
    ) -> None:
        self._ledger, self._watch, self._me, self._job_id, self._request = ledger, watch, me, job_id, request
        self._seconds = seconds
        self._requested = False

    def step(self) -> JobRecord | None:
        """Poll once and do what is due; return the job's present record, None if there is none."""
        if not self._requested:
            self._ledger.request_cancel(self._job_id, self._request)
            self._requested = True
        stored = self._ledger.job(self._job_id)
        if stored is None or stored.record.final:
            return stored.record if stored else None
        job = stored.record
        # If a replica is alive, it takes the lease long before.
        patience = self._seconds * (lease.SUBMITTER_FACTOR if job.lease.submitter else 3)
        silent = self._watch.observe(("lease", self._job_id), job.lease)
        if (job.state is JobState.QUEUED and job.lease.free) or silent >= patience:
            with suppress(Conflict):
                ended = job.with_holder(self._me).ended(
                    "" if job.lease.free else "cancelled; no replica was alive", cancelled=True
                )
                job = self._ledger.change_job(stored, ended).record
                self._ledger.free_hosts(self._job_id)
        return job
