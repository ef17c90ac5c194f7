"""Which host has which replica of a job. Pure rules, which the queue applies and whoever shows a job reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class Placed:
    """What has `wants`, by replica the hosts that would do, the best first, and `hosts`, those that it got, in the same order.

    Without wants, as records of an older version are, each of the hosts is that of the replica of its name.
    """

    wants: dict[str, list[str]]
    hosts: list[str]

    @property
    def wanted(self) -> dict[str, list[str]]:
        """By replica, the chief first, the hosts that would do."""
        return self.wants or {host: [host] for host in self.hosts}

    @property
    def placement(self) -> dict[str, str]:
        """By replica the host that it got; empty until they are given out."""
        return dict(zip(self.wanted, self.hosts, strict=False))


def place(wanted: Mapping[str, Sequence[str]], taken: Collection[str]) -> dict[str, str]:
    """By replica the best host that is not taken, each for one replica; a replica for which none is left has none.

    The replicas take turns as they come, and the result is complete wherever it can be, as long as what two may both use is all
    that the later one may use: a master falls back on the workers' hosts, a worker has no others.
    """
    placed: dict[str, str] = {}
    for replica, hosts in wanted.items():
        free = (host for host in hosts if host not in taken and host not in placed.values())
        if host := next(free, None):
            placed[replica] = host
    return placed
