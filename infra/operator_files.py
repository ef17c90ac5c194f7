"""`.scaletier/<stack>/`: the stack's outputs and what ssh needs, so that `fab` and plain `ssh -F` work without the engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.dynamic import ModuleResource, Props
from infra.templates import ROOT, render

REPLACE = frozenset({"folder"})
FOLDER = ".scaletier"


class OperatorFiles(ModuleResource, module="operator", name="OperatorFiles"):
    """Inputs: folder (below the project's root), files (name to text)."""

    lifecycle = __name__


def files(
    folder: str,
    inventory: Mapping[str, Any],
    ssh_hosts: Sequence[str],
    host_keys: Mapping[str, str],
    private_key: str,
    proxy: str | None,
) -> dict[str, str]:
    """The files of the folder by name; pure. `ssh_hosts` is what ssh connects to, in the order of the inventory's hosts."""
    here = ROOT / folder
    hosts = [{**host, "ssh_host": name} for host, name in zip(inventory["hosts"], ssh_hosts, strict=True)]
    return {
        "inventory.json": json.dumps(inventory, indent=1) + "\n",
        "id_ed25519": private_key,
        "known_hosts": "".join(f"{name} {key}\n" for name, key in sorted(host_keys.items())),
        "ssh_config": render("ssh_config.j2", hosts=hosts, folder=str(here), proxy_command=proxy),
    }


def create(props: Props) -> tuple[str, Props]:
    folder = ROOT / props["folder"]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, text in props["files"].items():
        part = folder / f"{name}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)
        part.replace(folder / name)
    return props["folder"], props


def read(name: str, props: Props) -> Props | None:
    paths: list[Path] = [ROOT / props["folder"] / file for file in props["files"]]
    return props if all(path.exists() for path in paths) else None


def update(name: str, old: Props, new: Props) -> Props:
    return create(new)[1]


def delete(name: str, props: Props) -> None:
    shutil.rmtree(ROOT / props["folder"], ignore_errors=True)
    with contextlib.suppress(OSError):  # another stack's folder is in it
        (ROOT / FOLDER).rmdir()
