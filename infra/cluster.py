"""What every target gives back: the hosts and how to reach them. One schema, whatever made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulumi import Output, Resource

from infra.spec import ClusterSpec, Replica

SCHEMA = 1


@dataclass(frozen=True)
class HostFacts:
    """One host as a target made it; memory in bytes, hourly_cost in US dollars where the target has a price.

    `ssh_host` is what ssh connects to, where that is not the address; `create_time` is RFC 3339.
    """

    replica: Replica
    address: Output[str]
    cpus: int
    memory: int
    hourly_cost: float | None = None
    ssh_host: Output[str] | None = None
    create_time: Output[str] | None = None


@dataclass(frozen=True)
class Cluster:
    """A target's whole answer.

    `bucket` is how the hosts name the bucket, `operator_bucket` how the operator does; `host_keys` maps what ssh connects
    to to its public host key; `proxy_command` is ssh's ProxyCommand where hosts have no address that the operator reaches.
    `hourly_costs` are US dollars by role, and what is no role's, where the target has prices. `shared_cpus` is how many
    processors the hosts share, None where each has its own. `runtimes` is the folder with the Pythons that jobs bring along as
    the hosts name it, `operator_runtimes` as the operator does, who fills it; None where a target has none. `tensorflow` is the
    version that hosts have, None for the one of trainer/requirements.txt.
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
    proxy_command: str | None = None
    hourly_costs: Mapping[str, float] | None = None
    depends_on: Sequence[Resource] = field(default_factory=tuple)

    @property
    def ssh_hosts(self) -> Output[list[str]]:
        """What ssh connects to, in the order of the hosts."""
        return Output.all(*(host.ssh_host or host.address for host in self.hosts))


def inventory(stack: str, target: str, spec: ClusterSpec, labels: dict[str, str], cluster: Cluster) -> Output[dict[str, Any]]:
    """The stack outputs: what `fab` reads, and nothing that only one target has."""
    return Output.all(
        bucket=cluster.bucket,
        operator_bucket=cluster.operator_bucket,
        addresses=Output.all(*(host.address for host in cluster.hosts)),
        create_times=Output.all(*(host.create_time for host in cluster.hosts)),
    ).apply(
        lambda known: {
            "schema": SCHEMA,
            "stack": stack,
            "target": target,
            "scaleTier": str(spec.scale_tier),
            "hosts": [
                {
                    "name": host.replica.name,
                    "role": str(host.replica.role),
                    "index": host.replica.index,
                    "address": address,
                    "machineType": spec.roles[host.replica.role].machine_type,
                    "cpus": host.cpus,
                    "memoryBytes": host.memory,
                    "accelerator": _accelerator(spec, host.replica),
                    "hourlyCost": host.hourly_cost,
                    "createTime": create_time,
                }
                for host, address, create_time in zip(cluster.hosts, known["addresses"], known["create_times"], strict=True)
            ],
            "bucket": known["bucket"],
            "operatorBucket": known["operator_bucket"],
            "pollSeconds": cluster.poll_seconds,
            "sharedCpus": cluster.shared_cpus,
            "runtimes": cluster.runtimes,
            "operatorRuntimes": cluster.operator_runtimes,
            "tensorflow": cluster.tensorflow,
            "labels": labels,
        }
    )


def _accelerator(spec: ClusterSpec, replica: Replica) -> dict[str, Any] | None:
    accelerator = spec.roles[replica.role].accelerator
    return {"type": accelerator.type, "count": accelerator.count} if accelerator else None
