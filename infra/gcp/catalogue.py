"""The machine types and GPUs of a zone as Google's API lists them, or by the copy kept here where it cannot be asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import requests

from infra.gcp.api import ApiError, UnreachableError, get_all
from infra.gcp.machines import MACHINES, Machine, machine, paired
from infra.gcp.zones import GPU_ZONES, Place, check_gpu
from infra.spec import Accelerator, ClusterSpec, SpecError

_MACHINE = "items(name,guestCpus,memoryMb,accelerators),nextPageToken"


@dataclass(frozen=True)
class Catalogue:
    """What a host in a zone may be. `gpu_zones` are the zones that have a GPU, by its name, for every GPU."""

    zone: str
    machines: Mapping[str, Machine]
    gpu_zones: Mapping[str, tuple[str, ...]]

    def settled(self, spec: ClusterSpec) -> ClusterSpec:
        """The cluster with the GPUs that its machine types have of themselves; SpecError for what the zone does not have."""
        roles = {}
        for role, found in spec.roles.items():
            try:
                if found.accelerator and found.accelerator.type not in self.gpu_zones:
                    valid = ", ".join(self.gpu_zones)
                    raise SpecError(f"acceleratorType {found.accelerator.type!r} is unknown; valid are {valid}")
                kind = machine(found.machine_type, self.machines)
                accelerator = paired(kind, found.accelerator, self.machines)
            except SpecError as error:
                raise SpecError(f"{role}: {error}") from None
            if accelerator:
                check_gpu(accelerator.type, self.zone, self.gpu_zones)
            roles[role] = dataclasses.replace(found, accelerator=accelerator)
        return dataclasses.replace(spec, roles=roles)


def kept(zone: str) -> Catalogue:
    """By the copy, which knows not every type, nor what changed since it was made."""
    return Catalogue(zone, MACHINES, GPU_ZONES)


def ask(client: requests.Session, compute: str, place: Place) -> Catalogue:
    """By the API at `compute`; by the copy where that cannot say."""
    project, here = f"{compute}projects/{place.project}", f"{compute}projects/{place.project}/zones/{place.zone}"
    try:
        machines = [_machine(item) for item in get_all(client, f"{here}/machineTypes", fields=_MACHINE)]
        gpus = {
            (str(item["name"]), zone.removeprefix("zones/"))
            for zone, found in get_all(client, f"{project}/aggregated/acceleratorTypes")
            for item in found.get("acceleratorTypes", ())
        }
    except (ApiError, UnreachableError):
        return kept(place.zone)
    return Catalogue(place.zone, {item.name: item for item in machines}, _by_gpu(gpus))


def _machine(item: Mapping[str, Any]) -> Machine:
    gpus = [
        Accelerator(str(gpu["guestAcceleratorType"]), int(gpu["guestAcceleratorCount"])) for gpu in item.get("accelerators", ())
    ]
    return Machine(str(item["name"]), int(item["guestCpus"]), item["memoryMb"] / 1024, gpus[0] if gpus else None)


def _by_gpu(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for gpu, zone in sorted(pairs):
        found[gpu] = (*found.get(gpu, ()), zone)
    return found
