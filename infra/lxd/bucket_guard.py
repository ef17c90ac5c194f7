"""A resource that is deleted first, while hosts can still list the bucket; its deletion fails if the bucket has data."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from infra.dynamic import ModuleResource, Props, is_update
from infra.guard import DESTROY_ADVICE, data_problem, destroy_problem, list_some
from infra.lxd.api import LxdError, client, errors, hosts_of
from infra.lxd.bucket import EMPTY, ON_DESTROY, REMOVE, RETAIN, get_volume, pool_of, set_on_destroy
from infra.lxd.files import list_folder, read_file
from infra.lxd.layout import BUCKET

REPLACE_ON_CHANGES = frozenset({"project", "pool", "name"})
_CLUSTER_RECORDS = frozenset({"cluster"})
_SHOWN = 3
# The projects whose buckets this process, which runs one operation of Pulumi, has checked.
_checked: set[str] = set()
_checking = threading.Lock()


class BucketGuard(ModuleResource, module="lxd", name="Seal"):  # the old name, kept for existing stacks
    """Inputs: project, pool and name of the bucket; retain (retainBucket), force (forceDestroy) and disrupt (disruptJobs).

    Created last and so deleted first. If the deletion fails, nothing else is destroyed.
    """

    module_name = __name__


def create(props: Props) -> tuple[str, Props]:
    set_on_destroy(props, _action(props))
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def _action(props: Props) -> str | None:
    return RETAIN if props["retain"] else REMOVE if props["force"] else None


def delete(name: str, props: Props) -> None:
    """Raise LxdError if the bucket contains data and neither retain nor force is set: then nothing is destroyed.

    With either of them, raise LxdError if a job has not ended, unless disrupt is set.
    """
    project = props["project"]
    if (pool := pool_of(project)) is None:
        return
    with errors("the bucket"):
        if problem := destroy_problem(props, lambda: _content(project), partial(_read, project)):
            raise LxdError(problem)
        # An update that replaces a lost pool has created the bucket in another one.
        volume = props if get_volume(props) else {**props, "pool": pool}
    if props["retain"]:
        where = f"volume {props['name']} of storage pool {volume['pool']}, in LXD's project {project}"
        sys.stderr.write(f"the bucket is retained: {where}; the next stack of this name reuses it\n")
    # Also `create` did this, but perhaps to another volume: one that was deleted by hand is created again.
    set_on_destroy(volume, _action(props) or EMPTY)
    _checked.add(project)


def check_again(volume: Props) -> None:
    """Raise LxdError if the bucket, empty when a destroy began that was interrupted, now contains data.

    The state has no guard any more, until an update ends, which may replace hosts. Each deletion of a host calls this; the
    first one of an operation checks.
    """
    project = volume["project"]
    with _checking, errors(f"volume {volume['name']}"):
        unchecked = project not in _checked and not is_update() and _is_labelled_empty(volume)
        if problem := data_problem(_content(project, interrupted=True) if unchecked else "", interrupted=True):
            raise LxdError(problem)
        _checked.add(project)


def _is_labelled_empty(props: Props) -> bool:
    volume = get_volume(props)
    return volume is not None and volume["config"].get(ON_DESTROY) == EMPTY


def _read(project: str, path: str) -> bytes | None:
    """Return a file in the bucket; None if there is none, or no host runs, and so no job."""
    host = running_host(project)
    return None if host is None else read_file(host, f"{BUCKET}/{path}")


def _content(project: str, interrupted: bool = False) -> str:
    """Return a description of the bucket's content; LxdError if no running host can list it."""
    host = running_host(project)
    if host is None:
        remedy = f"`pulumi up` first, or {DESTROY_ADVICE}"
        if interrupted and hosts_of(project):  # an update would first create again what an interrupted destroy deleted
            # It exits with an error, as it misses the deleted hosts. A host of `lxc start` may be without a firewall.
            remedy = "`fab doctor --fix; pulumi destroy`"
        more = "more " if interrupted else ""
        raise LxdError(f"no running host can list the bucket, so nothing {more}was destroyed: {remedy}")
    return describe_content({folder: list_folder(host, f"{BUCKET}/{folder}") for folder in list_folder(host, BUCKET)})


def running_host(project: str) -> Any:
    """Return a running host of the project, which can read its bucket, or None if there is none."""
    instances = (client(project).instances.get(name) for name in hosts_of(project))
    return next((instance for instance in instances if instance.status == "Running"), None)


def describe_content(folders: Mapping[str, Sequence[str]]) -> str:
    """Return a description of a bucket's content, without empty folders and the cluster's own records."""
    parts = []
    for folder, entries in sorted(folders.items()):
        if entries and folder not in _CLUSTER_RECORDS:
            parts.append(f"{folder} ({list_some(sorted(entries), _SHOWN)})")
    return ", ".join(parts)
