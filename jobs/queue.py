"""The queue of a cluster: which job has which hosts, and who comes next. Pure rules on one record.

`cluster/queue.json` is the one truth about who has a host. As it is one object, hosts are given to a job all at once, and no
host to two jobs, whatever happens at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jobs.checked import Record
from jobs.placement import Placed, place


@dataclass(frozen=True)
class Entry(Placed):
    """A job that holds its `hosts`, or waits for some of those that it wants.

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
    wants: dict[str, list[str]] = field(default_factory=dict)

    def may_use(self) -> set[str]:
        """The hosts that it holds, or those that it may be given."""
        return set(self.hosts) if self.held else {host for hosts in self.wanted.values() for host in hosts}

    def must_have(self) -> set[str]:
        """The hosts that it holds, or without which it cannot run."""
        return set(self.hosts) if self.held else {hosts[0] for hosts in self.wanted.values() if len(hosts) == 1}

    def replica_on(self, host: str) -> str:
        """The replica that has this host; empty where it is none of its own."""
        return next((replica for replica, its in self.placement.items() if its == host), "")


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

    def concerning(self, host: str) -> list[Entry]:
        """Who has this host, and who waits for it or one like it."""
        return [entry for entry in self.entries if host in entry.may_use()]

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
        return [entry for entry in first if not entry.may_use().isdisjoint(mine.may_use())]

    def added(self, entry: Entry) -> Queue:
        """With one more at the end, which holds hosts where enough of them are free."""
        return replace(self, entries=[*self.entries, entry]).promoted()

    def without(self, entry: Entry) -> Queue:
        """Without this entry, its hosts given to who comes next; another submission of the same id stays."""
        left = [e for e in self.entries if (e.jobId, e.token) != (entry.jobId, entry.token)]
        return replace(self, entries=left).promoted()

    def promoted(self) -> Queue:
        """Every host that is free given away: by priority, then by time, and never past somebody who waits for it."""
        placed = self._placed()
        given = {e.jobId: list(placed[e.jobId].values()) for e in self._waiting() if len(placed[e.jobId]) == len(e.wanted)}
        if not given:
            return self
        promoted = [replace(e, held=True, hosts=given[e.jobId]) if e.jobId in given else e for e in self.entries]
        return replace(self, entries=promoted)

    def kept(self) -> dict[str, str]:
        """By host the job for which it is kept, as that one waits for more."""
        return {host: job_id for job_id, placed in self._placed().items() for host in placed.values()}

    def _placed(self) -> dict[str, dict[str, str]]:
        """By job that waits, what it would be given now, by replica: all of it, or a part that is kept for it.

        Also a part, as who comes later may not take what another waits for.
        """
        taken = {host for entry in self.entries if entry.held for host in entry.hosts}
        found = {}
        for entry in self._waiting():
            found[entry.jobId] = place(entry.wanted, taken)
            taken.update(found[entry.jobId].values())
        return found

    def _waiting(self) -> Iterable[Entry]:
        return sorted((entry for entry in self.entries if not entry.held), key=lambda entry: -entry.priority)
