"""Read the project before an update: the cluster's zone, its hosts, and an existing subnet.

If Google does not answer, hosts are None, and machine types those of the local copy; the update may then fail.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import requests

from infra.gcp.api import COMPUTE, ApiError, GcpError, ReadConfig, UnreachableError, endpoint, get_all, get_json, session
from infra.gcp.machines import MACHINES, MachineType, machine, resolve_accelerator
from infra.gcp.names import GoogleNames
from infra.gcp.zones import Place, check_gpu
from infra.scale_tiers import Accelerator, ClusterSpec, SpecError

_LINK = re.compile(r"projects/([^/]+)/(?:global/networks|regions/([^/]+)/subnetworks)/([^/]+)$")
# Source: VPC documentation, "Subnets", unusable addresses in IPv4 subnet ranges.
_RESERVED_ADDRESSES = 4
_MACHINE = "items(name,architecture,guestCpus,memoryMb,accelerators),nextPageToken"


@dataclass(frozen=True)
class Catalogue:
    """The machine types and GPUs of a zone. `gpu_zones` are the zones of each GPU, by its name; None if they are unknown.

    There are no Arm machine types: images and the hosts' Python are for x86-64.
    """

    zone: str
    machines: Mapping[str, MachineType]
    gpu_zones: Mapping[str, tuple[str, ...]] | None

    def resolve(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the cluster with its machine types' GPUs; SpecError if the zone lacks a machine type or GPU."""
        roles = {}
        for role, role_spec in spec.roles.items():
            try:
                if role_spec.accelerator and self.gpu_zones is not None and role_spec.accelerator.type not in self.gpu_zones:
                    valid = ", ".join(self.gpu_zones)
                    raise SpecError(f"acceleratorType {role_spec.accelerator.type!r} is unknown; valid are {valid}")
                kind = machine(role_spec.machine_type, self.machines)
                accelerator = resolve_accelerator(kind, role_spec.accelerator, self.machines)
            except SpecError as error:
                raise SpecError(f"{role}: {error}") from None
            if accelerator and self.gpu_zones is not None:
                check_gpu(accelerator.type, self.zone, self.gpu_zones)
            roles[role] = dataclasses.replace(role_spec, accelerator=accelerator)
        return dataclasses.replace(spec, roles=roles)


def local_catalogue(zone: str) -> Catalogue:
    """Return the catalogue in this program, which lacks some types, the zones of GPUs, and later changes."""
    return Catalogue(zone, MACHINES, None)


def _catalogue(client: requests.Session, compute: str, place: Place) -> Catalogue:
    """Return the catalogue of the API at `compute`, or the local one if the API does not answer."""
    project, here = f"{compute}projects/{place.project}", f"{compute}projects/{place.project}/zones/{place.zone}"
    try:
        listed_types = get_all(client, f"{here}/machineTypes", fields=_MACHINE)
        machines = [_machine(item) for item in listed_types if item.get("architecture") != "ARM64"]
        zones: dict[str, tuple[str, ...]] = {}
        for scope, listed in sorted(get_all(client, f"{project}/aggregated/acceleratorTypes"), key=itemgetter(0)):
            for item in listed.get("acceleratorTypes", ()):
                zones[item["name"]] = (*zones.get(item["name"], ()), scope.removeprefix("zones/"))
    except (ApiError, UnreachableError):
        return local_catalogue(place.zone)
    return Catalogue(place.zone, {item.name: item for item in machines}, dict(sorted(zones.items())))


def _machine(item: Mapping[str, Any]) -> MachineType:
    gpus = [
        Accelerator(str(gpu["guestAcceleratorType"]), int(gpu["guestAcceleratorCount"])) for gpu in item.get("accelerators", ())
    ]
    return MachineType(str(item["name"]), int(item["guestCpus"]), item["memoryMb"] / 1024, gpus[0] if gpus else None)


@dataclass(frozen=True)
class ExistingHost:
    """A host of the stack that exists; `disk` in GiB."""

    name: str
    zone: str
    machine_type: str
    accelerator: Accelerator | None
    spot: bool
    disk: int
    public_address: bool = False


@dataclass(frozen=True)
class Subnet:
    """A subnet that the stack does not own; `link` and `network` are links, `project` is the network's."""

    link: str
    network: str
    project: str
    reaches_google: bool
    range: ipaddress.IPv4Network


