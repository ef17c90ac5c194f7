"""The hourly cost of a cluster, from `infra/prices.yaml`: pure except for reading that file."""

from __future__ import annotations

import math
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
class HostSpec:
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
    """US dollars an hour: of one `host` by role, of all hosts of a role, of the `network`; `date` of the prices."""

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


def round_up(dollars: float) -> str:
    """Return a cost rounded up to whole cents, so that this maxHourlyCost allows it."""
    return f"{math.ceil(round(dollars * 100, 2)) / 100:.2f}"


@cache
def price_list() -> Mapping[str, Any]:
    """Return the parsed `prices.yaml`."""
    prices: Mapping[str, Any] = yaml.safe_load(PRICES.read_text())
    return prices


def hourly(prices: Mapping[str, Any], region: str, hosts: Mapping[Role, tuple[int, HostSpec]]) -> Cost | None:
    """Return the cost of hosts by role; None if the list lacks the region, or a price of a part of a host."""
    region_prices = prices["regions"].get(region)
    if region_prices is None:
        return None
    try:
        host = {role: round(_host_cost(region_prices, host_spec), 4) for role, (_, host_spec) in hosts.items()}
    except KeyError:
        return None
    count = sum(number for number, _ in hosts.values())
    return Cost(
        host=host,
        roles={role: round(number * host[role], 4) for role, (number, _) in hosts.items()},
        network=round(min(count * region_prices["nat"]["host"], region_prices["nat"]["most"]), 4),
        date=str(prices["date"]),
    )


def _host_cost(prices: Mapping[str, Any], host_spec: HostSpec) -> float:
    kind = "spot" if host_spec.spot else "onDemand"
    rates = prices["machines"][host_spec.series][kind]
    gpus = host_spec.accelerator.count * prices["gpus"][host_spec.accelerator.type][kind] if host_spec.accelerator else 0.0
    disk = host_spec.disk_size * prices["disks"][host_spec.disk_type] / _HOURS_A_MONTH
    address = prices["address"][kind] if host_spec.public_address else 0.0
    return float(host_spec.cpus * rates["vcpu"] + host_spec.memory * rates["gib"] + gpus + disk + address)
