"""Check a cluster against Google's API before creation: the zone, the machine types, the remaining quotas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from fakegoogle import FakeGoogle

from infra.gcp.api import GcpError
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery, ExistingHost, discover, local_catalogue
from infra.gcp.machines import MACHINES, MachineType
from infra.gcp.names import names
from infra.gcp.preflight import preflight, quota_usage
from infra.gcp.zones import Place, places
from infra.scale_tiers import Accelerator, ClusterSpec, Role, RoleSpec, ScaleTier, SpecError, custom, preset

PROJECT = "my-project-1"
A, B = (Place(PROJECT, "us-central1", f"us-central1-{letter}") for letter in "ab")
OWN = names(PROJECT, "dev")
COMPUTE = f"/compute/v1/projects/{PROJECT}"
REGION, GPUS, INSTANCES = (
    f"{COMPUTE}/regions/us-central1",
    f"{COMPUTE}/aggregated/acceleratorTypes",
    f"{COMPUTE}/aggregated/instances",
)
STANDARD = preset(ScaleTier.STANDARD_1)


class Google(FakeGoogle):
    """Respond by path without its query, page by page if a list has several."""

    def answer(self, path: str) -> tuple[int, Any]:
        return super().answer(unquote(path.partition("?")[0]))


@pytest.fixture
def fake() -> Iterator[Google]:
    with Google().serving() as fake:
        yield fake


def machine_types_path(zone: str) -> str:
    return f"{COMPUTE}/zones/{zone}/machineTypes"


def machine_list(*machines: MachineType, more: str = "") -> tuple[int, dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for machine in machines:
        item: dict[str, Any] = {"name": machine.name, "guestCpus": machine.cpus, "memoryMb": int(machine.memory * 1024)}
        if gpu := machine.accelerator:
            item["accelerators"] = [{"guestAcceleratorType": gpu.type, "guestAcceleratorCount": gpu.count}]
        items.append(item)
    return 200, {"items": items} | ({"nextPageToken": more} if more else {})


def gpu_list(**zones: list[str]) -> tuple[int, dict[str, Any]]:
    """Return GPUs by zone, `_` for `-`."""
    items = {
        f"zones/{zone.replace('_', '-')}": {"acceleratorTypes": [{"name": gpu} for gpu in types]}
        for zone, types in zones.items()
    }
    return 200, {"items": {"zones/empty": {"warning": {}}, **items}}


def instance_list(
    *replicas: str, zone: str = A.zone, kind: str = "n1-highcpu-8", prefix: str = OWN.prefix
) -> tuple[int, dict[str, Any]]:
    items = [
        {
            "name": f"{prefix}-{replica}",
            "machineType": f"https://x/zones/{zone}/machineTypes/{kind}",
            "scheduling": {"provisioningModel": "SPOT" if replica.startswith("worker") else "STANDARD"},
            "disks": [{"diskSizeGb": "100"}],
            "guestAccelerators": [{"acceleratorType": "https://x/nvidia-tesla-t4", "acceleratorCount": 1}],
        }
        for replica in replicas
    ]
    return 200, {"items": {"zones/other-a": {}, f"zones/{zone}": {"instances": items}}}


def master_only(machine_type: str, accelerator: Accelerator | None = None) -> ClusterSpec:
    return custom({Role.MASTER: RoleSpec(1, machine_type, accelerator)})


def run_discover(fake: Google, spec: ClusterSpec, *choice: Place, subnetwork: str | None = None) -> Discovery:
    return discover(spec, choice or (A,), OWN, subnetwork, fake.config)


H100 = MachineType("a3-highgpu-8g", 208, 1872, Accelerator("nvidia-h100-80gb", 8))


def test_machine_types_are_those_that_google_lists(fake: Google) -> None:
    fake.answers[machine_types_path(A.zone)] = [
        machine_list(MachineType("c2-standard-8", 8, 32), more="next"),
        machine_list(H100, MachineType("n2d-highmem-2", 2, 16)),
    ]
    fake.answers[GPUS] = gpu_list(us_central1_a=["nvidia-h100-80gb"])
    discovery = run_discover(fake, master_only("c2-standard-8"))
    assert discovery.catalogue.machines["n2d-highmem-2"] == MachineType("n2d-highmem-2", 2, 16)
    assert [path for path in fake.requests if "pageToken=next" in path], "the next page is requested"
    fake.answers[machine_types_path(A.zone)] = machine_list(H100)
    assert run_discover(fake, master_only("a3-highgpu-8g")).spec.roles[Role.MASTER].accelerator == H100.accelerator
    with pytest.raises(SpecError, match=r"master: machine type 'a3-highgpu-1g' is unknown; valid are a3-highgpu-8g"):
        run_discover(fake, master_only("a3-highgpu-1g"))
    with pytest.raises(SpecError, match="master: acceleratorType 'nvidia-k80' is unknown; valid are nvidia-h100-80gb"):
        run_discover(fake, master_only("a3-highgpu-8g", Accelerator("nvidia-k80", 1)))


def test_machine_types_with_arm_processors_are_not_offered(fake: Google) -> None:
    answer = machine_list(MachineType("c2-standard-8", 8, 32), MachineType("t2a-standard-4", 4, 16))
    for item, architecture in zip(answer[1]["items"], ("X86_64", "ARM64"), strict=True):
        item["architecture"] = architecture
    fake.answers |= {machine_types_path(A.zone): answer, GPUS: gpu_list()}
    assert list(run_discover(fake, master_only("c2-standard-8")).catalogue.machines) == ["c2-standard-8"]
    with pytest.raises(SpecError, match="machine type 't2a-standard-4' is unknown; valid are c2-…"):
        run_discover(fake, master_only("t2a-standard-4"))
    assert "architecture" in next(path for path in fake.requests if "machineTypes" in path)


def test_the_local_catalogue_is_used_if_google_lists_nothing(fake: Google) -> None:
    discovery = run_discover(fake, master_only("g2-standard-24"))
    assert discovery.spec.roles[Role.MASTER].accelerator == Accelerator("nvidia-l4", 2)
    assert discovery.hosts is None
    with pytest.raises(SpecError, match="'c2-standard-8' is unknown"):
        run_discover(fake, master_only("c2-standard-8"))


def test_the_first_zone_with_all_resources_is_chosen(fake: Google) -> None:
    spec = master_only("n1-standard-8", Accelerator("nvidia-tesla-t4", 1))
    n1 = MachineType("n1-standard-8", 8, 30)
    fake.answers |= {
        machine_types_path(A.zone): machine_list(n1),
        machine_types_path(B.zone): machine_list(n1),
        GPUS: gpu_list(us_central1_b=["nvidia-tesla-t4"]),
    }
    assert run_discover(fake, spec, A, B).place == B
    with pytest.raises(SpecError, match="zone us-central1-a has no nvidia-tesla-t4; in its region it is in us-central1-b"):
        run_discover(fake, spec, A)
    fake.answers[machine_types_path(B.zone)] = machine_list(MachineType("n1-standard-1", 1, 3.75))
    with pytest.raises(
        SpecError, match=r"us-central1-a: zone .* has no nvidia-tesla-t4.*; us-central1-b: master: machine type"
    ):
        run_discover(fake, spec, A, B)


def test_a_cluster_stays_in_its_zone_while_that_is_configured(fake: Google) -> None:
    fake.answers[INSTANCES] = instance_list("master-0", zone=B.zone)
    assert run_discover(fake, STANDARD, A, B).place == B
    assert run_discover(fake, STANDARD, A).place == A, "a zone removed from the list is left"
    fake.answers[INSTANCES] = instance_list("master-0", zone=B.zone, prefix="st-dev-another")
    assert run_discover(fake, STANDARD, A, B).place == A
    assert any("filter=labels.scaletier-stack%3Ddev" in path for path in fake.requests)


def test_zones_override_the_providers_and_are_of_one_region() -> None:
    def get(key: str) -> str | None:
        return {"project": PROJECT, "zone": "europe-west1-b"}.get(key)

    assert places(get, {}, ("us-central1-a", "us-central1-b")) == (A, B)
    assert [place.zone for place in places(get, {})] == ["europe-west1-b"]
    with pytest.raises(SpecError, match="must be of one region"):
        places(get, {}, ("us-central1-a", "us-east1-b"))


def existing_host(name: str, kind: str = "n1-highcpu-8", **changes: Any) -> ExistingHost:
    return dataclasses.replace(ExistingHost(name, A.zone, kind, None, False, 100), **changes)


def check_quota(fake: Google, limit: float, usage: float, hosts: list[ExistingHost] | None, metric: str = "CPUS") -> None:
    fake.answers[REGION] = (200, {"quotas": [{"metric": metric, "limit": limit, "usage": usage}]})
    discovery = Discovery(A, STANDARD, local_catalogue(A.zone), None if hosts is None else tuple(hosts))
    preflight(discovery, GcpConfig.parse({}), "a-bucket", "dev", fake.config)


def test_a_quota_includes_the_usage_of_others(fake: Google) -> None:
    check_quota(fake, 72, 20, [])
    with pytest.raises(GcpError, match="quota CPUS in us-central1 is 72, of which others use 30 and this cluster needs 52"):
        check_quota(fake, 72, 30, [])
    hosts = [existing_host(f"worker-{index}") for index in range(2)]
    check_quota(fake, 72, 36, hosts)
    with pytest.raises(GcpError, match="of which others use 21"):
        check_quota(fake, 72, 37, hosts)
    check_quota(fake, 1000, 400, [existing_host(f"w-{index}") for index in range(2)], "SSD_TOTAL_GB")
    with pytest.raises(GcpError, match="SSD_TOTAL_GB in us-central1 is 1000, of which others use 300"):
        check_quota(fake, 1000, 400, [existing_host("w-0")], "SSD_TOTAL_GB")


def test_usage_of_unknown_origin_counts_as_the_stacks_own(fake: Google) -> None:
    check_quota(fake, 72, 72, None)
    check_quota(fake, 72, 72, [existing_host("worker-0", kind="x9-metal")])
    with pytest.raises(GcpError, match="of which others use 72"):
        check_quota(fake, 72, 72, [])


def test_a_quota_may_be_used_up_to_its_end(fake: Google) -> None:
    check_quota(fake, 52, 0, [])
    worker = existing_host("worker-0")
    check_quota(fake, 52, 8, [worker])
    check_quota(fake, 52, 7, [worker])
    with pytest.raises(GcpError, match="of which others use 1 and this cluster needs 52"):
        check_quota(fake, 52, 9, [worker])
    fake.answers[REGION] = (200, {"quotas": [{"metric": "CPUS", "limit": 52}]})
    discovery = Discovery(A, STANDARD, local_catalogue(A.zone), ())
    assert preflight(discovery, GcpConfig.parse({}), "a-bucket", "dev", fake.config) is False


def test_quotas_in_use_are_those_of_the_stacks_hosts() -> None:
    l4, t4 = Accelerator("nvidia-l4", 1), Accelerator("nvidia-tesla-t4", 2)
    hosts = [
        existing_host("ps-0", "n1-standard-4", disk=50),
        existing_host("worker-0", "n1-standard-4", accelerator=t4, spot=True),
        existing_host("worker-1", "g2-standard-4"),
        existing_host("worker-2", "x9-metal", spot=True),
    ]
    machines = {"x9-metal": MachineType("x9-metal", 100, 1, l4)}
    spot = {"PREEMPTIBLE_CPUS": 9.0, "PREEMPTIBLE_NVIDIA_L4_GPUS": 1.0}
    assert quota_usage(hosts, machines, "pd-ssd", spot) == {
        "INSTANCES": 4,
        "SSD_TOTAL_GB": 350,
        "CPUS": 4,
        "CPUS_ALL_REGIONS": 4,
        "PREEMPTIBLE_CPUS": 4,
        "NVIDIA_T4_GPUS": 2,
        "NVIDIA_L4_GPUS": 1,
        "GPUS_ALL_REGIONS": 3,
        "PREEMPTIBLE_NVIDIA_L4_GPUS": 1,
    }
    assert quota_usage(hosts, {}, "pd-ssd", spot) is None
    assert quota_usage(None, machines, "pd-ssd", spot) is None
    assert quota_usage([], machines, "pd-ssd", spot) == {}


def test_existing_hosts_may_lack_parts(fake: Google) -> None:
    bare = {"name": f"{OWN.prefix}-ps-0", "machineType": "x/n1-standard-4", "disks": [{}, {"diskSizeGb": "7"}]}
    items = [bare, {**bare, "name": f"{OWN.prefix}-ps-1", "disks": None, "scheduling": None}, {**bare, "name": "of-another"}]
    fake.answers[INSTANCES] = (200, {"items": {f"zones/{A.zone}": {"instances": items}}})
    assert run_discover(fake, STANDARD).hosts == (
        existing_host("ps-0", "n1-standard-4", disk=7),
        existing_host("ps-1", "n1-standard-4", disk=0),
    )
    public = {**bare, "networkInterfaces": [{"accessConfigs": [{"natIP": "203.0.113.9"}]}]}
    fake.answers[INSTANCES] = (200, {"items": {f"zones/{A.zone}": {"instances": [public]}}})
    (host,) = run_discover(fake, STANDARD).hosts or ()
    assert quota_usage([host], MACHINES, "pd-ssd", {}) == {
        "INSTANCES": 1, "IN_USE_ADDRESSES": 1, "CPUS": 4, "CPUS_ALL_REGIONS": 4, "SSD_TOTAL_GB": 7,
    }  # fmt: skip
    fake.answers[INSTANCES] = (200, {"items": {"zones/z": {"instances": [{"name": f"{OWN.prefix}-ps-0"}]}}})
    assert run_discover(fake, STANDARD).hosts is None


def test_existing_hosts_are_discovered(fake: Google) -> None:
    fake.answers[INSTANCES] = instance_list("master-0", "worker-0")
    t4 = Accelerator("nvidia-tesla-t4", 1)
    assert run_discover(fake, STANDARD).hosts == (
        existing_host("master-0", accelerator=t4),
        existing_host("worker-0", accelerator=t4, spot=True),
    )


N1 = "n1-standard-4"
SUBNET = "projects/the-host/regions/us-central1/subnetworks/shared"


def test_a_subnet_of_another_project_or_ones_own_is_read(fake: Google) -> None:
    network = "https://x/compute/v1/projects/the-host/global/networks/net"
    answer = {"network": network, "privateIpGoogleAccess": True, "ipCidrRange": "10.9.0.0/24"}
    fake.answers[f"/compute/v1/{SUBNET}"] = (200, answer)
    subnet = run_discover(fake, STANDARD, subnetwork=SUBNET).subnet
    assert (subnet.link, subnet.network, subnet.project, subnet.reaches_google, str(subnet.range)) == (
        SUBNET, "projects/the-host/global/networks/net", "the-host", True, "10.9.0.0/24",
    )  # fmt: skip
    fake.answers[f"{COMPUTE}/regions/us-central1/subnetworks/mine"] = (200, answer | {"privateIpGoogleAccess": False})
    own = run_discover(fake, STANDARD, subnetwork="mine").subnet
    assert (own.link, own.reaches_google) == (f"projects/{PROJECT}/regions/us-central1/subnetworks/mine", False)


def test_a_subnet_has_room_for_all_hosts(fake: Google) -> None:
    answer = {"network": "https://x/projects/the-host/global/networks/net", "ipCidrRange": "10.9.0.0/28"}
    fake.answers[f"/compute/v1/{SUBNET}"] = (200, answer)
    full, more = (custom({Role.MASTER: RoleSpec(1, N1), Role.WORKER: RoleSpec(count, N1)}) for count in (11, 12))
    assert run_discover(fake, full, subnetwork=SUBNET).subnet
    with pytest.raises(GcpError) as caught:
        run_discover(fake, more, subnetwork=SUBNET)
    assert str(caught.value) == (
        f"subnetwork {SUBNET} has 10.9.0.0/28, which has room for 12 hosts, and this cluster has 13: "
        "take a larger subnet, or a smaller tier"
    )


def test_an_unusable_subnet_is_an_error(fake: Google) -> None:
    with pytest.raises(GcpError, match=r"subnetwork .*/shared cannot be used \(.* not found\): it must be there, and you need"):
        run_discover(fake, STANDARD, subnetwork=SUBNET)
    with pytest.raises(GcpError, match="is in us-central1, and europe-west1-b is in europe-west1"):
        run_discover(fake, STANDARD, Place(PROJECT, "europe-west1", "europe-west1-b"), subnetwork=SUBNET)
    fake.answers[f"/compute/v1/{SUBNET}"] = (200, {"network": "x/y", "ipCidrRange": "10.9.0.0/24"})
    with pytest.raises(GcpError, match=r"^subnetwork .*/shared is in x/y, which is no network$"):
        run_discover(fake, STANDARD, subnetwork=SUBNET)
    fake.answers[f"/compute/v1/{SUBNET}"] = (200, {"network": "x/y"})
    with pytest.raises(GcpError, match=r"shared cannot be used \('ipCidrRange'\)"):
        run_discover(fake, STANDARD, subnetwork=SUBNET)
