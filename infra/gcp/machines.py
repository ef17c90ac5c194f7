"""Machine types, and their GPUs: pure tables and look-ups.

`discovery.Catalogue` has what Google's API returns for a zone. Source: Compute Engine documentation, "General-purpose machine
family", "Accelerator-optimized machine family" and "GPU machine types" (which counts go with how many vCPUs of N1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from infra.scale_tiers import Accelerator, SpecError, suggest


@dataclass(frozen=True)
class MachineType:
    """A machine type: processors, memory in GiB, and the GPUs that are part of it."""

    name: str
    cpus: int
    memory: float
    accelerator: Accelerator | None = None

    @property
    def series(self) -> str:
        return self.name.partition("-")[0]


_GENERAL: Mapping[str, tuple[Mapping[str, float], tuple[int, ...]]] = {
    "n1": ({"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}, (1, 2, 4, 8, 16, 32, 64, 96)),
    "n2": ({"standard": 4, "highmem": 8, "highcpu": 1}, (2, 4, 8, 16, 32, 48, 64, 80)),
    "e2": ({"standard": 4, "highmem": 8, "highcpu": 1}, (2, 4, 8, 16, 32)),
}
_ONLY_STANDARD = {"n1": {1}}
_WITH_GPUS = (
    *(
        MachineType(f"g2-standard-{cpus}", cpus, cpus * 4, Accelerator("nvidia-l4", gpus))
        for cpus, gpus in ((4, 1), (8, 1), (12, 1), (16, 1), (24, 2), (32, 1), (48, 4), (96, 8))
    ),
    *(
        MachineType(f"a2-highgpu-{gpus}g", gpus * 12, gpus * 85, Accelerator("nvidia-tesla-a100", gpus))
        for gpus in (1, 2, 4, 8)
    ),
    MachineType("a2-megagpu-16g", 96, 1360, Accelerator("nvidia-tesla-a100", 16)),
    *(
        MachineType(f"a2-ultragpu-{gpus}g", gpus * 12, gpus * 170, Accelerator("nvidia-a100-80gb", gpus))
        for gpus in (1, 2, 4, 8)
    ),
)


def _general() -> dict[str, MachineType]:
    machines = {}
    for series, (kinds, sizes) in _GENERAL.items():
        for kind, memory in kinds.items():
            for cpus in sizes:
                if kind == "standard" or cpus not in _ONLY_STANDARD.get(series, ()):
                    machines[f"{series}-{kind}-{cpus}"] = MachineType(f"{series}-{kind}-{cpus}", cpus, cpus * memory)
    return machines


MACHINES: Mapping[str, MachineType] = {**_general(), **{machine.name: machine for machine in _WITH_GPUS}}

# For N1: the numbers of GPUs of a type that a host may have, and the most vCPUs with each.
_N1_GPUS: Mapping[str, Mapping[int, int]] = {
    "nvidia-tesla-t4": {1: 48, 2: 48, 4: 96},
    "nvidia-tesla-v100": {1: 12, 2: 24, 4: 48, 8: 96},
    "nvidia-tesla-p100": {1: 16, 2: 32, 4: 96},
    "nvidia-tesla-p4": {1: 24, 2: 48, 4: 96},
}

# Source: Compute Engine documentation, "Machine series support" of Persistent Disk. Other series are left to the API.
_ONLY_HYPERDISK = frozenset({"a4", "c4", "c4d", "g4", "h4d", "m4", "n4", "n4d", "x4"})
_NO_STANDARD_DISK = frozenset({"a3", "c3", "c3d", "g2", "h3", "z3"})


def check_disk(kind: MachineType, disk_type: str) -> None:
    """Raise SpecError if a machine type cannot boot from a disk of this type."""
    if kind.series in _ONLY_HYPERDISK:
        raise SpecError(
            f"{kind.name} boots from Hyperdisk only, and bootDiskType is {disk_type}: "
            "take a machine type of a series with Persistent Disk, such as n2"
        )
    if disk_type == "pd-standard" and kind.series in _NO_STANDARD_DISK:
        raise SpecError(f"{kind.name} does not boot from pd-standard: `pulumi config set bootDiskType pd-balanced`")


def gpu_name(text: str) -> str:
    """Return Compute Engine's name of a GPU, from that name or Cloud ML's (`NVIDIA_TESLA_T4`)."""
    return text.strip().lower().replace("_", "-")


def machine(name: str, machines: Mapping[str, MachineType] = MACHINES) -> MachineType:
    """Return the machine type of that name; SpecError lists the types of the same series, or all series."""
    if name in machines:
        return machines[name]
    series = re.split(r"[-_]", name, maxsplit=1)[0].lower()
    same_series = [kind for kind in machines if kind.startswith(f"{series}-")]
    valid = ", ".join(same_series or dict.fromkeys(f"{kind.partition('-')[0]}-…" for kind in machines))
    like = suggest(name, [kind for kind in same_series if kind.rpartition("-")[2] == name.rpartition("-")[2]])
    raise SpecError(f"machine type {name!r} is unknown{like}; valid are {valid}")


def resolve_accelerator(
    kind: MachineType, accelerator: Accelerator | None, machines: Mapping[str, MachineType] = MACHINES
) -> Accelerator | None:
    """Return the GPUs of a machine type: those requested, validated, or those that the type includes.

    Raises SpecError, with the valid choices, for GPUs that Compute Engine does not offer with the machine type.
    """
    name = kind.name
    if accelerator is None:
        return kind.accelerator
    if kind.accelerator:
        if accelerator != kind.accelerator:
            own = kind.accelerator
            raise SpecError(f"{name} comes with {own.count} x {own.type}, not {accelerator.count} x {accelerator.type}")
        return accelerator
    if accelerator.type not in _N1_GPUS:
        valid = [
            f"{item.name} ({item.accelerator.count})"
            for item in machines.values()
            if item.accelerator and item.accelerator.type == accelerator.type
        ]
        raise SpecError(
            f"{accelerator.type} does not go with {name}; machine types with it (and how many): {', '.join(valid) or 'none'}"
        )
    limits = _N1_GPUS[accelerator.type]
    if kind.series != "n1":
        raise SpecError(f"{accelerator.type} does not go with {name}; valid are machine types of the series n1")
    if accelerator.count not in limits:
        raise SpecError(
            f"{accelerator.count} x {accelerator.type} is not offered; valid counts are {', '.join(map(str, limits))}"
        )
    if kind.cpus > limits[accelerator.count]:
        enough = [count for count, cpus in limits.items() if cpus >= kind.cpus]
        fits = f"; {name} takes {', '.join(map(str, enough))} of them" if enough else ""
        most = limits[accelerator.count]
        raise SpecError(
            f"{accelerator.count} x {accelerator.type} goes with {most} vCPUs at most, {name} has {kind.cpus}{fits}"
        )
    return accelerator
