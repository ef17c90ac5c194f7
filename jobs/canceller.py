"""The end of a job, asked for: by its leader, or in the place of one who is gone."""

from __future__ import annotations

from contextlib import suppress

from jobs import lease
from jobs.lease import Watch
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.store import Conflict


class Canceller:
    """Ends a job: asks its leader to, and does it in the place of one who is gone."""

    def __init__(
        self, ledger: Ledger, watch: Watch, me: str, job_id: str, request: bytes, seconds: float = lease.SECONDS
    ) -> None:
        self._ledger, self._watch, self._me, self._job_id, self._request = ledger, watch, me, job_id, request
        self._seconds = seconds
        self._asked = False

    def step(self) -> JobRecord | None:
        """Look once, and do what is to do; the job as it is, None where there is none."""
        if not self._asked:
            self._ledger.request_cancel(self._job_id, self._request)
            self._asked = True
        stored = self._ledger.job(self._job_id)
        if stored is None or stored.record.final:
            return stored.record if stored else None
        job = stored.record
        # Those of its replicas that live take over long before.
        patience = self._seconds * (lease.OF_A_SUBMITTER if job.lease.submitter else 3)
        silent = self._watch.see(("lease", self._job_id), job.lease)
        if (job.state is JobState.QUEUED and job.lease.free) or silent >= patience:
            with suppress(Conflict):
                ended = job.passed(self._me).ended("" if job.lease.free else "cancelled; no replica was alive", cancelled=True)
                job = self._ledger.change_job(stored, ended).record
                self._ledger.free_hosts(self._job_id)
        return job
