"""Checks at every preview and before every update, so that an update that would fail creates nothing.

They refuse only what Google's answers show to be impossible. If Google does not answer, the update itself fails later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from infra.gcp.api import COMPUTE, LOGIN, STORAGE, ApiError, GcpError, ReadConfig, UnreachableError, endpoint, get_json, session
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery, ExistingHost
from infra.gcp.machines import MACHINES, MachineType
from infra.gcp.zones import Place
from infra.scale_tiers import Accelerator, ClusterSpec

_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
_DISABLED = ("SERVICE_DISABLED", "accessNotConfigured")
# Source: Compute Engine documentation, "Allocation quotas". Other series are not checked here.
_CPUS = {
    "n1": "CPUS",
    "e2": "CPUS",
    "n2": "N2_CPUS",
    "n2d": "N2D_CPUS",
    "c2": "C2_CPUS",
    "c2d": "C2D_CPUS",
    "c3": "C3_CPUS",
    "a2": "A2_CPUS",
}
_GPUS = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-v100": "NVIDIA_V100_GPUS",
    "nvidia-tesla-p100": "NVIDIA_P100_GPUS",
    "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
}
# Quotas of the project. Hosts with preemptible quotas are not counted here: Google does not document whether they count.
_ALL_CPUS, _ALL_GPUS = "CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS"
_ADDRESSES = "IN_USE_ADDRESSES"
_DISKS = {"pd-ssd": "SSD_TOTAL_GB", "pd-balanced": "SSD_TOTAL_GB", "pd-standard": "DISKS_TOTAL_GB"}


def preflight(
    discovery: Discovery, config: GcpConfig, bucket: str, stack: str, read_config: ReadConfig, recorded: bool = False
) -> bool:
    """Check credentials, API, zone, quotas and bucket; return True if the bucket exists with this stack's label.

    `recorded` is True if the stack's state has the bucket: then it needs no label, as it may have been imported by hand. The
    use of a quota does not include the stack's existing hosts. GcpError for the first check that fails.
    """
    client, place, machines = session(read_config), discovery.place, discovery.catalogue.machines
    region = _region(client, f"{endpoint(COMPUTE, read_config)}projects/{place.project}/regions/{place.region}", place)
    zones = [str(link).rpartition("/")[2] for link in region.get("zones", [])]
    if zones and place.zone not in zones:
        raise GcpError(f"region {place.region} has no zone {place.zone}; it has {', '.join(sorted(zones))}")
    quotas = [*region.get("quotas", []), *_project_quotas(client, f"{endpoint(COMPUTE, read_config)}projects/{place.project}")]
    limits, usage = ({str(item["metric"]): float(item.get(what, 0)) for item in quotas} for what in ("limit", "usage"))
    own = quota_usage(discovery.hosts, machines, config.boot_disk_type, limits)
    disk = config.boot_disk_type, config.boot_disk_size
    needs = quota_needs(discovery.spec, *disk, limits, machines, config.public_address)
    for name, needed in needs.items():
        if name not in limits:
            continue
        limit = limits[name]
        others = 0.0 if own is None else max(0.0, usage[name] - own[name])
        if needed > limit - others:
            used = f", of which others use {others:g}" if others else ""
            where = f"of project {place.project}" if name in (_ALL_CPUS, _ALL_GPUS) else f"in {place.region}"
            raise GcpError(
                f"quota {name} {where} is {limit:g}{used} and this cluster needs {needed}: ask for more at "
                f"{_QUOTAS}?project={place.project}, or take a smaller tier"
            )
    return _bucket(client, f"{endpoint(STORAGE, read_config)}b", bucket, stack, place, recorded)


def quota_needs(
    spec: ClusterSpec,
    disk_type: str,
    disk_size: int,
    limits: Mapping[str, float] | None = None,
    machines: Mapping[str, MachineType] = MACHINES,
    public_address: bool = False,
) -> dict[str, int]:
    """Return a cluster's use of the region's and the project's quotas, by the quota's name; pure.

    Spot hosts use the preemptible quotas of a project that has some, else the standard ones.
    """
    needed: Counter[str] = Counter()
    for role in spec.roles.values():
        host_usage = _host_usage(machines[role.machine_type], role.accelerator, role.spot, public_address, limits or {})
        host_usage[_DISKS[disk_type]] += disk_size
        needed.update({name: role.count * count for name, count in host_usage.items()})
    return dict(needed)


def quota_usage(
    hosts: Sequence[ExistingHost] | None, machines: Mapping[str, MachineType], disk_type: str, limits: Mapping[str, float]
) -> Counter[str] | None:
    """Return the use of quotas by the stack's existing hosts, as if all ran; None if it is unknown."""
    used: Counter[str] = Counter()
    for host in hosts or ():
        kind = machines.get(host.machine_type) or MACHINES.get(host.machine_type)
        if kind is None:
            return None
        used.update(_host_usage(kind, host.accelerator or kind.accelerator, host.spot, host.public_address, limits))
        used[_DISKS[disk_type]] += host.disk
    return used if hosts is not None else None


