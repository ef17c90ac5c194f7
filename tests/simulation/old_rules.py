"""Rules of an earlier version that lost jobs or hosts: the checker must detect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from unittest import mock

from hosts.agent.leader import Leader
from jobs import paths
from jobs.bucket import Conflict
from jobs.ledger import Stored
from jobs.queue import QueueEntry
from jobs.queue_monitor import QueueMonitor
from jobs.records import JobRecord, ReplicaRecord
from jobs.serialization import RecordError
from ops.submit.claim import LeaseLostError, Submitter


class NeverClearsQueue(QueueMonitor):
    """Never clear the queue entries of a dead submitter, so it blocks the cluster."""

    def _end_if_abandoned(self, entry: QueueEntry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        if stored is None or (isinstance(stored, Stored) and stored.record.lease.submitter):
            return False
        return super()._end_if_abandoned(entry, stored)


class WritesWithoutLease(Submitter):
    """A submitter without a lease, which overwrites any record, however late."""

    def _write(self, change: Callable[[JobRecord], JobRecord]) -> None:
        if self._stored is None:
            raise LeaseLostError(self._entry.jobId, None)
        stored = Stored(change(self._stored.record), "")
        while True:
            current = self._ledger.store.read(paths.job(self._entry.jobId))
            assert current is not None
            try:
                name = paths.job(self._entry.jobId)
                self._stored = Stored(stored.record, self._ledger.store.replace(name, stored.record.to_json(), current.version))
            except Conflict:
                continue
            return


class LeadsByWallClock(Leader):
    """Choose the leader by wall clocks of different hosts; it overwrites any record."""

    def leads(self, job: JobRecord) -> bool:
        return self._first_fresh_replica() == self._name

    def may_take(self, job: JobRecord) -> bool:
        return False

    def act(self, job: Stored[JobRecord], replicas: Mapping[str, ReplicaRecord], cancel_requested: bool) -> Stored[JobRecord]:
        while True:
            try:
                return super().act(job, replicas, cancel_requested)
            except Conflict:
                current = self._ledger.store.read(paths.job(job.record.jobId))
                assert current is not None
                job = Stored(job.record, current.version)

    def _first_fresh_replica(self) -> str:
        records = self._ledger.replicas(self._plan.jobId, self._plan.replicas)
        own_time = datetime.fromisoformat(self._now())
        for name in self._plan.replicas:
            record = records.get(name)
            if name == self._name:
                return name
            if record is None:
                continue
            silent_seconds = (own_time - datetime.fromisoformat(record.heartbeatTime)).total_seconds()
            if silent_seconds < self._plan.lostAfterSeconds:
                return name
        return self._name


@contextmanager
def use_old_rule(rule: str) -> Iterator[None]:
    """Replace a rule by its old version within the context."""
    target, replacement = {
        "blocked for ever": ("hosts.agent.agent.QueueMonitor", NeverClearsQueue),
        "a submitter wakes late": ("cluster.Submitter", WritesWithoutLease),
        "leaders by the wall clock": ("hosts.agent.reporter.Leader", LeadsByWallClock),
        "hosts stay off": ("hosts.agent.leader.replicas_to_start", lambda job, view: []),
    }[rule]
    with mock.patch(target, replacement):
        yield


RULES = ("blocked for ever", "a submitter wakes late", "leaders by the wall clock", "hosts stay off")
