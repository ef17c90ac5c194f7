"""The interface of a target, and the inventory of its resources."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pulumi import Input, Output, Resource

from infra.config import ClusterConfig
from infra.inventory import Host, Inventory, to_plain
from infra.scale_tiers import ClusterSpec, HostId
from infra.state import StackState


@dataclass(frozen=True)
class ClusterResources:
    """The properties of a target's resources that the inventory and the stack's outputs need.

    Attributes:
        hosts: for each host, the `Host` fields that only the target can fill.
        addresses, ssh_hosts, create_times: these `Host` fields, one per host in the order of `hosts`; kept apart because their
            values may be Pulumi outputs.
        host_keys: the public host keys, by the names in `ssh_hosts`.
        bucket, operator_bucket: the path or URL of the bucket, for the hosts and for the operator who runs `fab`.
        inventory_fields: the other `Inventory` fields that only the target can fill.
        hourly_costs: US dollars by role, and by name of what belongs to no role (`network`); None without prices.
        ready: the resources that exist once all hosts are ready.
        declare_guard: a function that declares the resource that a destroy deletes first, `BucketGuard`. Its argument is the
            resources declared before it.
    """

    hosts: Mapping[HostId, Mapping[str, Any]]
    addresses: Sequence[Input[str]]
    ssh_hosts: Sequence[Input[str]]
    create_times: Sequence[Output[str]]
    host_keys: Output[dict[str, str]]
    bucket: Input[str]
    operator_bucket: Input[str]
    inventory_fields: Mapping[str, Any]
    ready: Sequence[Resource]
    declare_guard: Callable[[Sequence[Resource]], None]
    hourly_costs: Mapping[str, float] | None = None

    def inventory(self, stack: str, spec: ClusterSpec, config: ClusterConfig) -> Output[str]:
        """Return the inventory as JSON, the stack output that `fab` reads; it holds no secret."""

        def to_json(values: Mapping[str, Any]) -> str:
            outputs = zip(values["addresses"], values["ssh_hosts"], values["create_times"], strict=True)
            hosts = tuple(
                Host(
                    name=host_id.name,
                    role=host_id.role,
                    index=host_id.index,
                    address=address,
                    ssh_host=ssh_host,
                    host_key=values["host_keys"].get(ssh_host),
                    machine_type=spec.roles[host_id.role].machine_type,
                    accelerator=to_plain(spec.roles[host_id.role].accelerator),
                    create_time=create_time,
                    **fields,
                )
                for (host_id, fields), (address, ssh_host, create_time) in zip(self.hosts.items(), outputs, strict=True)
            )
            record = Inventory(
                stack=stack,
                target=config.target,
                scale_tier=str(spec.scale_tier),
                hosts=hosts,
                bucket=values["bucket"],
                operator_bucket=values["operator_bucket"],
                labels=config.labels,
                **self.inventory_fields,
            )
            return json.dumps(to_plain(record), indent=1) + "\n"

        return Output.all(
            bucket=self.bucket,
            operator_bucket=self.operator_bucket,
            addresses=Output.all(*self.addresses),
            ssh_hosts=Output.all(*self.ssh_hosts),
            host_keys=self.host_keys,
            create_times=Output.all(*self.create_times),
        ).apply(to_json)


class Target(ABC):
    """A target, for one cluster, before an update; a target's package assigns its subclass to TARGET in `target.py`.

    The constructor reads the environment before any resource is declared. It sets `spec` to the cluster, with the GPUs that its
    machine types include, and raises TargetError if the target would refuse the cluster. `state` is the stack's state, read
    only once per run, because a second read could differ.
    """

    config_type: ClassVar[type[ClusterConfig]]
    spec: ClusterSpec

    @abstractmethod
    def __init__(self, stack: str, spec: ClusterSpec, config: Any, state: StackState) -> None: ...

    @abstractmethod
    def build(self, authorized_key: Output[str]) -> ClusterResources:
        """Declare the resources."""

    @abstractmethod
    def read_object(self, path: str) -> bytes | None:
        """Return the current content of an object in the bucket, None if it does not exist."""

    @abstractmethod
    def create_object(self, path: str, content: bytes) -> None:
        """Write an object in the bucket unless it exists; raise TargetError if that fails."""

    def replaced_hosts(self) -> list[str]:
        """Return the existing hosts that the update will replace, as far as the target knows before it."""
        return []
