"""Checks by Google's API before creation: the zone, the machine types, the remaining quotas."""

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
from infra.gcp.machines import MachineType
from infra.gcp.names import names
from infra.gcp.preflight import preflight
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
    """Answers whatever the question behind the path asks for in detail, page by page where it has several."""

    def answer(self, path: str) -> tuple[int, Any]:
        return super().answer(unquote(path.partition("?")[0]))


@pytest.fixture
def fake() -> Iterator[Google]:
    with Google().serving() as fake:
        yield fake


def types(zone: str) -> str:
    return f"{COMPUTE}/zones/{zone}/machineTypes"


def listed(*machines: MachineType, more: str = "") -> tuple[int, dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for machine in machines:
        item: dict[str, Any] = {"name": machine.name, "guestCpus": machine.cpus, "memoryMb": int(machine.memory * 1024)}
        if gpu := machine.accelerator:
            item["accelerators"] = [{"guestAcceleratorType": gpu.type, "guestAcceleratorCount": gpu.count}]
        items.append(item)
    return 200, {"items": items} | ({"nextPageToken": more} if more else {})


def gpus(**zones: list[str]) -> tuple[int, dict[str, Any]]:
    """Return GPUs by zone, `_` for `-`."""
    items = {
        f"zones/{zone.replace('_', '-')}": {"acceleratorTypes": [{"name": gpu} for gpu in found]}
        for zone, found in zones.items()
    }
    return 200, {"items": {"zones/empty": {"warning": {}}, **items}}


def instances(
    *replicas: str, zone: str = A.zone, kind: str = "n1-highcpu-8", prefix: str = OWN.prefix
) -> tuple[int, dict[str, Any]]:
    found = [
        {
            "name": f"{prefix}-{replica}",
            "machineType": f"https://x/zones/{zone}/machineTypes/{kind}",
            "scheduling": {"provisioningModel": "SPOT" if replica.startswith("worker") else "STANDARD"},
            "disks": [{"diskSizeGb": "100"}],
            "guestAccelerators": [{"acceleratorType": "https://x/nvidia-tesla-t4", "acceleratorCount": 1}],
        }
        for replica in replicas
    ]
    return 200, {"items": {"zones/other-a": {}, f"zones/{zone}": {"instances": found}}}


def one(machine_type: str, accelerator: Accelerator | None = None) -> ClusterSpec:
    return custom({Role.MASTER: RoleSpec(1, machine_type, accelerator)})


def look(fake: Google, spec: ClusterSpec, *choice: Place, subnetwork: str | None = None) -> Discovery:
    return discover(spec, choice or (A,), OWN, subnetwork, fake.config)


H100 = MachineType("a3-highgpu-8g", 208, 1872, Accelerator("nvidia-h100-80gb", 8))


def test_machine_types_are_those_that_google_lists(fake: Google) -> None:
    fake.answers[types(A.zone)] = [
        listed(MachineType("c2-standard-8", 8, 32), more="next"),
        listed(H100, MachineType("n2d-highmem-2", 2, 16)),
    ]
    fake.answers[GPUS] = gpus(us_central1_a=["nvidia-h100-80gb"])
    found = look(fake, one("c2-standard-8"))
    assert found.catalogue.machines["n2d-highmem-2"] == MachineType("n2d-highmem-2", 2, 16)
    assert [path for path in fake.asked if "pageToken=next" in path], "a list goes on where a page ends"
    fake.answers[types(A.zone)] = listed(H100)
    assert look(fake, one("a3-highgpu-8g")).spec.roles[Role.MASTER].accelerator == H100.accelerator
    with pytest.raises(SpecError, match=r"master: machine type 'a3-highgpu-1g' is unknown; valid are a3-highgpu-8g"):
        look(fake, one("a3-highgpu-1g"))
    with pytest.raises(SpecError, match="master: acceleratorType 'nvidia-k80' is unknown; valid are nvidia-h100-80gb"):
        look(fake, one("a3-highgpu-8g", Accelerator("nvidia-k80", 1)))


def test_the_copy_stands_in_where_google_does_not_say(fake: Google) -> None:
    found = look(fake, one("g2-standard-24"))
    assert found.spec.roles[Role.MASTER].accelerator == Accelerator("nvidia-l4", 2)
    assert found.hosts is None
    with pytest.raises(SpecError, match="'c2-standard-8' is unknown"):
        look(fake, one("c2-standard-8"))


def test_the_first_zone_that_has_all_is_taken(fake: Google) -> None:
    spec = one("n1-standard-8", Accelerator("nvidia-tesla-t4", 1))
    n1 = MachineType("n1-standard-8", 8, 30)
    fake.answers |= {types(A.zone): listed(n1), types(B.zone): listed(n1), GPUS: gpus(us_central1_b=["nvidia-tesla-t4"])}
    assert look(fake, spec, A, B).place == B
    with pytest.raises(SpecError, match="zone us-central1-a has no nvidia-tesla-t4; in its region it is in us-central1-b"):
        look(fake, spec, A)
    fake.answers[types(B.zone)] = listed(MachineType("n1-standard-1", 1, 3.75))
    with pytest.raises(
        SpecError, match=r"us-central1-a: zone .* has no nvidia-tesla-t4.*; us-central1-b: master: machine type"
    ):
        look(fake, spec, A, B)


def test_a_cluster_stays_where_its_hosts_are_while_that_is_one_of_the_zones(fake: Google) -> None:
    fake.answers[INSTANCES] = instances("master-0", zone=B.zone)
    assert look(fake, STANDARD, A, B).place == B
    assert look(fake, STANDARD, A).place == A, "who takes a zone out of the list wants to leave it"
    fake.answers[INSTANCES] = instances("master-0", zone=B.zone, prefix="st-dev-another")
    assert look(fake, STANDARD, A, B).place == A
    assert any("filter=labels.scaletier-stack%3Ddev" in path for path in fake.asked)


def test_zones_are_of_one_region_and_go_before_the_provider_s() -> None:
    def get(key: str) -> str | None:
        return {"project": PROJECT, "zone": "europe-west1-b"}.get(key)

    assert places(get, {}, ("us-central1-a", "us-central1-b")) == (A, B)
    assert [place.zone for place in places(get, {})] == ["europe-west1-b"]
    with pytest.raises(SpecError, match="must be of one region"):
        places(get, {}, ("us-central1-a", "us-east1-b"))


def hosted(name: str, kind: str = "n1-highcpu-8", **changes: Any) -> ExistingHost:
    return dataclasses.replace(ExistingHost(name, A.zone, kind, None, False, 100), **changes)


def quota(fake: Google, limit: float, usage: float, there: list[ExistingHost] | None, metric: str = "CPUS") -> None:
    fake.answers[REGION] = (200, {"quotas": [{"metric": metric, "limit": limit, "usage": usage}]})
    discovery = Discovery(A, STANDARD, local_catalogue(A.zone), None if there is None else tuple(there))
    preflight(discovery, GcpConfig.parse({}), "a-bucket", "dev", fake.config)


def test_of_a_quota_counts_what_others_leave(fake: Google) -> None:
    quota(fake, 72, 20, [])
    with pytest.raises(GcpError, match="quota CPUS in us-central1 is 72, of which others use 30 and this cluster needs 52"):
        quota(fake, 72, 30, [])
    here = [hosted(f"worker-{index}") for index in range(2)]
    quota(fake, 72, 36, here)
    with pytest.raises(GcpError, match="of which others use 21"):
        quota(fake, 72, 37, here)
    quota(fake, 1000, 400, [hosted(f"w-{index}") for index in range(2)], "SSD_TOTAL_GB")
    with pytest.raises(GcpError, match="SSD_TOTAL_GB in us-central1 is 1000, of which others use 300"):
        quota(fake, 1000, 400, [hosted("w-0")], "SSD_TOTAL_GB")


def test_what_cannot_be_told_apart_counts_as_the_stack_s_own(fake: Google) -> None:
    quota(fake, 72, 72, None)
    quota(fake, 72, 72, [hosted("worker-0", kind="x9-metal")])
    with pytest.raises(GcpError, match="of which others use 72"):
        quota(fake, 72, 72, [])


def test_the_hosts_that_are_there(fake: Google) -> None:
    fake.answers[INSTANCES] = instances("master-0", "worker-0")
    t4 = Accelerator("nvidia-tesla-t4", 1)
    assert look(fake, STANDARD).hosts == (
        hosted("master-0", accelerator=t4),
        hosted("worker-0", accelerator=t4, spot=True),
    )


SUBNET = "projects/the-host/regions/us-central1/subnetworks/shared"


def test_a_subnet_of_another_project(fake: Google) -> None:
    network = "https://x/compute/v1/projects/the-host/global/networks/net"
    answer = {"network": network, "privateIpGoogleAccess": True, "ipCidrRange": "10.9.0.0/24"}
    fake.answers[f"/compute/v1/{SUBNET}"] = (200, answer)
    found = look(fake, STANDARD, subnetwork=SUBNET).subnet
    assert found
    assert (found.link, found.network, found.project, found.reaches_google, str(found.range)) == (
        SUBNET, "projects/the-host/global/networks/net", "the-host", True, "10.9.0.0/24",
    )  # fmt: skip
    fake.answers[f"{COMPUTE}/regions/us-central1/subnetworks/mine"] = (200, answer | {"privateIpGoogleAccess": False})
    own = look(fake, STANDARD, subnetwork="mine").subnet
    assert own
    assert (own.link, own.reaches_google) == (f"projects/{PROJECT}/regions/us-central1/subnetworks/mine", False)


def test_a_subnet_that_cannot_be_used(fake: Google) -> None:
    with pytest.raises(GcpError, match=r"subnetwork .*/shared cannot be used \(.* not found\): it must be there, and you need"):
        look(fake, STANDARD, subnetwork=SUBNET)
    with pytest.raises(GcpError, match="is in us-central1, and europe-west1-b is in europe-west1"):
        look(fake, STANDARD, Place(PROJECT, "europe-west1", "europe-west1-b"), subnetwork=SUBNET)
