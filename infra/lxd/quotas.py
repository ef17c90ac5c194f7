"""Keep btrfs qgroup accounting consistent; otherwise disk quotas are silently not enforced.

When a large tree is deleted, such as an image or a host, btrfs of a recent Linux (6.18 or later) ends the accounting of the
whole pool, until a rescan. `drop_subtree_threshold` makes it account for such trees, until the file system is mounted again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

_BTRFS = Path("/sys/fs/btrfs")
_ALL_TREES = "8"
_SECONDS = 300


def is_accounting(pool: str, root: Path = _BTRFS) -> bool:
    """Return False if the kernel reports a btrfs pool's accounting as inconsistent; True otherwise, also for other pools."""
    qgroups = _qgroups(pool, root)
    try:
        return qgroups is None or (qgroups / "inconsistent").read_text().strip() != "1"
    except OSError:
        return True  # the kernel does not report it


def enable_accounting(pool: str, root: Path = _BTRFS) -> None:
    """Make the kernel account for all deletions; if the accounting is inconsistent, rescan, by `sudo -n` if not root."""
    qgroups = _qgroups(pool, root)
    if qgroups is None:
        return
    with suppress(OSError):
        (qgroups / "drop_subtree_threshold").write_text(_ALL_TREES)
    if not is_accounting(pool, root):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(_argv(pool), capture_output=True, timeout=_SECONDS, check=False)


def command(pool: str) -> str:
    """Return the command with which the user makes the kernel rescan."""
    return f"sudo btrfs quota rescan -w {_mount_point(pool)}"


def _argv(pool: str) -> list[str]:
    path = shutil.which("btrfs") or "/usr/bin/btrfs"
    argv = [path, "quota", "rescan", "-w", _mount_point(pool)]
    return argv if os.geteuid() == 0 else ["sudo", "-n", *argv]


def _qgroups(pool: str, root: Path) -> Path | None:
    """Return the kernel's folder about a pool's quotas; LXD labels the file system with the pool's name."""
    for label in root.glob("*/label"):
        with suppress(OSError):
            qgroups = label.with_name("qgroups")
            if label.read_text().strip() == pool and qgroups.is_dir():
                return qgroups
    return None


def _mount_point(pool: str) -> str:
    places = (part.mountpoint for part in psutil.disk_partitions(all=True))
    return next((place for place in places if place.endswith(f"/storage-pools/{pool}")), f"/var/lib/lxd/storage-pools/{pool}")
