"""What the leader does besides running its own replica: it moves the job's record on."""

from __future__ import annotations

import time
from collections.abc import Mapping

from replica.decide import View, decide, stopped
from replica.ledger import Ledger
from replica.record import JobRecord, Plan, ReplicaRecord, now


class Leader:
    """Every replica has one; it acts only while its replica leads."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._watching_since = now()
        self._acted_at = time.time()
        self._end_by: float | None = None
        self.settled = True
        """False while the leader of a job that has ended still waits for the others to end."""

    def act(self, job: JobRecord, replicas: Mapping[str, ReplicaRecord]) -> JobRecord:
        """The job's record as it is now in the bucket, after what had to be decided.

        `job` must have been read after `replicas`, so that what another leader just wrote is not written over.
        """
        # The wall clock, because the monotonic one stands still while a machine is suspended.
        if time.time() - self._acted_at > self._plan.lostAfterSeconds:
            self._watching_since = now()
        self._acted_at = time.time()
        view = View(self._plan, replicas, now(), self._watching_since, self._ledger.cancel_requested())
        if new := decide(job, view):
            self._ledger.write_job(new)
            job = new
        if job.final:
            # The record tells how each replica ended, so the leader stays for them; but not for ever.
            waited = self._plan.stopSeconds + 2 * self._plan.heartbeatSeconds
            self._end_by = self._end_by or time.monotonic() + waited
            self.settled = stopped(view, self._plan.replicas) or time.monotonic() > self._end_by
        return job