@dataclass(frozen=True)
class Discovery:
    """The chosen zone, the cluster with the GPUs of its machine types, and its existing `hosts`, None if unknown."""

    place: Place
    spec: ClusterSpec
    catalogue: Catalogue
    hosts: tuple[ExistingHost, ...] | None = None
    subnet: Subnet | None = None


def discover(
    spec: ClusterSpec, choice: Sequence[Place], names: GoogleNames, subnetwork: str | None, read_config: ReadConfig
) -> Discovery:
    """Choose the zone of existing hosts, else the first that offers the whole cluster.

    SpecError if no zone offers it, GcpError if the subnet cannot be used.
    """
    client, compute = session(read_config), endpoint(COMPUTE, read_config)
    existing = existing_hosts(client, compute, choice[0].project, names)
    zones = {host.zone for host in existing or ()}
    candidates = [place for place in choice if place.zone in zones] or choice
    catalogues = [_catalogue(client, compute, place) for place in candidates]
    place, resolved, catalogue = _first_complete(spec, catalogues, candidates)
    other_subnet = subnet(client, compute, subnetwork, place) if subnetwork else None
    if other_subnet and len(resolved.hosts) > (room := other_subnet.range.num_addresses - _RESERVED_ADDRESSES):
        raise GcpError(
            f"subnetwork {other_subnet.link} has {other_subnet.range}, which has room for {room} hosts, and this cluster has "
            f"{len(resolved.hosts)}: take a larger subnet, or a smaller tier"
        )
    return Discovery(place, resolved, catalogue, existing, other_subnet)


def _first_complete(
    spec: ClusterSpec, catalogues: Sequence[Catalogue], places: Sequence[Place]
) -> tuple[Place, ClusterSpec, Catalogue]:
    problems = []
    for place, catalogue in zip(places, catalogues, strict=True):
        try:
            return place, catalogue.resolve(spec), catalogue
        except SpecError as error:
            problems.append(str(error) if len(places) == 1 else f"{place.zone}: {error}")
    raise SpecError("; ".join(problems))


def existing_hosts(client: requests.Session, compute: str, project: str, names: GoogleNames) -> tuple[ExistingHost, ...] | None:
    """Return the stack's hosts in any zone, or None if Google does not answer."""
    url, label = f"{compute}projects/{project}/aggregated/instances", f"labels.scaletier-stack={names.stack}"
    instances = []
    try:
        for scope, listed in get_all(client, url, filter=label):
            for item in listed.get("instances") or ():
                if str(item["name"]).startswith(f"{names.prefix}-"):
                    gpus = [
                        Accelerator(_last_part(gpu["acceleratorType"]), int(gpu["acceleratorCount"]))
                        for gpu in item.get("guestAccelerators") or ()
                    ]
                    instances.append(
                        ExistingHost(
                            name=str(item["name"]).removeprefix(f"{names.prefix}-"),
                            zone=_last_part(scope),
                            machine_type=_last_part(item["machineType"]),
                            accelerator=gpus[0] if gpus else None,
                            spot=(item.get("scheduling") or {}).get("provisioningModel") == "SPOT",
                            disk=sum(int(disk.get("diskSizeGb", 0)) for disk in item.get("disks") or ()),
                            public_address=any(each.get("accessConfigs") for each in item.get("networkInterfaces") or ()),
                        )
                    )
    except (ApiError, UnreachableError, KeyError, ValueError):
        return None
    return tuple(instances)


def subnet(client: requests.Session, compute: str, name: str, place: Place) -> Subnet:
    """Return a subnet by its link, or by its name in the stack's project and region; GcpError if it cannot be used."""
    link = name if "/" in name else f"projects/{place.project}/regions/{place.region}/subnetworks/{name}"
    match = _LINK.search(link)
    if match and match[2] != place.region:
        raise GcpError(f"subnetwork {name} is in {match[2]}, and {place.zone} is in {place.region}: take one of that region")
    try:
        answer = get_json(client, f"{compute}{link}")
        network, range_ = _LINK.search(str(answer["network"])), ipaddress.IPv4Network(answer["ipCidrRange"])
    except (ApiError, KeyError, ValueError) as error:
        raise GcpError(
            f"subnetwork {link} cannot be used ({error}): it must be there, and you need compute.networkUser"
        ) from None
    if not network:
        raise GcpError(f"subnetwork {link} is in {answer['network']}, which is no network")
    return Subnet(link, network[0], network[1], bool(answer.get("privateIpGoogleAccess")), range_)


def _last_part(link: object) -> str:
    return str(link).rpartition("/")[2]
