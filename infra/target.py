"""The interface of a target, and the inventory of its resources."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pulumi import Output, Resource

from infra.config import ClusterConfig
from infra.inventory import Host, Inventory
from infra.scale_tiers import ClusterSpec, HostId
from infra.state import StackState


@dataclass(frozen=True)
class ClusterResources:
    """The properties of a target's resources that the inventory and the stack's outputs need.

    Attributes:
        hosts: for each host, the `Host` fields that only the target can fill; values may be Pulumi outputs.
        host_keys: the public host keys, by the hosts' `ssh_host`.
        inventory_fields: the `Inventory` fields that only the target can fill; values may be Pulumi outputs.
        hourly_costs: US dollars by role, and by name of what belongs to no role (`network`); None without prices.
        ready: the resources that exist once all hosts are ready.
        declare_guard: a function that declares the resource that a destroy deletes first, `BucketGuard`. Its argument is the
            resources declared before it.
    """

    hosts: Mapping[HostId, dict[str, Any]]
    host_keys: Output[dict[str, str]]
    inventory_fields: dict[str, Any]
    ready: Sequence[Resource]
    declare_guard: Callable[[Sequence[Resource]], None]
    hourly_costs: Mapping[str, float] | None = None

    def inventory(self, stack: str, spec: ClusterSpec, config: ClusterConfig) -> Output[str]:
        """Return the inventory as JSON, the stack output that `fab` reads; it holds no secret."""

        def to_json(values: Mapping[str, Any]) -> str:
            hosts = tuple(
                Host(
                    name=host_id.name,
                    role=host_id.role,
                    index=host_id.index,
                    host_key=values["host_keys"].get(fields["ssh_host"]),
                    machine_type=spec.roles[host_id.role].machine_type,
                    accelerator=asdict(gpus) if (gpus := spec.roles[host_id.role].accelerator) else None,
                    **fields,
                )
                for host_id, fields in zip(self.hosts, values["hosts"], strict=True)
            )
            record = Inventory(
                stack=stack,
                target=config.target,
                scale_tier=str(spec.scale_tier),
                hosts=hosts,
                labels=config.labels,
                **values["inventory_fields"],
            )
            return json.dumps(record.to_dict(), indent=1) + "\n"

        return Output.all(
            hosts=list(self.hosts.values()), host_keys=self.host_keys, inventory_fields=self.inventory_fields
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
