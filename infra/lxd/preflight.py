"""What must be true of this machine before anything is made: asked at every preview, so that a bad start costs nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from infra.lxd import image, network
from infra.lxd.api import LxdError, client, errors, hosts_of
from infra.lxd.config import LxdConfig
from infra.lxd.layout import Names
from infra.spec import ClusterSpec

_HOST_DISK = 64 * 2**20
_SPARE_DISK = 2**30


@dataclass(frozen=True)
class Found:
    """What the machine has for a stack: the image's name, and a range of addresses for its bridge."""

    image: str
    network: ipaddress.IPv4Network


def preflight(spec: ClusterSpec, config: LxdConfig, names: Names) -> Found:
    """Looks at LXD, the image, the storage pool and the address range; raises LxdError for the first that will not do."""
    with errors("LXD"):
        drivers = str(client().host_info["environment"]["driver"])
    _kinds(spec, config, drivers)
    image.RUNTIMES_HERE.mkdir(parents=True, exist_ok=True)  # hosts mount it, and start only where it is
    image.RUNTIMES_HERE.chmod(0o755)  # whatever the umask: their users are others
    found = Found(image.require(), network.choose_range(names.project, names.bridge, config.network))
    _disk(spec, config.storage_pool, names.project)
    return found


def _kinds(spec: ClusterSpec, config: LxdConfig, drivers: str) -> None:
    if config.instance_type == "virtual-machine" and "qemu" not in drivers:
        raise LxdError(
            f"LXD here runs no virtual machines (its drivers: {drivers}): it needs KVM, vhost_vsock and qemu; "
            "`pulumi config set instanceType container`"
        )
    for role, found in spec.roles.items():
        if found.accelerator:
            raise LxdError(
                f"{role} has {found.accelerator.count} {found.accelerator.type}, and local hosts have no GPUs: "
                "`pulumi config set target gcp`, or a tier without, such as BASIC"
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