def _host_usage(
    kind: MachineType, accelerator: Accelerator | None, spot: bool, public_address: bool, limits: Mapping[str, float]
) -> Counter[str]:
    """Return the use of the quotas by one host, without its disk."""
    used: Counter[str] = Counter(INSTANCES=1)
    if public_address:
        used[_ADDRESSES] = 1

    def add(name: str | None, count: int, total: str) -> None:
        if name and spot and limits.get(f"PREEMPTIBLE_{name}"):
            used[f"PREEMPTIBLE_{name}"] += count
        elif name:
            used.update({name: count, total: count})

    cpus = _CPUS.get(kind.series)
    add("CPUS" if cpus and spot and limits.get("PREEMPTIBLE_CPUS") else cpus, kind.cpus, _ALL_CPUS)
    if accelerator:
        add(_GPUS.get(accelerator.type), accelerator.count, _ALL_GPUS)
    return used


def _region(client: requests.Session, url: str, place: Place) -> Mapping[str, Any]:
    try:
        return get_json(client, url)
    except ApiError as error:
        enable = f"`gcloud services enable compute.googleapis.com --project {place.project}`"
        refusals = {
            401: f"Google refused the credentials ({error}): {LOGIN}",
            403: f"no right to use project {place.project} ({error}): docs/google-cloud.md has the roles that you need",
            404: f"project {place.project} has no region {place.region} ({error}): set gcp:project, gcp:zone",
        }
        if error.status != 401 and error.reason in _DISABLED:
            raise GcpError(f"the Compute Engine API is not enabled: {enable}") from None
        if error.status in refusals:
            raise GcpError(refusals[error.status]) from None
        return {}
    except UnreachableError:
        return {}


def _project_quotas(client: requests.Session, url: str) -> list[Mapping[str, Any]]:
    """Return the project's quotas for all regions together; empty if Google does not answer."""
    try:
        quotas: list[Mapping[str, Any]] = get_json(client, url, fields="quotas").get("quotas", [])
    except (ApiError, UnreachableError):
        return []
    return [item for item in quotas if item.get("metric") in (_ALL_CPUS, _ALL_GPUS)]


def _bucket(client: requests.Session, url: str, bucket: str, stack: str, place: Place, recorded: bool) -> bool:
    try:
        resource = get_json(client, f"{url}/{bucket}")
        project_buckets = get_json(client, url, project=place.project, prefix=bucket).get("items", [])
    except ApiError as error:
        if error.status == 403:
            raise GcpError(
                f"bucket {bucket} belongs to another project, or you may not read it: "
                f"`pulumi config set bucket ANOTHER-NAME`, or roles/storage.admin here ({error})"
            ) from None
        return False
    except UnreachableError:
        return False
    owner = (resource.get("labels") or {}).get("scaletier-stack")
    if owner and owner != stack:
        raise GcpError(f"bucket {bucket} is that of the stack {owner}: `pulumi config set bucket ANOTHER-NAME`")
    if bucket not in [item.get("name") for item in project_buckets]:
        raise GcpError(
            f"bucket {bucket} is not in project {place.project} and no bucket can move: set gcp:project to where it is, or "
            "`pulumi config set bucket ANOTHER-NAME`"
        )
    location = str(resource.get("location", place.region)).lower()
    if location != place.region:
        raise GcpError(
            f"bucket {bucket} is in {location} and no bucket can move: choose a zone of {location}, or create another stack in "
            f"{place.region} (`pulumi stack init`)"
        )
    if not owner and not recorded:
        raise GcpError(f"bucket {bucket} exists and is not this stack's: `pulumi config set bucket ANOTHER-NAME`")
    return bool(owner)
