"""The queue of a cluster: which job has which hosts, and who comes next. Pure rules on one record.

`cluster/queue.json` is the one truth about who has a host. As it is one object, hosts are given to a job all at once, and no
host to two jobs, whatever happens at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jobs.checked import Record


@dataclass(frozen=True)
class Entry:
    """A job that holds its hosts, or waits for them.

    `token` tells one submission from another of the same id. maxWaitTime is in seconds, None for as long as it takes.
    """

    jobId: str
    hosts: list[str]
    held: bool = False
    priority: int = 0
    token: str = ""
    submittedBy: str = ""
    createTime: str = ""
    maxWaitTime: float | None = None


@dataclass(frozen=True)
class Queue(Record):
    """The entries in the order in which they came."""

    kind: ClassVar[str] = "the queue"

    entries: list[Entry] = field(default_factory=list)

    def entry(self, job_id: str) -> Entry | None:
        """A job's entry, None where it has none."""
        return next((entry for entry in self.entries if entry.jobId == job_id), None)

    def holder(self, host: str) -> Entry | None:
        """Who has a host."""
        return next((entry for entry in self.entries if entry.held and host in entry.hosts), None)

    def wants(self, host: str) -> bool:
        """True where somebody has this host or waits for it."""
        return any(host in entry.hosts for entry in self.entries)

    def ahead_of(self, job_id: str) -> list[Entry]:
        """Whom a job waits for: those that hold one of its hosts, and those before it that wait for one."""
        mine = self.entry(job_id)
        if mine is None or mine.held:
            return []
        first = [entry for entry in self.entries if entry.held]
        for entry in self._waiting():
            if entry.jobId == job_id:
                break
            first.append(entry)
        return [entry for entry in first if not set(entry.hosts).isdisjoint(mine.hosts)]

    def added(self, entry: Entry) -> Queue:
        """With one more at the end, which holds its hosts where they are free."""
        return replace(self, entries=[*self.entries, entry]).promoted()

    def without(self, entry: Entry) -> Queue:
        """Without this entry, its hosts given to who comes next; another submission of the same id stays."""
        left = [e for e in self.entries if (e.jobId, e.token) != (entry.jobId, entry.token)]
        return replace(self, entries=left).promoted()

    def promoted(self) -> Queue:
        """Every host that is free given away: by priority, then by time, and never past somebody who waits for it."""
        taken = {host for entry in self.entries if entry.held for host in entry.hosts}
        chosen = set()
        for entry in self._waiting():
            if taken.isdisjoint(entry.hosts):
                chosen.add(entry.jobId)
            taken.update(entry.hosts)  # also where it must wait: who comes later may not take a part of what it waits for
        if not chosen:
            return self
        return replace(self, entries=[replace(e, held=True) if e.jobId in chosen else e for e in self.entries])

    def _waiting(self) -> Iterable[Entry]:
        return sorted((entry for entry in self.entries if not entry.held), key=lambda entry: -entry.priority)
