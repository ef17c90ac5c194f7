"""What Google says before anything is made: the zone that a cluster can be in, the hosts that it has, and another's subnet.

What it cannot say is None, or the copy kept here: then it refuses later by itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

import requests

from infra.gcp import catalogue
from infra.gcp.api import COMPUTE, ApiError, GcpError, Get, UnreachableError, endpoint, get_all, get_json, session
from infra.gcp.catalogue import Catalogue
from infra.gcp.names import Names
from infra.gcp.zones import Place
from infra.spec import Accelerator, ClusterSpec, SpecError

_LINK = re.compile(r"projects/([^/]+)/(?:global/networks|regions/([^/]+)/subnetworks)/([^/]+)$")


@dataclass(frozen=True)
class Hosted:
    """A host of the stack that is there, by the name of its replica; `disk` in GB (2^30 bytes)."""

    name: str
    zone: str
    machine_type: str
    accelerator: Accelerator | None
    spot: bool
    disk: int


@dataclass(frozen=True)
class Subnet:
    """A subnet that is not the stack's, and the network that it is in, both as links; `project` is the network's,
    `range` that of the subnet's addresses.
    """

    link: str
    network: str
    project: str
    reaches_google: bool
    range: ipaddress.IPv4Network


@dataclass(frozen=True)
class Survey:
    """`spec` is the cluster with the GPUs that its machine types bring; `there` is None where nobody could say."""

    place: Place
    spec: ClusterSpec
    catalogue: Catalogue
    there: tuple[Hosted, ...] | None = None
    subnet: Subnet | None = None


def survey(spec: ClusterSpec, choice: Sequence[Place], names: Names, subnetwork: str | None, get: Get) -> Survey:
    """Looks around, and takes the zone of the hosts that are there, else the first that has all that the cluster wants.

    Raises SpecError where none has, GcpError for a subnet that cannot be used.
    """
    client, compute = session(get), endpoint(COMPUTE, get)
    there = hosts(client, compute, choice[0].project, names)
    zones = {host.zone for host in there or ()}
    stay = [place for place in choice if place.zone in zones]
    place, settled, found = _first(spec, [catalogue.ask(client, compute, place) for place in stay or choice], stay or choice)
    return Survey(place, settled, found, there, subnet(client, compute, subnetwork, place) if subnetwork else None)


def _first(spec: ClusterSpec, found: Sequence[Catalogue], choice: Sequence[Place]) -> tuple[Place, ClusterSpec, Catalogue]:
    why = []
    for place, known in zip(choice, found, strict=True):
        try:
            return place, known.settled(spec), known
        except SpecError as error:
            why.append(str(error) if len(choice) == 1 else f"{place.zone}: {error}")
    raise SpecError("; ".join(why))


def hosts(client: requests.Session, compute: str, project: str, names: Names) -> tuple[Hosted, ...] | None:
    """The stack's hosts, wherever they are; None where Google does not say."""
    url, wanted = f"{compute}projects/{project}/aggregated/instances", f"labels.scaletier-stack={names.stack}"
    found = []
    try:
        for scope, listed in get_all(client, url, filter=wanted):
            for item in listed.get("instances") or ():
                if str(item["name"]).startswith(f"{names.prefix}-"):
                    gpus = [
                        Accelerator(_end(gpu["acceleratorType"]), int(gpu["acceleratorCount"]))
                        for gpu in item.get("guestAccelerators") or ()
                    ]
                    found.append(
                        Hosted(
                            name=str(item["name"]).removeprefix(f"{names.prefix}-"),
                            zone=_end(scope),
                            machine_type=_end(item["machineType"]),
                            accelerator=gpus[0] if gpus else None,
                            spot=(item.get("scheduling") or {}).get("provisioningModel") == "SPOT",
                            disk=sum(int(disk.get("diskSizeGb", 0)) for disk in item.get("disks") or ()),
                        )
                    )
    except (ApiError, UnreachableError, KeyError, ValueError):
        return None
    return tuple(found)


def subnet(client: requests.Session, compute: str, name: str, place: Place) -> Subnet:
    """A subnet by its link, or by its name in the stack's own project and region; GcpError where it cannot be used."""
    link = name if "/" in name else f"projects/{place.project}/regions/{place.region}/subnetworks/{name}"
    match = _LINK.search(link)
    if match and match[2] != place.region:
        raise GcpError(f"subnetwork {name} is in {match[2]}, and {place.zone} is in {place.region}: take one of that region")
    try:
        found = get_json(client, f"{compute}{link}")
        network, inside = _LINK.search(str(found["network"])), ipaddress.IPv4Network(found["ipCidrRange"])
    except (ApiError, KeyError, ValueError) as error:
        raise GcpError(
            f"subnetwork {link} cannot be used ({error}): it must be there, and you need compute.networkUser"
        ) from None
    if not network:
        raise GcpError(f"subnetwork {link} is in {found['network']}, which is no network")
    return Subnet(link, network[0], network[1], bool(found.get("privateIpGoogleAccess")), inside)


def _end(link: object) -> str:
    return str(link).rpartition("/")[2]
