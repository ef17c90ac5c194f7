"""What must be true of this machine before anything is made: asked at every preview, so that a bad start costs nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.lxd import image
from infra.lxd.api import LxdError, client, errors, hosts_of
from infra.lxd.bucket import pool_of
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import forward_drops
from infra.lxd.identity import names_of
from infra.lxd.layout import Names
from infra.lxd.network import choose_range
from infra.lxd.nft import list_chains
from infra.spec import ClusterSpec
from infra.state import State
from infra.templates import ROOT

_HOST_DISK = 64 * 2**20
_SPARE_DISK = 2**30
_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


@dataclass(frozen=True)
class Found:
    """What the machine has for a stack: what its things are called, the image's name, the folder of the hosts' Python, a range
    of addresses for its bridge.
    """

    names: Names
    image: str
    runtime: Path
    network: ipaddress.IPv4Network
    warnings: tuple[str, ...] = ()


def preflight(stack: str, spec: ClusterSpec, config: LxdConfig, before: State) -> Found:
    """Looks at LXD, the image, the storage pool and the address range; raises LxdError for the first that will not do."""
    client()
    _kinds(spec)
    image.RUNTIMES_HERE.mkdir(parents=True, exist_ok=True)  # hosts mount it, and start only where it is
    image.RUNTIMES_HERE.chmod(0o755)  # whatever the umask: their users are others
    own = names_of(stack, ROOT, before)
    _bucket(own, config.storage_pool)
    network = choose_range(own.project, own.bridge, config.network)
    warnings = tuple(forward_drops(_BRIDGED, list_chains))
    found = Found(own, image.require(), image.require_runtime(), network, warnings)
    _disk(spec, config.storage_pool, own.project)
    return found


def _kinds(spec: ClusterSpec) -> None:
    for role, found in spec.roles.items():
        if found.accelerator:
            raise LxdError(
                f"{role} has {found.accelerator.count} {found.accelerator.type}, and local hosts have no GPUs: "
                "`pulumi config set target gcp`, or a tier without, such as BASIC"
            )


def _bucket(own: Names, pool: str) -> None:
    with errors("storage pools"):
        there = pool_of(own.project)
    if there not in (None, pool):
        raise LxdError(
            f"storagePool is {pool}, and the bucket is in {there}, which another pool would lose: "
            f"`pulumi config set storagePool {there}`, or `pulumi destroy` first"
        )


def _disk(spec: ClusterSpec, pool: str, project: str) -> None:
    with errors("storage pools"):
        pools = [item.name for item in client().storage_pools.all()]
        if pool not in pools:
            raise LxdError(
                f"storage pool {pool} does not exist; there is {', '.join(pools) or 'none'}: "
                "make one with `make lxd`, or `pulumi config set storagePool NAME`"
            )
        space: dict[str, Any] = client().api.storage_pools[pool].resources.get().json()["metadata"]["space"]
        there = hosts_of(project)
    new = [replica for replica in spec.replicas if replica.name not in there]
    free = space["total"] - space["used"]
    needed = _SPARE_DISK + _HOST_DISK * len(new)
    if new and space["total"] and free < needed:
        raise LxdError(
            f"storage pool {pool} is nearly full: {free / 2**30:.1f} GiB free, {len(new)} new hosts need "
            f"{needed / 2**30:.1f} GiB: free some, or destroy another stack"
        )
