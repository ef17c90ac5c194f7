"""The interface of a target, and the inventory that is made of its result."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pulumi import Input, Output, Resource

from infra.config import ClusterConfig
from infra.inventory import Host, Inventory, to_plain
from infra.scale_tiers import ClusterSpec, Replica
from infra.state import StackState


@dataclass(frozen=True)
class ClusterResources:
    """The result of a target.

    Attributes:
        hosts: by replica, the fields of its `Host` that the target alone knows.
        addresses, ssh_hosts, create_times: the same fields of the hosts in their order, as they may be outputs.
        host_keys: the public host key by what ssh connects to.
        bucket, operator_bucket: those of the `Inventory`.
        facts: further fields of the `Inventory` that the target alone knows.
        hourly_costs: US dollars by role, and of what belongs to no role; None without prices.
        ready: the resources that exist once all hosts are ready.
        guard: declares what a destroy deletes first, given what is declared before it.
    """

    hosts: Mapping[Replica, Mapping[str, Any]]
    addresses: Sequence[Input[str]]
    ssh_hosts: Sequence[Input[str]]
    create_times: Sequence[Output[str]]
    host_keys: Output[dict[str, str]]
    bucket: Input[str]
    operator_bucket: Input[str]
    facts: Mapping[str, Any]
    ready: Sequence[Resource]
    hourly_costs: Mapping[str, float] | None = None
    guard: Callable[[Sequence[Resource]], None] = lambda _: None

    def inventory(self, stack: str, spec: ClusterSpec, config: ClusterConfig) -> Output[str]:
        """Return the inventory as JSON, the stack output that `fab` reads; it holds no secret."""

        def inventory(known: Mapping[str, Any]) -> str:
            outputs = zip(known["addresses"], known["ssh_hosts"], known["create_times"], strict=True)
            hosts = tuple(
                Host(
                    name=replica.name,
                    role=replica.role,
                    index=replica.index,
                    address=address,
                    ssh_host=ssh_host,
                    host_key=known["host_keys"].get(ssh_host),
                    machine_type=spec.roles[replica.role].machine_type,
                    accelerator=to_plain(spec.roles[replica.role].accelerator),
                    create_time=create_time,
                    **facts,
                )
                for (replica, facts), (address, ssh_host, create_time) in zip(self.hosts.items(), outputs, strict=True)
            )
            record = Inventory(
                stack=stack,
                target=config.target,
                scale_tier=str(spec.scale_tier),
                hosts=hosts,
                bucket=known["bucket"],
                operator_bucket=known["operator_bucket"],
                labels=config.labels,
                **self.facts,
            )
            return json.dumps(to_plain(record), indent=1) + "\n"

        return Output.all(
            bucket=self.bucket,
            operator_bucket=self.operator_bucket,
            addresses=Output.all(*self.addresses),
            ssh_hosts=Output.all(*self.ssh_hosts),
            host_keys=self.host_keys,
            create_times=Output.all(*self.create_times),
        ).apply(inventory)


class Target(ABC):
    """A cluster on a target, before an update; the module `target` of the target's package has it as TARGET.

    The constructor reads the environment before any resource is declared. It sets `spec` to the cluster with the GPUs of its
    machine types, and raises TargetError for what the target would refuse. `state` is the stack's, which is read once a run:
    two readings may disagree.
    """

    config_type: ClassVar[type[ClusterConfig]]
    spec: ClusterSpec

    @abstractmethod
    def __init__(self, stack: str, spec: ClusterSpec, config: Any, state: StackState) -> None: ...

    @abstractmethod
    def build(self, authorized_key: Output[str]) -> ClusterResources:
        """Declare the resources."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the present content of a file of the bucket, None if it does not exist."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> None:
        """Write a file of the bucket unless it exists; TargetError if that fails."""

    def replaced_hosts(self) -> list[str]:
        """Return the existing hosts that an update would replace, if that is known before."""
        return []
