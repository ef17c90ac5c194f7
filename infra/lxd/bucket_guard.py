"""The guard of a bucket that is not empty.

`pulumi destroy` deletes it first, while hosts still run and can list the bucket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, hosts_of, missing
from infra.lxd.bucket import REMOVE, RETAIN, WISH, mark, pool_of
from infra.lxd.layout import BUCKET

REPLACE = frozenset({"project", "pool", "name"})
_BOOKKEEPING = frozenset({"cluster"})
_SHOWN = 3


class BucketGuard(ModuleResource, module="lxd", name="Seal"):
    """Inputs: project, pool, name of the bucket; retain and force, the configuration for its end.

    Created last, so deleted first. If the deletion fails, nothing else is destroyed.
    """

    lifecycle = __name__


def create(props: Props) -> tuple[str, Props]:
    mark(props, RETAIN if props["retain"] else REMOVE if props["force"] else None)
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def delete(name: str, props: Props) -> None:
    """Raise LxdError if the bucket holds anything and no option allows it; then all stays as it is."""
    if pool_of(props["project"]) is None:
        return
    if props["retain"]:
        where = f"volume {props['name']} of storage pool {props['pool']}, in LXD's project {props['project']}"
        sys.stderr.write(f"the bucket stays: {where}; the next stack of this name uses it\n")
    elif not props["force"]:
        with errors(f"volume {props['name']}"):
            _look(props["project"])
        mark(props, REMOVE)


def _look(project: str) -> None:
    host = running(project)
    if host is None:
        raise LxdError(f"no host runs that could list the bucket, so nothing is destroyed: `pulumi up` first, or {WISH}")
    content = holdings({folder: _listed(host, f"{BUCKET}/{folder}") for folder in _listed(host, BUCKET)})
    if content:
        raise LxdError(f"the bucket holds {content}, so nothing is destroyed: `fab get` what is to stay, then {WISH}")


def running(project: str) -> Any:
    """Return a running host of the project, which can read its bucket, or None if there is none."""
    instances = (client(project).instances.get(name) for name in hosts_of(project))
    return next((instance for instance in instances if instance.status == "Running"), None)


def _listed(host: Any, path: str) -> list[str]:
    try:
        answer = host.api.files.get(params={"path": path})
    except pylxd.exceptions.LXDAPIException as error:
        if missing(error):
            return []
        raise
    kinds = {answer.headers.get(f"X-{daemon}-type") for daemon in ("LXD", "Incus")}
    if "directory" not in kinds:
        return [path]
    return list(json.loads(answer.content)["metadata"] or [])


def holdings(folders: Mapping[str, Sequence[str]]) -> str:
    """Return a description of a bucket's content, without empty folders and the cluster's records. Pure."""
    parts = []
    for folder, entries in sorted(folders.items()):
        if entries and folder not in _BOOKKEEPING:
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            parts.append(f"{folder} ({', '.join(sorted(entries)[:_SHOWN])}{more})")
    return ", ".join(parts)
