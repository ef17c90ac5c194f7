"""`.scaletier/<stack>/`: what `fab` and plain `ssh -F` need to reach a cluster, from its inventory and the operator's key.

`pulumi up` writes it where it runs, and `fab connect` anywhere else.
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
    """The files of a folder by name, from an inventory in JSON; KeyError where that lacks something. Pure."""
    known: Mapping[str, Any] = json.loads(inventory)
    hosts = known["hosts"]
    keys = {host["sshHost"]: host["hostKey"] for host in hosts}
    return {
        "inventory.json": inventory,
        "id_ed25519": private_key,
        "known_hosts": "".join(f"{name} {key}\n" for name, key in sorted(keys.items()) if key),
        "ssh_config": render("ssh_config.j2", hosts=hosts, folder=str(folder), proxy_command=known["proxyCommand"]),
    }


def write(folder: Path, contents: Mapping[str, str]) -> None:
    """Make or replace the files, each at once, for nobody else to read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, text in contents.items():
        part = folder / f"{name}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)
        part.replace(folder / name)


def are_there(folder: Path, contents: Mapping[str, str]) -> bool:
    """True where the folder has just these files."""
    try:
        return all((folder / name).read_text() == text for name, text in contents.items())
    except (OSError, ValueError):
        return False


def remove(folder: Path) -> None:
    """Take the folder away, and the one that it is in where no other stack's is."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
