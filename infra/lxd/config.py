"""Configuration that only the local target has."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from infra.config import ClusterConfig, private_range
from infra.scale_tiers import Role, suggest

# Cloud ML's own machine types.
_CLOUD_ML = re.compile(
    r"standard(_gpu|_p100|_v100)?|large_model(_v100)?|complex_model_s|complex_model_[ml](_gpu|_p100|_v100)?|cloud_tpu"
)
# The form of Compute Engine's: n1-standard-4, a2-highgpu-1g, custom-4-8192, e2-micro.
_KINDS = (
    *("standard", "highmem", "highcpu", "megamem", "ultramem", "hypermem", "custom"),
    *("highgpu", "megagpu", "ultragpu", "edgegpu", "maxgpu", "hightpu"),
)
_COMPUTE_ENGINE = re.compile(
    rf"[a-z]+\d[a-z]*-(micro|small|medium)|([a-z]+\d[a-z]*-({'|'.join(_KINDS)})|custom)(-[a-z1-9][a-z0-9]*)+"
)
_UNIT = {"MiB": 2**20, "GiB": 2**30}
DISK = 4 * 2**30
"""The default limit of a host's disk in bytes, which includes the image (0.5 GB)."""
# The number of addresses in a role's block of the stack's /24; the block of the master is smaller (infra/lxd/layout.py).
MAX_HOSTS_PER_ROLE = 60


def _size(least: int, valid: str) -> BeforeValidator:
    """Return a validator that turns a size such as 2GiB into bytes."""

    def parse(text: object) -> int:
        match = re.match(r"^(\d+)\s*(MiB|GiB)$", str(text))
        if not match or (size := int(match[1]) * _UNIT[match[2]]) < least:
            raise ValueError(f"write a size of {valid}")
        return size

    return BeforeValidator(parse)


def _cpus(number: float) -> float:
    """Return a whole number of processors, or a share of one with at most two decimals."""
    if not (float(number).is_integer() if number >= 1 else number >= 0.05 and round(number, 2) == number):
        raise ValueError("write a whole number of cpus, 1 or more, or a share of one, 0.05 to 0.99")
    return int(number) if number >= 1 else number


class LxdConfig(ClusterConfig):
    """Configuration keys of the LXD target.

    `cpus` and `memory` override a role's share of this machine: `cpus.worker: 2`, `memory.ps: 1GiB`. If cpus is below one, it
    is a guaranteed share of one processor, as long as the sum of all shares fits: `cpus.worker: 0.25`.

    `disk` is the limit of a host's disk by role, `bucket_size` that of the bucket; in bytes, None for half of its pool.
    """

    cpus: dict[Role, Annotated[float, AfterValidator(_cpus)]] = Field(default_factory=dict)
    memory: dict[Role, Annotated[int, _size(2**28, "256MiB or more, such as 512MiB or 2GiB")]] = Field(default_factory=dict)
    disk: dict[Role, Annotated[int, _size(2**30, "1GiB or more, such as 8GiB")]] = Field(default_factory=dict)
    bucket_size: Annotated[int, _size(2**30, "1GiB or more, such as 16GiB")] | None = None
    network: Annotated[ipaddress.IPv4Network, private_range("10.77.0.0/24")] | None = None
    storage_pool: str = "scaletier"

    json_keys: ClassVar[frozenset[str]] = ClusterConfig.json_keys | {"cpus", "memory", "disk"}
    max_hosts: ClassVar[Mapping[Role, int]] = dict.fromkeys(Role, MAX_HOSTS_PER_ROLE)

    @field_validator("master_type", "worker_type", "parameter_server_type", "evaluator_type", "serving_type")
    @classmethod
    def _machine_type(cls, name: str | None) -> str | None:
        if name and not _CLOUD_ML.fullmatch(name) and not _COMPUTE_ENGINE.fullmatch(name):
            series, _, rest = name.partition("-")
            _, dash, size = rest.partition("-")
            close = filter(_COMPUTE_ENGINE.fullmatch, (f"{series}-{each}{dash}{size}" for each in _KINDS))
            raise ValueError(
                "write a machine type of Compute Engine, such as n1-standard-4, or of Cloud ML, such as large_model"
                f"{suggest(name, close, 0.8)}"
            )
        return name

    def disk_of(self, role: Role) -> int:
        """Return the limit of the root disk of a role's host in bytes."""
        return self.disk.get(role, DISK)
