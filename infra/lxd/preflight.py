"""Check this machine at every preview and update, so that an update that would fail changes nothing."""

from __future__ import annotations

import ipaddress
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.lxd import image
from infra.lxd.api import LxdError, client, errors, hosts_of
from infra.lxd.bucket import pool_of, used_bytes
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import forward_drops
from infra.lxd.identity import names_of
from infra.lxd.layout import LxdNames
from infra.lxd.network import choose_range
from infra.lxd.nft import list_chains
from infra.scale_tiers import ClusterSpec
from infra.state import StackState
from infra.templates import ROOT

_SHARED_MODE = 0o755
_HOST_DISK = 64 * 2**20
_SPARE_DISK = 2**30
_GIB = 2**30
BRIDGE_NF_CALL = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


@dataclass(frozen=True)
class PreflightResult:
    """Hold what a stack's resources need of this machine.

    `image` is the image's name, `runtime` the folder of the hosts' Python, `network` the bridge's range, `bucket_size` in bytes
    (0 for no limit).
    """

    names: LxdNames
    image: str
    runtime: Path
    network: ipaddress.IPv4Network
    bucket_size: int
    warnings: tuple[str, ...] = ()


def preflight(stack: str, spec: ClusterSpec, config: LxdConfig, state: StackState) -> PreflightResult:
    """Check LXD, the image, the storage pool and the address range; LxdError for the first check that fails."""
    _refuse_gpus(spec)
    _create_shared_folder(image.LOCAL_RUNTIMES)
    own, pool = names_of(stack, ROOT, state), config.storage_pool
    with errors("storage pools"):
        if (existing := pool_of(own.project)) not in (None, pool):
            raise LxdError(
                f"storagePool is {pool}, and the bucket is in {existing}, which another pool would lose: "
                f"`pulumi config set storagePool {existing}`, or `pulumi destroy` first"
            )
        pools = [item.name for item in client().storage_pools.all()]
        if pool not in pools:
            raise LxdError(
                f"storage pool {pool} does not exist; there is {', '.join(pools) or 'none'}: "
                "make one with `make lxd`, or `pulumi config set storagePool NAME`"
            )
        network = choose_range(own.project, own.bridge, config.network)
        warnings = (*_unused_limits(spec, config), *forward_drops(BRIDGE_NF_CALL, list_chains), *_quota_warnings(pool))
        image_name, runtime = image.require(), image.require_runtime()
        total = _check_pool_space(spec, pool, own.project)
    return PreflightResult(own, image_name, runtime, network, _bucket_size(own, config, total), warnings)


def _create_shared_folder(folder: Path) -> None:
    """Create the folder that hosts mount when they start, readable by their users whatever the umask."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Only the folder's owner may change its mode: the user may not, after a `pulumi up` as root.
        if stat.S_IMODE(folder.stat().st_mode) != _SHARED_MODE:
            folder.chmod(_SHARED_MODE)
    except OSError as error:
        raise LxdError(f"{folder} cannot be used ({error.strerror}): `sudo chown -R $USER {folder.parent}`") from None


def _refuse_gpus(spec: ClusterSpec) -> None:
    for role, role_spec in spec.roles.items():
        if role_spec.accelerator:
            raise LxdError(
                f"{role} has {role_spec.accelerator.count} {role_spec.accelerator.type}, and local hosts have no GPUs: "
                "`pulumi config set target gcp`, or a tier without, such as BASIC"
            )


def _unused_limits(spec: ClusterSpec, config: LxdConfig) -> list[str]:
    """Return a warning for each limit of a role without hosts, which the user may keep for a larger tier."""
    return [
        f"{key}.{role} has no effect: this cluster has no {role}; it has {', '.join(spec.roles)}"
        for key in ("cpus", "memory", "disk")
        for role in getattr(config, key)
        if role not in spec.roles
    ]


def _bucket_size(own: LxdNames, config: LxdConfig, total: int) -> int:
    """Return the bucket's limit: the configured one, else half of the pool, in whole GiB."""
    pool = config.storage_pool
    size = config.bucket_size or total // 2 // _GIB * _GIB
    for key, limit in (("bucketSize", size), *((f"disk.{role}", size) for role, size in config.disk.items())):
        if total and limit > total:
            raise LxdError(
                f"{key} is {limit / _GIB:.1f} GiB, and storage pool {pool} has {total / _GIB:.1f} GiB in all: "
                f"`pulumi config set --path {key} {max(1, total // 2 // _GIB)}GiB`"
            )
    used = used_bytes({"project": own.project, "pool": pool, "name": own.bucket}) or 0
    if size and used > size:
        raise LxdError(
            f"the bucket holds {used / _GIB:.1f} GiB, and may hold {size / _GIB:.1f} GiB: "
            f"`pulumi config set bucketSize {used // _GIB + 1}GiB` or more, or `fab prune` first"
        )
    return size


def _quota_warnings(pool: str) -> list[str]:
    """Return a warning if the pool cannot limit disks, because it is a folder of a file system without quotas."""
    storage_pool = client().storage_pools.get(pool)
    if storage_pool.driver != "dir" or _has_quotas(str(storage_pool.config.get("source", "/"))):
        return []
    return [
        f"storage pool {pool} is a folder of a file system without project quotas, so `disk` and `bucketSize` limit nothing: "
        "a job that fills its disk fills it for all stacks. `make lxd` makes a pool that does, of btrfs"
    ]


def _has_quotas(folder: str) -> bool:
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(folder).is_relative_to(part.mountpoint)]
    options = max(mounts, key=lambda part: len(part.mountpoint)).opts.split(",") if mounts else []
    return bool({"prjquota", "pquota"} & {*options})


def _check_pool_space(spec: ClusterSpec, pool: str, project: str) -> int:
    """Return the size of the pool in bytes, or 0 if it is unknown; LxdError if too little is free for new hosts."""
    space: dict[str, Any] = client().api.storage_pools[pool].resources.get().json()["metadata"]["space"]
    existing = hosts_of(project)
    new = [host_id for host_id in spec.hosts if host_id.name not in existing]
    free = space["total"] - space["used"]
    needed = _SPARE_DISK + _HOST_DISK * len(new)
    if new and space["total"] and free < needed:
        raise LxdError(
            f"storage pool {pool} is nearly full: {free / _GIB:.1f} GiB free, {len(new)} new hosts need "
            f"{needed / _GIB:.1f} GiB: free some, or destroy another stack"
        )
    return int(space["total"])
