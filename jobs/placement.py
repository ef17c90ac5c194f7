"""The assignment of hosts to a job's replicas.

Pure rules, which the queue applies and the commands that show a job read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class HostAssignment:
    """A record with the candidate and the assigned hosts of each replica.

    `wants` holds the candidates by preference, `hosts` the assigned hosts in the same order. Records of an older version have
    no wants: each host is that of the replica of its name.
    """

    wants: dict[str, list[str]]
    hosts: list[str]

    @property
    def wanted(self) -> dict[str, list[str]]:
        """The candidate hosts of each replica, the chief first."""
        return self.wants or {host: [host] for host in self.hosts}

    @property
    def placement(self) -> dict[str, str]:
        """The assigned host of each replica; empty before the assignment."""
        return dict(zip(self.wanted, self.hosts, strict=False))


def place(wanted: Mapping[str, Sequence[str]], taken: Collection[str]) -> dict[str, str]:
    """Assign each replica its best free host; a replica without a free candidate gets none.

    Replicas choose in turn. The result is complete if possible, as long as hosts shared by two replicas are the only
    candidates of the later one: a master falls back on the workers' hosts, a worker has no others.
    """
    placed: dict[str, str] = {}
    for replica, hosts in wanted.items():
        free = (host for host in hosts if host not in taken and host not in placed.values())
        if host := next(free, None):
            placed[replica] = host
    return placed
