"""The machine types and GPUs of a zone by Google's API, or by a local copy if it is unreachable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import requests

from infra.gcp.api import ApiError, UnreachableError, get_all
from infra.gcp.machines import MACHINES, MachineType, machine, paired
from infra.gcp.zones import GPU_ZONES, Place, check_gpu
from infra.spec import Accelerator, ClusterSpec, SpecError

_MACHINE = "items(name,guestCpus,memoryMb,accelerators),nextPageToken"


@dataclass(frozen=True)
class Catalogue:
    """The machine types and GPUs of a zone. `gpu_zones` are the zones of each GPU, by its name."""

    zone: str
    machines: Mapping[str, MachineType]
    gpu_zones: Mapping[str, tuple[str, ...]]

    def settled(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the cluster with the GPUs that its machine types include.

        Raises:
            SpecError: the zone lacks a machine type or GPU.
        """
        roles = {}
        for role, role_spec in spec.roles.items():
            try:
                if role_spec.accelerator and role_spec.accelerator.type not in self.gpu_zones:
                    valid = ", ".join(self.gpu_zones)
                    raise SpecError(f"acceleratorType {role_spec.accelerator.type!r} is unknown; valid are {valid}")
                kind = machine(role_spec.machine_type, self.machines)
                accelerator = paired(kind, role_spec.accelerator, self.machines)
            except SpecError as error:
                raise SpecError(f"{role}: {error}") from None
            if accelerator:
                check_gpu(accelerator.type, self.zone, self.gpu_zones)
            roles[role] = dataclasses.replace(role_spec, accelerator=accelerator)
        return dataclasses.replace(spec, roles=roles)


def kept(zone: str) -> Catalogue:
    """Return the local copy, which lacks some types and later changes."""
    return Catalogue(zone, MACHINES, GPU_ZONES)


def ask(client: requests.Session, compute: str, place: Place) -> Catalogue:
    """Return the answer of the API at `compute`, or the local copy if it has none."""
    project, here = f"{compute}projects/{place.project}", f"{compute}projects/{place.project}/zones/{place.zone}"
    try:
        machines = [_machine(item) for item in get_all(client, f"{here}/machineTypes", fields=_MACHINE)]
        gpus = {
            (str(item["name"]), zone.removeprefix("zones/"))
            for zone, scope in get_all(client, f"{project}/aggregated/acceleratorTypes")
            for item in scope.get("acceleratorTypes", ())
        }
    except (ApiError, UnreachableError):
        return kept(place.zone)
    return Catalogue(place.zone, {item.name: item for item in machines}, _by_gpu(gpus))


def _machine(item: Mapping[str, Any]) -> MachineType:
    gpus = [
        Accelerator(str(gpu["guestAcceleratorType"]), int(gpu["guestAcceleratorCount"])) for gpu in item.get("accelerators", ())
    ]
    return MachineType(str(item["name"]), int(item["guestCpus"]), item["memoryMb"] / 1024, gpus[0] if gpus else None)


def _by_gpu(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    zones: dict[str, tuple[str, ...]] = {}
    for gpu, zone in sorted(pairs):
        zones[gpu] = (*zones.get(gpu, ()), zone)
    return zones
