"""The ports of a cluster, and the table of who may reach whom on them, which every firewall enforces."""

from __future__ import annotations

from dataclasses import dataclass

from infra.scale_tiers import JOB_ROLES, ClusterSpec, Role

TENSORFLOW_PORT = 2222
SSH_PORT = 22
SERVING_PORT = 8501
"""TensorFlow Serving's own port for REST."""
PEER_PORTS = ((1024, SERVING_PORT - 1), (SERVING_PORT + 1, 65535))
"""The ranges, both ends included, in which replicas of one running job reach one another: no service of a host is there."""


@dataclass(frozen=True)
class Allow:
    """One row of the firewall table: `source` may open TCP connections to `ports` of `destination`.

    `source` None is the operator, who runs fab and ssh. `ports` are ranges with both ends. A row for `peers` lets through
    between replicas of one running job alone: around hosts a firewall goes by roles, and each host by the job that it has.
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
        """Return whether a port is one of the row's."""
        return any(low <= port <= high for low, high in self.ports)


# TensorFlow's gRPC server has no authentication, nor have others: the rows for peers, and what each host makes of them, are all
# that stands between a job and the code of another. There is one master, so it has no peer of its role.
# ps, master and workers may ask for predictions; from outside they are asked for through ssh.
FIREWALL: tuple[Allow, ...] = (
    *(Allow(None, role, ((SSH_PORT, SSH_PORT),), "ssh and fab") for role in Role),
    *(
        Allow(source, destination, PEER_PORTS, "replicas of one job", peers=True)
        for source in JOB_ROLES
        for destination in JOB_ROLES
        if source is not destination or source is not Role.MASTER
    ),
    *(
        Allow(role, Role.SERVING, ((SERVING_PORT, SERVING_PORT),), "asks for predictions")
        for role in (Role.PS, Role.MASTER, Role.WORKER)
    ),
)


def allowed(spec: ClusterSpec) -> tuple[Allow, ...]:
    """Return the rows of the firewall table that concern roles of a cluster."""
    return tuple(row for row in FIREWALL if row.destination in spec.roles and row.source in (None, *spec.roles))
