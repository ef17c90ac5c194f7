"""A resource that is deleted first, while hosts can still list the bucket; its deletion fails if the bucket has data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, hosts_of, is_not_found
from infra.lxd.bucket import DESTROY_ADVICE, REMOVE, RETAIN, pool_of, set_on_destroy
from infra.lxd.layout import BUCKET

REPLACE_ON_CHANGES = frozenset({"project", "pool", "name"})
_CLUSTER_RECORDS = frozenset({"cluster"})
_SHOWN = 3


class BucketGuard(ModuleResource, module="lxd", name="Seal"):  # the old name, kept for existing stacks
    """Inputs: project, pool and name of the bucket; retain (retainBucket) and force (forceDestroy).

    Created last and so deleted first. If the deletion fails, nothing else is destroyed.
    """

    module_name = __name__


def create(props: Props) -> tuple[str, Props]:
    set_on_destroy(props, RETAIN if props["retain"] else REMOVE if props["force"] else None)
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def delete(name: str, props: Props) -> None:
    """Raise LxdError if the bucket contains data and neither retain nor force is set: then nothing is destroyed."""
    if pool_of(props["project"]) is None:
        return
    if props["retain"]:
        where = f"volume {props['name']} of storage pool {props['pool']}, in LXD's project {props['project']}"
        sys.stderr.write(f"the bucket is retained: {where}; the next stack of this name reuses it\n")
    elif not props["force"]:
        with errors(f"volume {props['name']}"):
            _check_empty(props["project"])
        set_on_destroy(props, REMOVE)


def _check_empty(project: str) -> None:
    """Raise LxdError if the bucket contains data, or no running host can list it."""
    host = running_host(project)
    if host is None:
        raise LxdError(f"no running host can list the bucket, so nothing was destroyed: `pulumi up` first, or {DESTROY_ADVICE}")
    content = describe_content({folder: _list_folder(host, f"{BUCKET}/{folder}") for folder in _list_folder(host, BUCKET)})
    if content:
        raise LxdError(
            f"the bucket contains {content}, so nothing was destroyed. To save data: `fab get ID`. Then {DESTROY_ADVICE}"
        )


def running_host(project: str) -> Any:
    """Return a running host of the project, which can read its bucket, or None if there is none."""
    instances = (client(project).instances.get(name) for name in hosts_of(project))
    return next((instance for instance in instances if instance.status == "Running"), None)


def _list_folder(host: Any, path: str) -> list[str]:
    try:
        answer = host.api.files.get(params={"path": path})
    except pylxd.exceptions.LXDAPIException as error:
        if is_not_found(error):
            return []
        raise
    kinds = {answer.headers.get(f"X-{daemon}-type") for daemon in ("LXD", "Incus")}
    if "directory" not in kinds:
        return [path]
    return list(json.loads(answer.content)["metadata"] or [])


def describe_content(folders: Mapping[str, Sequence[str]]) -> str:
    """Return a description of a bucket's content, without empty folders and the cluster's own records."""
    parts = []
    for folder, entries in sorted(folders.items()):
        if entries and folder not in _CLUSTER_RECORDS:
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            parts.append(f"{folder} ({', '.join(sorted(entries)[:_SHOWN])}{more})")
    return ", ".join(parts)
