"""Configuration that only the local target has."""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar

from pydantic import Field, field_validator

from infra.config import ClusterConfig, ConfigError
from infra.spec import ClusterSpec, Role

_SIZE = re.compile(r"^(\d+)\s*(MiB|GiB)$")
_UNIT = {"MiB": 2**20, "GiB": 2**30}
MIN_MEMORY = 256 * 2**20
MIN_DISK = 2**30
MIN_SHARE = 0.05
DISK = 4 * 2**30
"""Bytes that a host may write by default; the image, 0.5 GB, counts."""
# What a role's block of addresses in the stack's /24 has room for (infra/lxd/layout.py).
MAX_REPLICAS_PER_ROLE = 60


class LxdConfig(ClusterConfig):
    """Configuration keys of the LXD target.

    `cpus` and `memory` override a role's share of this machine: `cpus.worker: 2`, `memory.ps: 1GiB`. If cpus is below one, it
    is a guaranteed share of one processor, as long as the sum of all shares fits: `cpus.worker: 0.25`.

    `disk` is the limit of a host's disk by role, `bucket_size` that of the bucket; in bytes, None for half of its pool.
    """

    cpus: dict[Role, int | float] = Field(default_factory=dict)
    memory: dict[Role, int] = Field(default_factory=dict)
    disk: dict[Role, int] = Field(default_factory=dict)
    bucket_size: int | None = None
    network: ipaddress.IPv4Network | None = None
    storage_pool: str = "scaletier"

    json_keys: ClassVar[frozenset[str]] = ClusterConfig.json_keys | {"cpus", "memory", "disk"}

    @field_validator("cpus")
    @classmethod
    def _cpus(cls, value: dict[Role, int | float]) -> dict[Role, int | float]:
        if not all(
            float(some).is_integer() if some >= 1 else some >= MIN_SHARE and round(some, 2) == some for some in value.values()
        ):
            raise ValueError(f"write a whole number of cpus, 1 or more, or a share of one, {MIN_SHARE:g} to 0.99")
        return {role: int(some) if some >= 1 else some for role, some in value.items()}

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: dict[str, object]) -> dict[str, int]:
        return {role: _size(text, MIN_MEMORY, "256MiB or more, such as 512MiB or 2GiB") for role, text in value.items()}

    @field_validator("disk", mode="before")
    @classmethod
    def _disk(cls, value: dict[str, object]) -> dict[str, int]:
        return {role: _size(text, MIN_DISK, "1GiB or more, such as 8GiB") for role, text in value.items()}

    @field_validator("bucket_size", mode="before")
    @classmethod
    def _bucket_size(cls, value: object) -> int:
        return _size(value, MIN_DISK, "1GiB or more, such as 16GiB")

    @field_validator("network")
    @classmethod
    def _network(cls, value: ipaddress.IPv4Network | None) -> ipaddress.IPv4Network | None:
        if value and (value.prefixlen != 24 or not value.is_private):
            raise ValueError("write a private /24 range, such as 10.77.0.0/24")
        return value

    def disk_of(self, role: Role) -> int:
        """Return the limit of the root disk of a role's host in bytes."""
        return self.disk.get(role, DISK)

    def spec(self) -> ClusterSpec:
        """Return the cluster of this configuration.

        Raises:
            ConfigError: the stack has too few addresses, besides the errors of every target.
        """
        spec = super().spec()
        for role, role_spec in spec.roles.items():
            if role_spec.count > MAX_REPLICAS_PER_ROLE:
                raise ConfigError(f"{role} count {role_spec.count} is too high; valid are 0 to {MAX_REPLICAS_PER_ROLE}")
        return spec


def _size(text: object, least: int, valid: str) -> int:
    match = _SIZE.match(str(text))
    size = int(match[1]) * _UNIT[match[2]] if match else 0
    if size < least:
        raise ValueError(f"write a size of {valid}")
    return size
