"""Files in `.scaletier/<stack>/` with which `fab` and plain `ssh -F` reach a cluster.

They are made of its inventory and the operator's key. `pulumi up` writes them where it runs, `fab connect` on other machines.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.templates import render

FOLDER = ".scaletier"


def files(folder: Path, inventory: str, private_key: str) -> dict[str, str]:
    """Return the content of a folder's files by name, from an inventory in JSON; KeyError if it lacks a key."""
    cluster: Mapping[str, Any] = json.loads(inventory)
    hosts = cluster["hosts"]
    keys = {host["sshHost"]: host["hostKey"] for host in hosts}
    return {
        "inventory.json": inventory,
        "id_ed25519": private_key,
        "known_hosts": "".join(f"{name} {key}\n" for name, key in sorted(keys.items()) if key),
        "ssh_config": render("ssh_config.j2", hosts=hosts, folder=str(folder), proxy_command=cluster["proxyCommand"]),
    }


def write(folder: Path, contents: Mapping[str, str]) -> None:
    """Create or replace the files atomically, readable by their owner alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, text in contents.items():
        part = folder / f"{name}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)
        part.replace(folder / name)


def contents_match(folder: Path, contents: Mapping[str, str]) -> bool:
    """Return True if the folder has all these files with these contents."""
    try:
        return all((folder / name).read_text() == text for name, text in contents.items())
    except (OSError, ValueError):
        return False


def remove(folder: Path) -> None:
    """Remove the folder, and its parent if no other stack has a folder there."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
