"""The bucket's records of the queue and its jobs, in one read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from jobs import paths
from jobs.checked import RecordError
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord
from jobs.store import Item


@dataclass(frozen=True)
class ClusterSnapshot:
    """The queue, the records of its jobs, and those of the replicas that have a host, by job and name."""

    queue: Queue
    jobs: Mapping[str, JobRecord]
    replicas: Mapping[tuple[str, str], ReplicaRecord]


class SnapshotReader:
    """Polls the bucket. The objects of the poll before are read in one call; only new ones need a second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: set[str] = set()

    def look(self) -> ClusterSnapshot:
        """Return the state now; an unreadable record counts as missing.

        Raises:
            StoreError: if the bucket fails.
            RecordError: if the queue is of a newer version.
        """
        items = self._ledger.store.read_all([paths.QUEUE, *sorted(self._known)])
        queue = self._queue(items.pop(paths.QUEUE, None))
        names = {name for entry in queue.entries for name in _concerning(entry)}
        if new := names - self._known:
            items |= self._ledger.store.read_all(sorted(new))
        self._known = names
        return ClusterSnapshot(queue, dict(_jobs(queue, items)), dict(_replicas(queue, items)))

    def _queue(self, item: Item | None) -> Queue:
        if item is None:
            return Queue()
        try:
            return Queue.from_json(item.content)
        except RecordError:
            return self._ledger.queue()  # which makes a new one of the jobs


def _concerning(entry: QueueEntry) -> Iterator[str]:
    """Yield the objects with the state of a job in the queue."""
    yield paths.job(entry.jobId)
    if entry.held:
        yield from (paths.replica(entry.jobId, name) for name in entry.placement)


def _jobs(queue: Queue, items: Mapping[str, Item]) -> Iterator[tuple[str, JobRecord]]:
    for entry in queue.entries:
        if item := items.get(paths.job(entry.jobId)):
            with suppress(RecordError):
                yield entry.jobId, JobRecord.from_json(item.content)


def _replicas(queue: Queue, items: Mapping[str, Item]) -> Iterator[tuple[tuple[str, str], ReplicaRecord]]:
    for entry in queue.entries:
        for name in entry.placement if entry.held else ():
            if item := items.get(paths.replica(entry.jobId, name)):
                with suppress(RecordError):
                    yield (entry.jobId, name), ReplicaRecord.from_json(item.content)
