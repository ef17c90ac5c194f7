"""The storage pool of local hosts; set-up runs `python -m infra.lxd.pool make NAME` and `remove NAME`."""

from __future__ import annotations

import argparse
import shutil
import sys

from infra.lxd.api import LxdError, client, errors

_MADE_BY = "made by scaletier's set-up"
_GIB = 2**30
_SIZE = 40 * _GIB
_MIN_SIZE = 4 * _GIB


def make(name: str) -> str:
    """Create a pool on a btrfs loop file unless it exists; return a message.

    On btrfs, a host begins as a snapshot of the image. LxdError if less than 8 GiB are free on the disk.
    """
    with errors(f"storage pool {name}"):
        if client().storage_pools.exists(name):
            return f"storage pool {name} is there"
        free = shutil.disk_usage("/var/lib").free
        size = min(_SIZE, free // 2)
        if size < _MIN_SIZE:
            raise LxdError(
                f"the disk is nearly full: {free / _GIB:.1f} GiB free, a storage pool needs {2 * _MIN_SIZE // _GIB} GiB"
            )
        body = {"name": name, "driver": "btrfs", "description": _MADE_BY, "config": {"size": str(size)}}
        client().storage_pools.create(body)
        return f"made storage pool {name} (btrfs, {size // _GIB} GiB at most)"


def remove(name: str) -> str:
    """Remove a pool that `make` created; return a message. LxdError if another program created it, or it is in use."""
    with errors(f"storage pool {name}"):
        if not client().storage_pools.exists(name):
            return f"storage pool {name} is gone"
        pool = client().storage_pools.get(name)
        if pool.description != _MADE_BY:
            raise LxdError(f"storage pool {name} stays: set-up did not make it")
        if pool.used_by:
            raise LxdError(f"storage pool {name} stays: {len(pool.used_by)} instances, images or volumes use it")
        pool.delete()
        return f"removed storage pool {name}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.lxd.pool", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("make", "remove"))
    parser.add_argument("name", help="of the pool")
    parsed = parser.parse_args(arguments)
    try:
        print(f"lxd: {make(parsed.name) if parsed.action == 'make' else remove(parsed.name)}")
    except LxdError as error:
        print(f"lxd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
