"""`fab runtimes`: the Python runtimes of jobs, which are kept for the next job that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.runtime.atomic_dir import remove
from infra.scale_tiers import suggest
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import require_runtimes
from ops.errors import DONE, UsageError
from ops.package import hostpython
from ops.package.runtimes import installed_packages, requested_packages
from ops.submit.end import unreadable_error

_ACTIONS = ("ls", "rm")


def runtimes(cluster: ClusterClient, action: str | None, name: str | None, sure: bool, as_json: bool) -> int:
    """Run `ls`, or `rm NAME`; UsageError for an unknown runtime, or one that a job of this stack runs in or waits for."""
    action = action or "ls"
    if action not in _ACTIONS:
        raise UsageError(f"fab runtimes {action} is unknown{suggest(action, _ACTIONS)}; valid are {', '.join(_ACTIONS)}")
    if (name is None) != (action == "ls"):
        raise UsageError("fab runtimes ls takes no NAME" if action == "ls" else "fab runtimes rm needs the NAME of one")
    folder = require_runtimes(cluster.inventory, "fab runtimes").here
    folders = {path.name: path for path in sorted(folder.glob("[!.]*")) if path.is_dir()}
    result = _list(folders, as_json) if name is None else _remove(cluster, folders, name, sure)
    if as_json:
        terminal.print_json(result)
    return DONE


def _list(folders: Mapping[str, Path], as_json: bool) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        {"name": name, "requirements": requested_packages(path), "versions": installed_packages(path), "bytes": _bytes(path)}
        for name, path in folders.items()
    ]
    if not as_json and not entries:
        terminal.note("there are none: fab train --runtime-version or --runtime builds one")
    elif not as_json:
        rows = [
            (
                each["name"],
                hostpython.add_aliases(each["versions"]).get("tensorflow", "-"),
                str(len(each["versions"])),
                terminal.size(each["bytes"]),
                terminal.list_some(each["requirements"]),
            )
            for each in entries
        ]
        terminal.table(("NAME", "TENSORFLOW", "PACKAGES", "SIZE", "ASKED FOR"), rows)
    return entries


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _remove(cluster: ClusterClient, folders: Mapping[str, Path], name: str, sure: bool) -> dict[str, Any]:
    if name not in folders:
        raise UsageError(f"there is no runtime {name}{suggest(name, folders)}; there are {', '.join(folders) or 'none'}")
    records, unreadable = cluster.ledger.jobs()
    if unreadable:
        raise unreadable_error(unreadable)
    for record in records:
        if not record.final and record.manifest.get("runtime", {}).get("key") == name:
            raise UsageError(f"job {record.jobId}, which is {record.state}, runs in {name}: wait for it, or cancel it")
    if not sure:
        terminal.confirm(f"remove the runtime {name}, which no job of stack {cluster.inventory.stack} runs in")
    with terminal.ProgressLine(f"removing {name}"):
        remove(folders[name])
    terminal.note(f"{name} is removed")
    return {"removed": name}
