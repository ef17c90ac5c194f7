"""Check prices: the list covers all machines and GPUs, and sums are those of Google's calculator."""

from __future__ import annotations

import pytest
from stackmocks import PROJECT, Program

from infra.cost import HostSpec, hourly, price_list
from infra.gcp.machines import _N1_GPUS, MACHINES
from infra.scale_tiers import Accelerator, Role


def test_the_list_names_its_source_and_prices_everything() -> None:
    prices = price_list()
    assert str(prices["source"]).startswith("https://cloud.google.com/")
    assert str(prices["date"])
    for region in prices["regions"].values():
        assert {machine.series for machine in MACHINES.values()} <= region["machines"].keys()
        assert {*_N1_GPUS, *(kind.accelerator.type for kind in MACHINES.values() if kind.accelerator)} <= region["gpus"].keys()
        for price in (*region["machines"].values(), *region["gpus"].values()):
            assert {"onDemand", "spot"} <= price.keys()
        assert all(item["spot"] < item["onDemand"] for item in region["gpus"].values())


@pytest.mark.parametrize(
    ("name", "dollars"),
    [("n1-standard-4", 0.1900), ("n1-highcpu-8", 0.2834), ("n1-highmem-8", 0.4732), ("n1-highcpu-16", 0.5668),
     ("g2-standard-4", 0.7068), ("a2-highgpu-1g", 3.6734)],
)  # fmt: skip
def test_machine_types_cost_what_google_lists(name: str, dollars: float) -> None:
    machine = MACHINES[name]
    shape = HostSpec(machine.series, machine.cpus, machine.memory, machine.accelerator, False, "pd-ssd", 0)
    cost = hourly(price_list(), "us-central1", {Role.MASTER: (1, shape)})
    assert cost.host[Role.MASTER] == pytest.approx(dollars, abs=2e-4)


def test_gpus_disks_spot_and_addresses_add_up() -> None:
    machine = MACHINES["n1-standard-8"]
    shape = HostSpec("n1", machine.cpus, machine.memory, Accelerator("nvidia-tesla-t4", 2), True, "pd-ssd", 730, True)
    cost = hourly(price_list(), "us-west1", {Role.MASTER: (1, shape), Role.WORKER: (3, shape)})
    assert cost
    per_host = 8 * 0.006655 + 30 * 0.000892 + 2 * 0.14 + 0.170 + 0.0025
    assert cost.host[Role.WORKER] == pytest.approx(per_host, abs=1e-4)
    assert cost.roles[Role.WORKER] == pytest.approx(3 * per_host, abs=3e-4)
    assert cost.total == pytest.approx(4 * per_host + 4 * 0.0014, abs=5e-4)
    assert hourly(price_list(), "africa-south1", {Role.MASTER: (1, shape)}) is None


def test_the_stack_exports_its_cost_by_role(program: Program) -> None:
    stack = program("gcp", scaleTier="PREMIUM_1", servingCount="2")
    by_role = stack.exports["hourlyCostByRole"]
    assert set(by_role) == {"ps", "master", "worker", "serving", "network"}
    assert by_role["serving"] == pytest.approx(2 * by_role["worker"] / 19, abs=1e-3)
    assert stack.exports["hourlyCost"] == pytest.approx(sum(by_role.values()), abs=1e-3)
    hosts = sum(host["hourlyCost"] for host in stack.inventory["hosts"])
    assert stack.exports["hourlyCost"] == pytest.approx(hosts + by_role["network"], abs=0.01)
    spot = program("gcp", scaleTier="PREMIUM_1", servingCount="2", provisioningModel='{"worker": "SPOT"}').exports["hourlyCost"]
    assert spot < stack.exports["hourlyCost"] / 2 + 2


def test_a_region_without_prices_has_no_cost_and_is_no_error(program: Program) -> None:
    stack = program("gcp", provider={"project": PROJECT, "zone": "europe-west4-a"}, scaleTier="BASIC")
    assert "hourlyCost" not in stack.exports
    assert stack.inventory["hosts"][0]["hourlyCost"] is None
