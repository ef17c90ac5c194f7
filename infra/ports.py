"""The ports of a cluster, and the firewall table: which role may connect to which. Every firewall enforces the table."""

from __future__ import annotations

from dataclasses import dataclass

from infra.scale_tiers import JOB_ROLES, ClusterSpec, Role

TENSORFLOW_PORT = 2222
SSH_PORT = 22
SERVING_PORT = 8501
"""TensorFlow Serving's own port for REST."""
PEER_PORTS = ((1024, SERVING_PORT - 1), (SERVING_PORT + 1, 65535))
"""The ranges, both ends included, in which replicas of one running job connect; no service of a host listens there."""


@dataclass(frozen=True)
class FirewallRow:
    """One row of the firewall table: `source` may open TCP connections to `ports` of `destination`.

    `source` None is the operator, who runs fab and ssh. `ports` are ranges, both ends included. A row with `peers` is only for
    replicas of one running job: a firewall outside the hosts checks the roles, and each host's own firewall checks the job.
    """

    source: Role | None
    destination: Role
    ports: tuple[tuple[int, int], ...]
    why: str
    peers: bool = False

    @property
    def ranges(self) -> list[str]:
        """The ports as nftables and Google write them: `22`, `1024-8500`."""
        return [str(low) if low == high else f"{low}-{high}" for low, high in self.ports]

    def has(self, port: int) -> bool:
        """Return whether the row has a port."""
        return any(low <= port <= high for low, high in self.ports)


# The servers of TensorFlow and other frameworks have no authentication: only the rows with `peers`, and the firewall inside
# each host, protect a job from the code of another. There is one master, so no row is from master to master.
# ps, master and workers may connect to the model server of serving hosts; the operator does so through ssh.
FIREWALL: tuple[FirewallRow, ...] = (
    *(FirewallRow(None, role, ((SSH_PORT, SSH_PORT),), "ssh and fab") for role in Role),
    *(
        FirewallRow(source, destination, PEER_PORTS, "replicas of one job", peers=True)
        for source in JOB_ROLES
        for destination in JOB_ROLES
        if source is not destination or source is not Role.MASTER
    ),
    *(
        FirewallRow(role, Role.SERVING, ((SERVING_PORT, SERVING_PORT),), "asks for predictions")
        for role in (Role.PS, Role.MASTER, Role.WORKER)
    ),
)


def firewall_rows(spec: ClusterSpec) -> tuple[FirewallRow, ...]:
    """Return the rows of the firewall table that concern roles of a cluster."""
    return tuple(row for row in FIREWALL if row.destination in spec.roles and row.source in (None, *spec.roles))
