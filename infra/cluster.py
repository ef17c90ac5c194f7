"""The result of every target: the hosts and how to reach them, in one schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulumi import Output, Resource

from infra.inventory import Host, Inventory, PowerAccess, to_plain
from infra.spec import PYTHON, ClusterSpec, Replica


@dataclass(frozen=True)
class HostFacts:
    """One host as its target created it; memory in bytes, hourly_cost in US dollars or None.

    `ssh_host` is the name for ssh if it differs from the address; `create_time` is RFC 3339. `start` is the path of the start
    request below a Power's `url`, None if the host cannot be started by a request.
    """

    replica: Replica
    address: Output[str]
    cpus: float
    memory: int
    hourly_cost: float | None = None
    ssh_host: Output[str] | None = None
    create_time: Output[str] | None = None
    start: str | None = None


@dataclass(frozen=True)
class ClusterResources:
    """A target's whole answer.

    `bucket` is how the hosts name the bucket, `operator_bucket` how the operator does; `host_keys` maps what ssh connects
    to to its public host key; `proxy_command` is ssh's ProxyCommand where hosts have no address that the operator reaches.
    `hourly_costs` are US dollars by role, and what is no role's, where the target has prices. `shared_cpus` is how many
    processors the hosts share, None where each has its own. `runtimes` is the folder with the Pythons that jobs bring along as
    the hosts name it, `operator_runtimes` as the operator does, who fills it; None where a target has none. `tensorflow` is the
    version that hosts have, None for the one of trainer/requirements.txt, `python` that of their Python. `power` is None where
    `pulumi up` alone starts hosts. `last` declares what a destroy is to meet first, given what was declared before it.
    """

    hosts: Sequence[HostFacts]
    bucket: Output[str]
    operator_bucket: Output[str]
    host_keys: Output[dict[str, str]]
    poll_seconds: float
    shared_cpus: int | None = None
    runtimes: str | None = None
    operator_runtimes: str | None = None
    tensorflow: str | None = None
    python: str = PYTHON
    proxy_command: str | None = None
    power: PowerAccess | None = None
    hourly_costs: Mapping[str, float] | None = None
    depends_on: Sequence[Resource] = field(default_factory=tuple)
    last: Callable[[Sequence[Resource]], None] = lambda _: None

    @property
    def ssh_hosts(self) -> Output[list[str]]:
        """The names for ssh, in the order of the hosts."""
        return Output.all(*(host.ssh_host or host.address for host in self.hosts))


def inventory(
    stack: str, target: str, spec: ClusterSpec, labels: dict[str, str], cluster: ClusterResources
) -> Output[dict[str, Any]]:
    """Return the inventory, the stack output that `fab` reads; the same for all targets.

    It holds no secret.
    """
    return Output.all(
        bucket=cluster.bucket,
        operator_bucket=cluster.operator_bucket,
        addresses=Output.all(*(host.address for host in cluster.hosts)),
        ssh_hosts=cluster.ssh_hosts,
        host_keys=cluster.host_keys,
        create_times=Output.all(*(host.create_time for host in cluster.hosts)),
    ).apply(
        lambda known: to_plain(
            Inventory(
                stack=stack,
                target=target,
                scale_tier=str(spec.scale_tier),
                hosts=tuple(
                    Host(
                        name=host.replica.name,
                        role=host.replica.role,
                        index=host.replica.index,
                        address=address,
                        ssh_host=ssh_host,
                        host_key=known["host_keys"].get(ssh_host),
                        machine_type=spec.roles[host.replica.role].machine_type,
                        cpus=host.cpus,
                        memory_bytes=host.memory,
                        accelerator=_accelerator(spec, host.replica),
                        hourly_cost=host.hourly_cost,
                        create_time=create_time,
                        start=host.start,
                    )
                    for host, address, ssh_host, create_time in zip(
                        cluster.hosts, known["addresses"], known["ssh_hosts"], known["create_times"], strict=True
                    )
                ),
                bucket=known["bucket"],
                operator_bucket=known["operator_bucket"],
                proxy_command=cluster.proxy_command,
                poll_seconds=cluster.poll_seconds,
                shared_cpus=cluster.shared_cpus,
                runtimes=cluster.runtimes,
                operator_runtimes=cluster.operator_runtimes,
                tensorflow=cluster.tensorflow,
                python=cluster.python,
                power=cluster.power,
                labels=labels,
            )
        )
    )


def _accelerator(spec: ClusterSpec, replica: Replica) -> dict[str, Any] | None:
    accelerator = spec.roles[replica.role].accelerator
    return {"type": accelerator.type, "count": accelerator.count} if accelerator else None
