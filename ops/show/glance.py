"""All that the bucket says of who does what now, in one read of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from jobs import paths
from jobs.checked import RecordError
from jobs.ledger import Ledger
from jobs.queue import Entry, Queue
from jobs.records import JobRecord, ReplicaRecord
from jobs.store import Item


@dataclass(frozen=True)
class Glance:
    """The queue, the records of the jobs in it, and those of the replicas that have a host, by job and name."""

    queue: Queue
    jobs: Mapping[str, JobRecord]
    replicas: Mapping[tuple[str, str], ReplicaRecord]


class Looker:
    """Looks at the bucket again and again. What the look before has seen is asked for at once, in one call of the store; only
    what is new takes a second one."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: set[str] = set()

    def look(self) -> Glance:
        """How it is now, a record that cannot be read as one that is not there. StoreError where the bucket fails, RecordError
        for the queue of a newer version."""
        items = self._ledger.store.read_all([paths.QUEUE, *sorted(self._known)])
        queue = self._queue(items.pop(paths.QUEUE, None))
        wanted = {name for entry in queue.entries for name in _concerning(entry)}
        if new := wanted - self._known:
            items |= self._ledger.store.read_all(sorted(new))
        self._known = wanted
        return Glance(queue, dict(_jobs(queue, items)), dict(_replicas(queue, items)))

    def _queue(self, item: Item | None) -> Queue:
        if item is None:
            return Queue()
        try:
            return Queue.from_json(item.content)
        except RecordError:
            return self._ledger.queue()  # which makes a new one of the jobs


def _concerning(entry: Entry) -> Iterator[str]:
    """The objects that say how a job in the queue is."""
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
