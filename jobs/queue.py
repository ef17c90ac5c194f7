"""The queue of a cluster: which job has which hosts, and which job is next. Pure functions of one record.

`cluster/queue.json` is the only source of which job has a host. As it is one object, a job gets all its hosts at once, and no
two jobs get the same host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jobs.serialization import Record


class HostAssignment:
    """A record with the candidate and the assigned hosts of each replica.

    `candidates` has the candidate hosts of each replica by preference, the chief first. `hosts` has the assigned ones in the
    order of the replicas. Records of an older version have no candidates: each host is that of the replica of its name.
    """

    candidates: dict[str, list[str]]
    hosts: list[str]

    @property
    def candidate_hosts(self) -> dict[str, list[str]]:
        """The candidate hosts by replica, the chief first."""
        return self.candidates or {host: [host] for host in self.hosts}

    @property
    def replica_names(self) -> list[str]:
        """The replicas, the chief first; empty if the record does not have them."""
        return list(self.candidate_hosts)

    @property
    def placement(self) -> dict[str, str]:
        """The assigned host of each replica; empty before the assignment."""
        return dict(zip(self.replica_names, self.hosts, strict=False))


def place(candidates: Mapping[str, Sequence[str]], busy: Collection[str]) -> dict[str, str]:
    """Assign each replica its best free host; a replica without a free candidate gets none.

    Replicas choose in order. This finds a complete assignment, if there is one, as long as a replica that shares candidates
    with an earlier one has no further candidates: a master may fall back on the workers' hosts, a worker only has those.
    """
    placed: dict[str, str] = {}
    for replica, hosts in candidates.items():
        free = (host for host in hosts if host not in busy and host not in placed.values())
        if host := next(free, None):
            placed[replica] = host
    return placed


@dataclass(frozen=True)
class QueueEntry(HostAssignment):
    """A job that has its `hosts` (`has_hosts`), or waits for some of its candidates.

    `submission_id` tells one submission from another of the same job id. maxWaitTime is in seconds, None for no limit.
    """

    old_names: ClassVar[Mapping[str, str]] = {"candidates": "wants"}
    json_key: ClassVar = staticmethod(lambda name: {"has_hosts": "held", "submission_id": "token"}.get(name, name))

    jobId: str
    hosts: list[str]
    has_hosts: bool = False
    priority: int = 0
    submission_id: str = ""
    submittedBy: str = ""
    createTime: str = ""
    maxWaitTime: float | None = None
    candidates: dict[str, list[str]] = field(default_factory=dict)

    def usable_hosts(self) -> set[str]:
        """Return the hosts that the job holds, or its candidates while it waits."""
        return set(self.hosts) if self.has_hosts else {host for hosts in self.candidate_hosts.values() for host in hosts}

    def required_hosts(self) -> set[str]:
        """Return the hosts that the job holds, or, while it waits, those without which it cannot run."""
        return set(self.hosts) if self.has_hosts else {hosts[0] for hosts in self.candidate_hosts.values() if len(hosts) == 1}

    def replica_on(self, host: str) -> str:
        """Return the replica on this host, or empty if the job has none there."""
        return next((replica for replica, assigned in self.placement.items() if assigned == host), "")


@dataclass(frozen=True)
class Queue(Record):
    """The entries in the order of submission."""

    kind: ClassVar[str] = "the queue"

    entries: list[QueueEntry] = field(default_factory=list)

    def entry(self, job_id: str) -> QueueEntry | None:
        """Return a job's entry, or None if it has none."""
        return next((entry for entry in self.entries if entry.jobId == job_id), None)

    def holder(self, host: str) -> QueueEntry | None:
        """Return the entry that holds a host."""
        return next((entry for entry in self.entries if entry.has_hosts and host in entry.hosts), None)

    def entries_for(self, host: str) -> list[QueueEntry]:
        """Return the entry that holds this host, and the waiting ones that have it among their candidates."""
        return [entry for entry in self.entries if host in entry.usable_hosts()]

    def ahead_of(self, job_id: str) -> list[QueueEntry]:
        """Return the entries that a job waits for. They hold a host that it can use, or wait before it for one."""
        mine = self.entry(job_id)
        if mine is None or mine.has_hosts:
            return []
        ahead = [entry for entry in self.entries if entry.has_hosts]
        for entry in self._waiting():
            if entry.jobId == job_id:
                break
            ahead.append(entry)
        return [entry for entry in ahead if not entry.usable_hosts().isdisjoint(mine.usable_hosts())]

    def added(self, entry: QueueEntry) -> Queue:
        """Return the queue with one more entry at the end, which holds hosts if enough are free."""
        return replace(self, entries=[*self.entries, entry]).promoted()

    def without(self, entry: QueueEntry) -> Queue:
        """Return the queue without this entry, its hosts assigned to the next jobs. Another submission of the same id stays."""
        others = [e for e in self.entries if (e.jobId, e.submission_id) != (entry.jobId, entry.submission_id)]
        return replace(self, entries=others).promoted()

    def promoted(self) -> Queue:
        """Return the queue with free hosts assigned by priority, then time; no job overtakes an earlier one in that order."""
        placed = self._placed()
        assigned = {
            e.jobId: list(placed[e.jobId].values()) for e in self._waiting() if len(placed[e.jobId]) == len(e.replica_names)
        }
        if not assigned:
            return self
        promoted = [replace(e, has_hosts=True, hosts=assigned[e.jobId]) if e.jobId in assigned else e for e in self.entries]
        return replace(self, entries=promoted)

    def reserved_hosts(self) -> dict[str, str]:
        """Return for each reserved host the job that waits for more hosts."""
        return {host: job_id for job_id, placed in self._placed().items() for host in placed.values()}

    def _placed(self) -> dict[str, dict[str, str]]:
        """Return the hosts that each waiting job would get now, by replica; a part of them stays reserved from later jobs."""
        busy = {host for entry in self.entries if entry.has_hosts for host in entry.hosts}
        placements = {}
        for entry in self._waiting():
            placements[entry.jobId] = place(entry.candidate_hosts, busy)
            busy.update(placements[entry.jobId].values())
        return placements

    def _waiting(self) -> Iterable[QueueEntry]:
        return sorted((entry for entry in self.entries if not entry.has_hosts), key=lambda entry: -entry.priority)
