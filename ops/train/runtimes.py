"""`fab runtimes`: the Pythons that jobs have brought along, which are kept for the next job that asks for the same."""

from __future__ import annotations

import shutil
from pathlib import Path

from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import Inventory
from ops.errors import DONE, UsageError, meant
from ops.package import runtime

_ACTIONS = ("ls", "rm")


def runtimes(cluster: Cluster, action: str | None, name: str | None, sure: bool, as_json: bool) -> int:
    """`ls`, or `rm NAME`; UsageError for what is none of them, or is in use."""
    action = action or "ls"
    if action not in _ACTIONS:
        raise UsageError(f"fab runtimes {action} is unknown{meant(action, _ACTIONS)}; valid are {', '.join(_ACTIONS)}")
    if (name is None) != (action == "ls"):
        raise UsageError("fab runtimes ls takes no NAME" if action == "ls" else "fab runtimes rm needs the NAME of one")
    kept = _kept(cluster.inventory)
    if name is None:
        _list(kept, as_json)
    else:
        _remove(cluster, kept, name, sure)
    return DONE


def _kept(inventory: Inventory) -> dict[str, Path]:
    folder = inventory.operator_runtimes
    if folder is None:
        raise UsageError(f"the hosts of stack {inventory.stack} have one Python only: jobs bring none along")
    return {path.name: path for path in sorted(folder.glob("[!.]*")) if path.is_dir()}


def _list(kept: dict[str, Path], as_json: bool) -> None:
    found = [(name, runtime.versions(path), _bytes(path)) for name, path in kept.items()]
    if as_json:
        terminal.as_json([{"name": name, "versions": versions, "bytes": size} for name, versions, size in found])
    elif not found:
        terminal.note("there are none: fab train --runtime-version or --runtime builds one")
    else:
        rows = [
            (name, versions.get("tensorflow") or versions.get("tensorflow-cpu", "-"), str(len(versions)), terminal.size(size))
            for name, versions, size in found
        ]
        terminal.table(("NAME", "TENSORFLOW", "PACKAGES", "SIZE"), rows)


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _remove(cluster: Cluster, kept: dict[str, Path], name: str, sure: bool) -> None:
    if name not in kept:
        raise UsageError(f"there is no runtime {name}{meant(name, kept)}; there are {', '.join(kept) or 'none'}")
    records, _ = cluster.ledger.jobs()
    for record in records:
        if not record.final and record.manifest.get("runtime", {}).get("key") == name:
            raise UsageError(f"job {record.jobId}, which is {record.state}, runs in {name}: wait for it, or cancel it")
    if not sure:
        terminal.confirm(f"remove the runtime {name}; a job that asks for it builds it anew")
    with terminal.Step(f"removing {name}"):
        shutil.rmtree(kept[name])
    terminal.note(f"{name} is removed")
