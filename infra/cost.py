"""The hourly cost of a cluster, from `infra/prices.yaml`: pure except for reading that file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from infra.scale_tiers import Accelerator, Role

PRICES = Path(__file__).with_name("prices.yaml")
_HOURS_A_MONTH = 730


@dataclass(frozen=True)
class HostShape:
    """The billed properties of one host of a role; memory in GiB, disk in GiB."""

    series: str
    cpus: int
    memory: float
    accelerator: Accelerator | None
    spot: bool
    disk_type: str
    disk_size: int
    public_address: bool = False


@dataclass(frozen=True)
class Cost:
    """US dollars an hour: of one host by role, of all hosts by role, of the cluster; `date` of the prices."""

    host: Mapping[Role, float]
    roles: Mapping[Role, float]
    network: float
    date: str

    @property
    def total(self) -> float:
        return round(sum(self.roles.values()) + self.network, 4)

    def line(self, region: str) -> str:
        """Return one line for people, as the preview prints it."""
        parts = [f"{role} {dollars:.2f}" for role, dollars in self.roles.items()]
        return (
            f"about {self.total:.2f} USD an hour in {region}: {', '.join(parts)}, network {self.network:.2f} "
            f"(estimated on {self.date}, without traffic and the bucket)"
        )


@cache
def price_list() -> Mapping[str, Any]:
    """Return the parsed file."""
    prices: Mapping[str, Any] = yaml.safe_load(PRICES.read_text())
    return prices


def hourly(prices: Mapping[str, Any], region: str, hosts: Mapping[Role, tuple[int, HostShape]]) -> Cost | None:
    """Return the cost of hosts by role; None if the list lacks a price of the region or of a part of a host."""
    listed = prices["regions"].get(region)
    if listed is None:
        return None
    try:
        host = {role: round(_host(listed, shape), 4) for role, (_, shape) in hosts.items()}
    except KeyError:
        return None
    count = sum(number for number, _ in hosts.values())
    return Cost(
        host=host,
        roles={role: round(number * host[role], 4) for role, (number, _) in hosts.items()},
        network=round(min(count * listed["nat"]["host"], listed["nat"]["most"]), 4),
        date=str(prices["date"]),
    )


def _host(listed: Mapping[str, Any], shape: HostShape) -> float:
    kind = "spot" if shape.spot else "onDemand"
    rates = listed["machines"][shape.series][kind]
    gpus = shape.accelerator.count * listed["gpus"][shape.accelerator.type][kind] if shape.accelerator else 0.0
    disk = shape.disk_size * listed["disks"][shape.disk_type] / _HOURS_A_MONTH
    address = listed["address"][kind] if shape.public_address else 0.0
    return float(shape.cpus * rates["vcpu"] + shape.memory * rates["gib"] + gpus + disk + address)
