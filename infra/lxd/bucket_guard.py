"""A resource that is deleted first, while hosts can still list the bucket; its deletion fails if the bucket has data."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, hosts_of, is_not_found
from infra.lxd.bucket import DESTROY_ADVICE, EMPTY, ON_DESTROY, REMOVE, RETAIN, get_volume, pool_of, set_on_destroy
from infra.lxd.layout import BUCKET
from jobs.paths import QUEUE, job
from jobs.queue import Queue
from jobs.records import JobRecord
from jobs.serialization import RecordError

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
    set_on_destroy(props, RETAIN if props["retain"] else REMOVE if props["force"] else None)
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def delete(name: str, props: Props) -> None:
    """Raise LxdError if the bucket contains data and neither retain nor force is set: then nothing is destroyed.

    With either of them, raise LxdError if a job has not ended, unless disrupt is set.
    """
    if pool_of(props["project"]) is None:
        return
    if (props["retain"] or props["force"]) and not props.get("disrupt"):  # older states lack it
        with errors("the bucket"):
            _check_jobs(props["project"])
    if props["retain"]:
        where = f"volume {props['name']} of storage pool {props['pool']}, in LXD's project {props['project']}"
        sys.stderr.write(f"the bucket is retained: {where}; the next stack of this name reuses it\n")
    elif not props["force"]:
        with errors(f"volume {props['name']}"):
            _check_empty(props["project"])
        set_on_destroy(props, EMPTY)
    _checked.add(props["project"])


def check_again(volume: Props) -> None:
    """Raise LxdError if the bucket, empty when a destroy began that was interrupted, now contains data.

    The state has no guard any more. Each deletion of a host calls this; the first one of an operation checks.
    """
    with _checking, errors(f"volume {volume['name']}"):
        if volume["project"] not in _checked and _is_labelled_empty(volume):
            _check_empty(volume["project"], "more ")
        _checked.add(volume["project"])


def forget_check(volume: Props) -> None:
    """Remove the label of an interrupted destroy: an update, which may replace hosts, also creates the guard again."""
    with errors(f"volume {volume['name']}"):
        if _is_labelled_empty(volume):
            set_on_destroy(volume, None)


def _is_labelled_empty(props: Props) -> bool:
    volume = get_volume(props)
    return volume is not None and volume["config"].get(ON_DESTROY) == EMPTY


def _check_jobs(project: str) -> None:
    """Raise LxdError if a job has not ended, or records cannot be read; without a running host, no job runs."""
    if (host := running_host(project)) is None or (content := read_file(host, QUEUE)) is None:
        return
    try:
        jobs = ", ".join(each.jobId for each in Queue.from_json(content).entries if not _has_ended(host, each.jobId))
    except RecordError as error:
        problem = f"a record of jobs cannot be read ({error})"
    else:
        problem = jobs and f"not all jobs have ended ({jobs})"
    if problem:
        raise LxdError(
            f"{problem}, so nothing was destroyed. Wait (`fab wait`), `fab cancel`, or "
            "`pulumi config set disruptJobs true && pulumi up`"
        )


def _check_empty(project: str, more: str = "") -> None:
    """Raise LxdError if the bucket contains data, or no running host can list it."""
    host = running_host(project)
    if host is None:
        problem = f"no running host can list the bucket, so nothing {more}was destroyed"
        raise LxdError(f"{problem}: `pulumi up` first, or {DESTROY_ADVICE}")
    content = describe_content({folder: _list_folder(host, f"{BUCKET}/{folder}") for folder in _list_folder(host, BUCKET)})
    if content:
        raise LxdError(
            f"the bucket contains {content}, so nothing {more}was destroyed. To save data: `fab get ID`. Then {DESTROY_ADVICE}"
        )


def running_host(project: str) -> Any:
    """Return a running host of the project, which can read its bucket, or None if there is none."""
    instances = (client(project).instances.get(name) for name in hosts_of(project))
    return next((instance for instance in instances if instance.status == "Running"), None)


def _has_ended(host: Any, job_id: str) -> bool:
    """Return True if a job in the queue has its final state: its leader is about to remove it."""
    content = read_file(host, job(job_id))
    return content is not None and JobRecord.from_json(content).final


def read_file(host: Any, path: str) -> bytes | None:
    """Return a file in the bucket, which this host reads, or None if there is none."""
    with suppress(pylxd.exceptions.NotFound):
        content: bytes = host.files.get(f"{BUCKET}/{path}")
        return content
    return None


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
