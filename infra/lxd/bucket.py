"""The bucket of a local stack: one custom storage volume, which every host mounts at /bucket."""

from __future__ import annotations

from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props, is_update
from infra.guard import DESTROY_ADVICE
from infra.lxd import quotas
from infra.lxd.api import LxdError, client, errors, is_not_found, parse_limit
from infra.lxd.layout import LxdNames
from infra.lxd.removal import purge

REPLACE_ON_CHANGES = frozenset({"project", "pool", "name"})
ON_DESTROY, REMOVE, RETAIN, EMPTY = "user.scaletier.on-destroy", "remove", "retain", "empty"
"""The label on a volume: what a destroy does with the volume; EMPTY if a destroy has begun and found no data.

Without the label the volume may contain data and is never deleted.
"""


class BucketVolume(ModuleResource, module="lxd", name="Bucket"):
    """Inputs: project, pool, name, size (its limit in bytes; 0 for no limit)."""

    module_name = __name__


def get_volume(props: Props) -> dict[str, Any] | None:
    """Return LXD's volume, or None if it does not exist."""
    try:
        answer = _volumes(props)[props["name"]].get(params={"project": props["project"]})
    except pylxd.exceptions.LXDAPIException as error:
        if is_not_found(error):
            return None
        raise
    volume: dict[str, Any] = answer.json()["metadata"]
    return volume


def _volumes(props: Props) -> Any:
    return client(props["project"]).api.storage_pools[props["pool"]].volumes.custom


def pool_of(project: str) -> str | None:
    """Return the storage pool of a project's bucket, or None if the project has no bucket."""
    with errors("storage pools"):
        if not client().projects.exists(project):
            return None
        pools = [pool.name for pool in client().storage_pools.all()]
        volumes = ({"project": project, "pool": pool, "name": LxdNames.bucket} for pool in pools)
        return next((props["pool"] for props in volumes if get_volume(props)), None)


def set_on_destroy(props: Props, action: str | None) -> None:
    """Set the label ON_DESTROY of the volume; None removes it."""
    _configure(props, ON_DESTROY, action)


def _configure(props: Props, key: str, value: str | None) -> None:
    with errors(f"volume {props['name']}"):
        if (volume := get_volume(props)) is None:
            raise LxdError(
                f"volume {props['name']} does not exist any more: `pulumi refresh`, then `pulumi up` creates a new one"
            )
        config = {other: item for other, item in volume["config"].items() if other != key} | ({key: value} if value else {})
        body = {"config": config, "description": volume["description"]}
        _volumes(props)[props["name"]].put(params={"project": props["project"]}, json=body)


def _limit(props: Props) -> str | None:
    return str(props["size"]) if props["size"] else None


def used_bytes(props: Props) -> int | None:
    """Return the bytes used in the bucket, or None if it is missing, its pool does not count them, or LXD reports 0."""
    with errors(f"volume {props['name']}"):
        if not get_volume(props):
            return None
        try:
            answer = _volumes(props)[props["name"]].state.get(params={"project": props["project"]})
        except pylxd.exceptions.LXDAPIException:
            return None
    count = ((answer.json()["metadata"] or {}).get("usage") or {}).get("used")
    return int(count) if count else None


def create(props: Props) -> tuple[str, Props]:
    with errors(f"volume {props['name']}"):
        if not get_volume(props):
            body = {"name": props["name"], "config": {ON_DESTROY: REMOVE}, "content_type": "filesystem"}
            _volumes(props).post(json=body, params={"project": props["project"]})
        _configure(props, "size", _limit(props))
    quotas.enable_accounting(props["pool"])
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def read(name: str, props: Props) -> Props | None:
    with errors(f"volume {name}"):
        volume = get_volume(props)
    if volume is None:
        return None
    # Without quota accounting the limit is not enforced. Return another value, so that the next update turns accounting on.
    has_limit = quotas.is_accounting(props["pool"])
    return {**props, "size": parse_limit(volume["config"].get("size", "0")) if has_limit else "not counted"}


def update(name: str, old: Props, new: Props) -> Props:
    _configure(new, "size", _limit(new))
    quotas.enable_accounting(new["pool"])
    return new


def delete(name: str, props: Props) -> None:
    """Delete or retain the volume, as its label says. LxdError if it has no label, because it may contain data.

    In an update, EMPTY counts as none: a job may have written data since the destroy that found the bucket empty.
    """
    with errors(f"volume {name}"):
        volume = get_volume(props)
        action = volume["config"].get(ON_DESTROY) if volume else RETAIN
        if action is None or (action == EMPTY and is_update()):
            raise LxdError(
                "the bucket may contain data and was not deleted. To save data: `pulumi up` (recreates the hosts), `fab get ID`"
                f". Then {DESTROY_ADVICE}"
            )
        # The state's hosts are deleted by now, but an interrupted run may have left others, which still mount the volume.
        purge(props["project"])
        if action in (REMOVE, EMPTY):
            _volumes(props)[props["name"]].delete(params={"project": props["project"]})
