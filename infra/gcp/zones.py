"""A cluster's project, region and zone, as configured for Pulumi's Google Cloud provider."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.gcp.api import ReadConfig
from infra.scale_tiers import SpecError

_ZONE = re.compile(r"^([a-z]+-[a-z]+\d+)-[a-z]$")
_REGION = re.compile(r"^[a-z]+-[a-z]+\d+$")
_PROJECT = re.compile(r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$")
# The variables that the provider itself reads, in its order.
_ENVIRONMENT = {
    "project": ("GOOGLE_PROJECT", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"),
    "region": ("GOOGLE_REGION", "GCLOUD_REGION", "CLOUDSDK_COMPUTE_REGION"),
    "zone": ("GOOGLE_ZONE", "GCLOUD_ZONE", "CLOUDSDK_COMPUTE_ZONE"),
}


@dataclass(frozen=True)
class Place:
    """A project, a region, and a zone of it."""

    project: str
    region: str
    zone: str


def check_gpu(gpu: str, zone: str, gpu_zones: Mapping[str, tuple[str, ...]]) -> None:
    """Raise SpecError if the zone lacks the GPU; the message names zones that have it, of the same region if there are any."""
    zones = gpu_zones.get(gpu, ())
    if zone not in zones:
        near = [name for name in zones if name.rpartition("-")[0] == zone.rpartition("-")[0]]
        raise SpecError(
            f"zone {zone} has no {gpu}; {'in its region it is in' if near else 'it is in'} {', '.join(near or zones) or 'none'}"
        )


def places(read_config: ReadConfig, environment: Mapping[str, str], zones: Sequence[str] = ()) -> tuple[Place, ...]:
    """Return one place for each of these zones, which must be of one region; without zones, the place of the provider."""
    choices = tuple(place(read_config, environment, zone) for zone in zones)
    if len({each.region for each in choices}) > 1:
        raise SpecError(f"zones are {', '.join(zones)}: they must be of one region, where the subnet and the bucket are")
    return choices or (place(read_config, environment),)


def project(read_config: ReadConfig, environment: Mapping[str, str]) -> str:
    """Return the project from `gcp:` configuration, else from the environment; SpecError if it is invalid."""
    value = _setting("project", read_config, environment)
    if not value:
        raise SpecError("no Google Cloud project: `pulumi config set gcp:project PROJECT_ID`")
    if not _PROJECT.match(value):
        raise SpecError(f"gcp:project {value!r} is not a project's id (such as my-project-123, not its name or number)")
    return value


def _setting(key: str, read_config: ReadConfig, environment: Mapping[str, str]) -> str | None:
    return read_config(key) or next((environment[name] for name in _ENVIRONMENT[key] if environment.get(name)), None)


def place(read_config: ReadConfig, environment: Mapping[str, str], chosen: str | None = None) -> Place:
    """Return project, region and zone from `chosen`, `gcp:` configuration or the environment; SpecError if one is invalid."""
    project_id, region = project(read_config, environment), _setting("region", read_config, environment)
    zone = chosen or _setting("zone", read_config, environment)
    if not zone:
        raise SpecError("no zone: `pulumi config set gcp:zone us-central1-a`")
    match = _ZONE.match(zone)
    if not match:
        raise SpecError(f"gcp:zone {zone!r} is not a zone; a zone is a region and a letter, such as us-central1-a")
    if region and not _REGION.match(region):
        raise SpecError(f"gcp:region {region!r} is not a region, such as us-central1")
    if region and region != match[1]:
        raise SpecError(
            f"gcp:zone {zone} is not in gcp:region {region}: `pulumi config set gcp:region {match[1]}`, or another zone"
        )
    return Place(project_id, match[1], zone)
