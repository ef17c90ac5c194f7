"""The Google Cloud target's row in the list of targets: checks what can be known, then builds."""

from __future__ import annotations

import os
from urllib.parse import quote

import google.auth.exceptions
import pulumi
import requests
from pulumi import Output
from pulumi.runtime.config import get_config

from infra.cluster import Cluster
from infra.cost import Cost, HostShape, hourly, price_list
from infra.gcp.api import COMPUTE, STORAGE, TIMEOUT, GcpError, Get, endpoint, session
from infra.gcp.cluster import Found, GcpCluster, GcpClusterArgs
from infra.gcp.config import GcpConfig
from infra.gcp.machines import machine
from infra.gcp.names import names
from infra.gcp.preflight import preflight
from infra.gcp.zones import check_gpu, place
from infra.spec import ClusterSpec, SpecError
from infra.targets import Target, TargetError


def provider_config(key: str) -> str | None:
    """A value of the provider's own configuration, `zone` or `gcp:zone`; a secret one too, which goes nowhere from here."""
    value: str | None = get_config(f"gcp:{key.removeprefix('gcp:')}")
    return value


def cost(spec: ClusterSpec, config: GcpConfig, region: str) -> Cost | None:
    """The cluster's cost by the list of prices; None where that has none for the region."""
    hosts = {}
    for role, found in spec.roles.items():
        kind = machine(found.machine_type)
        shape = HostShape(
            kind.series, kind.cpus, kind.memory, found.accelerator, found.spot,
            config.boot_disk_type, config.boot_disk_size, config.public_address,
        )  # fmt: skip
        hosts[role] = (found.count, shape)
    return hourly(price_list(), region, hosts)


def check_cost(found: Cost | None, most: float | None, region: str) -> None:
    """Raises TargetError for a cluster above `maxHourlyCost`, and for one that has a ceiling but no price."""
    if most is None:
        return
    if found is None:
        raise TargetError(
            f"maxHourlyCost is {most:g} and infra/prices.yaml has no price for this cluster in {region}: add it there, "
            "or `pulumi config rm maxHourlyCost`"
        )
    if found.total > most:
        raise TargetError(
            f"this cluster costs {found.line(region)}, more than maxHourlyCost {most:g}: take a smaller tier or spot hosts, "
            f"or `pulumi config set maxHourlyCost {found.total:.2f}`"
        )


def prepare(stack: str, spec: ClusterSpec, config: GcpConfig) -> Found:
    """All that can be known before anything is made; raises TargetError for what Google would refuse."""
    get: Get = provider_config
    try:
        where = place(get, os.environ)
        for found in spec.roles.values():
            if found.accelerator:
                check_gpu(found.accelerator.type, where.zone)
        price = cost(spec, config, where.region)
        check_cost(price, config.max_hourly_cost, where.region)
        own = names(where.project, stack)
        bucket = config.bucket or own.bucket
        preflight(spec, where, config.boot_disk_type, config.boot_disk_size, bucket, own.stack, get)
    except (GcpError, SpecError) as error:
        raise TargetError(str(error)) from None
    pulumi.log.info(price.line(where.region) if price else f"infra/prices.yaml has no price for this cluster in {where.region}")
    return Found(where, own, bucket, endpoint(COMPUTE, get), price)


def build(stack: str, spec: ClusterSpec, config: GcpConfig, found: Found, authorized_key: Output[str]) -> Cluster:
    """A cluster of Compute Engine instances."""
    return GcpCluster("cluster", GcpClusterArgs(spec, config, found, authorized_key)).cluster()


def read(stack: str, found: Found, path: str) -> bytes | None:
    """An object of the stack's bucket."""
    get: Get = provider_config
    url = f"{endpoint(STORAGE, get)}b/{found.bucket}/o/{quote(path, safe='')}"
    try:
        answer = session(get).get(url, params={"alt": "media"}, timeout=TIMEOUT)
    except (GcpError, requests.RequestException, google.auth.exceptions.GoogleAuthError):
        return None
    return answer.content if answer.ok else None


def create(stack: str, found: Found, path: str, content: bytes) -> None:
    """An object of the stack's bucket, where there is none of that name."""
    get: Get = provider_config
    base = endpoint(STORAGE, get).replace("/storage/v1/", "/upload/storage/v1/")
    params = {"uploadType": "media", "name": path, "ifGenerationMatch": "0"}
    try:
        answer = session(get).post(f"{base}b/{found.bucket}/o", params=params, data=content, timeout=TIMEOUT)
    except (GcpError, requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
        raise TargetError(f"the bucket does not take {path} ({error}): try again") from None
    if not answer.ok and answer.status_code != requests.codes.precondition_failed:
        raise TargetError(f"the bucket does not take {path} (HTTP {answer.status_code}): try again")


GCP = Target(GcpConfig, prepare, build, read, create)
