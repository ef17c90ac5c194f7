"""Keep btrfs qgroup accounting consistent; otherwise disk quotas are silently not enforced.

If a large tree is deleted, as an image or a host, btrfs of a recent Linux (6.18 at least) stops counting for the whole pool,
until a rescan. A switch makes it count such trees too; it is lost when the file system is mounted again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

_BTRFS = Path("/sys/fs/btrfs")
_WHOLE_TREES = "8"
_SECONDS = 300


def is_accounting(pool: str, root: Path = _BTRFS) -> bool:
    """Return False if limits of a btrfs pool are not enforced; True otherwise, also for another kind or without limits."""
    groups = _groups(pool, root)
    try:
        return groups is None or (groups / "inconsistent").read_text().strip() != "1"
    except OSError:
        return True  # the kernel does not report it


def enable_accounting(pool: str, root: Path = _BTRFS) -> None:
    """Make the kernel count all deletions, and rescan by `sudo -n` if it has stopped; `command` returns that for a person."""
    groups = _groups(pool, root)
    if groups is None:
        return
    with suppress(OSError):
        (groups / "drop_subtree_threshold").write_text(_WHOLE_TREES)
    if not is_accounting(pool, root):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(_argv(pool), capture_output=True, timeout=_SECONDS, check=False)


def command(pool: str) -> str:
    """Return the command that makes the kernel rescan, for a person."""
    return f"sudo btrfs quota rescan -w {_mounted(pool)}"


def _argv(pool: str) -> list[str]:
    path = shutil.which("btrfs") or "/usr/bin/btrfs"
    argv = [path, "quota", "rescan", "-w", _mounted(pool)]
    return argv if os.geteuid() == 0 else ["sudo", "-n", *argv]


def _groups(pool: str, root: Path) -> Path | None:
    """Return the kernel's folder about a pool's quotas; LXD labels the file system with the pool's name."""
    for label in root.glob("*/label"):
        with suppress(OSError):
            groups = label.with_name("qgroups")
            if label.read_text().strip() == pool and groups.is_dir():
                return groups
    return None


def _mounted(pool: str) -> str:
    places = (part.mountpoint for part in psutil.disk_partitions(all=True))
    return next((place for place in places if place.endswith(f"/storage-pools/{pool}")), f"/var/lib/lxd/storage-pools/{pool}")
