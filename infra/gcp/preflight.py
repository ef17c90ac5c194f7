"""What can be known before anything is made: asked at every preview, so that a bad start costs nothing.

It refuses on what Google says for certain, and on nothing else: what it cannot see, the API refuses later by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import requests

from infra.gcp.api import COMPUTE, LOGIN, STORAGE, ApiError, GcpError, Get, UnreachableError, endpoint, get_json, session
from infra.gcp.machines import machine
from infra.gcp.zones import Place
from infra.spec import ClusterSpec

_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
_DISABLED = ("SERVICE_DISABLED", "accessNotConfigured")
# Source: Compute Engine documentation, "Allocation quotas". A series that is not named is left to the API.
_CPUS = {"n1": "CPUS", "e2": "CPUS", "n2": "N2_CPUS", "a2": "A2_CPUS"}
_GPUS = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-v100": "NVIDIA_V100_GPUS",
    "nvidia-tesla-p100": "NVIDIA_P100_GPUS",
    "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
}
_DISKS = {"pd-ssd": "SSD_TOTAL_GB", "pd-balanced": "SSD_TOTAL_GB", "pd-standard": "DISKS_TOTAL_GB"}


def preflight(spec: ClusterSpec, place: Place, disk_type: str, disk_size: int, bucket: str, stack: str, get: Get) -> None:
    """Looks for credentials, the Compute API, quotas and the bucket's name; raises GcpError for the first that will not do."""
    client = session(get)
    url = f"{endpoint(COMPUTE, get)}projects/{place.project}/regions/{place.region}"
    limits = _limits(client, url, place)
    for name, needed in needs(spec, disk_type, disk_size, limits).items():
        if name in limits and needed > limits[name]:
            raise GcpError(
                f"quota {name} in {place.region} is {limits[name]:g} and this cluster needs {needed}: ask for more at "
                f"{_QUOTAS}?project={place.project}, or take a smaller tier"
            )
    _bucket(client, f"{endpoint(STORAGE, get)}b/{bucket}", bucket, stack)


def needs(spec: ClusterSpec, disk_type: str, disk_size: int, limits: Mapping[str, float] | None = None) -> dict[str, int]:
    """What a cluster takes of the region's quotas, by the quota's name; pure.

    Spot hosts take the preemptible quotas of a project that has been given some, else the same as others.
    """
    needed: Counter[str] = Counter()
    for role in spec.roles.values():
        found = machine(role.machine_type)
        cpus, preemptible = _CPUS.get(found.series), role.spot and (limits or {}).get("PREEMPTIBLE_CPUS")
        if cpus:
            needed["PREEMPTIBLE_CPUS" if preemptible else cpus] += role.count * found.cpus
        needed[_DISKS[disk_type]] += role.count * disk_size
        needed["INSTANCES"] += role.count
        if role.accelerator:
            name = _GPUS[role.accelerator.type]
            preemptible = role.spot and (limits or {}).get(f"PREEMPTIBLE_{name}")
            needed[f"PREEMPTIBLE_{name}" if preemptible else name] += role.count * role.accelerator.count
    return dict(needed)


def _limits(client: requests.Session, url: str, place: Place) -> Mapping[str, float]:
    try:
        answer = get_json(client, url)
    except ApiError as error:
        if error.status == 401:
            raise GcpError(f"Google refused the credentials ({error}): {LOGIN}") from None
        if error.reason in _DISABLED:
            raise GcpError(
                "the Compute Engine API is not enabled: "
                f"`gcloud services enable compute.googleapis.com --project {place.project}`"
            ) from None
        if error.status == 403:
            raise GcpError(
                f"no right to use project {place.project} ({error}): docs/gcp.md has the roles that you need"
            ) from None
        return {}
    except UnreachableError:
        return {}
    return {str(item["metric"]): float(item["limit"]) for item in answer.get("quotas", [])}


def _bucket(client: requests.Session, url: str, bucket: str, stack: str) -> None:
    try:
        labels = get_json(client, url).get("labels") or {}
    except ApiError as error:
        if error.status == 403:
            raise GcpError(
                f"bucket {bucket} belongs to somebody else: `pulumi config set bucket ANOTHER-NAME` ({error})"
            ) from None
        return
    except UnreachableError:
        return
    # One without the label may have been imported.
    owner = labels.get("scaletier-stack", stack)
    if owner != stack:
        raise GcpError(f"bucket {bucket} is that of the stack {owner}: `pulumi config set bucket ANOTHER-NAME`")
