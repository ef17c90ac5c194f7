"""Rules of an earlier version, each of which lost jobs or hosts: the checker must find them."""

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
from ops.submit.submitter import OvertakenError, Submitter


class BlockedForEver(QueueMonitor):
    """A submitter's leftovers are never cleared: a fab train that died blocks the cluster."""

    def _is_over(self, entry: QueueEntry, stored: Stored[JobRecord] | RecordError | None) -> bool:
        if stored is None or (isinstance(stored, Stored) and stored.record.lease.submitter):
            return False
        return super()._is_over(entry, stored)


class WakesLate(Submitter):
    """A submitter without a lease: it writes what it knows over whatever is there, however late that is."""

    def _write(self, change: Callable[[JobRecord], JobRecord]) -> None:
        if self._stored is None:
            raise OvertakenError(None)
        stored = Stored(change(self._stored.record), "")
        while True:
            there = self._ledger.store.read(paths.job(self._entry.jobId))
            assert there is not None
            try:
                name = paths.job(self._entry.jobId)
                self._stored = Stored(stored.record, self._ledger.store.replace(name, stored.record.to_json(), there.version))
            except Conflict:
                continue
            return


class ByTheWallClock(Leader):
    """The leader is chosen by wall clocks of different hosts, and overwrites whatever is there."""

    def leads(self, job: JobRecord) -> bool:
        return self._first_that_is_fresh() == self._name

    def may_take(self, job: JobRecord) -> bool:
        return False

    def act(self, job: Stored[JobRecord], replicas: Mapping[str, ReplicaRecord], cancel_requested: bool) -> Stored[JobRecord]:
        while True:
            try:
                return super().act(job, replicas, cancel_requested)
            except Conflict:
                there = self._ledger.store.read(paths.job(job.record.jobId))
                assert there is not None
                job = Stored(job.record, there.version)

    def _first_that_is_fresh(self) -> str:
        records = self._ledger.replicas(self._plan.jobId, self._plan.replicas)
        mine = datetime.fromisoformat(self._now())
        for name in self._plan.replicas:
            record = records.get(name)
            if name == self._name:
                return name
            if record is None:
                continue
            silent = (mine - datetime.fromisoformat(record.heartbeatTime)).total_seconds()
            if silent < self._plan.lostAfterSeconds:
                return name
        return self._name


@contextmanager
def put_back(rule: str) -> Iterator[None]:
    """Play with one of the old rules in place."""
    target, old = {
        "blocked for ever": ("hosts.agent.agent.QueueMonitor", BlockedForEver),
        "a submitter wakes late": ("cluster.Submitter", WakesLate),
        "leaders by the wall clock": ("hosts.agent.reporter.Leader", ByTheWallClock),
        "hosts stay off": ("hosts.agent.leader.to_start", lambda job, view: []),
    }[rule]
    with mock.patch(target, old):
        yield


RULES = ("blocked for ever", "a submitter wakes late", "leaders by the wall clock", "hosts stay off")
