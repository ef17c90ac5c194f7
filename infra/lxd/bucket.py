"""The bucket of a local stack: one custom storage volume, which every host mounts at /bucket."""

from __future__ import annotations

from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd import quotas
from infra.lxd.api import LxdError, client, errors, missing, number
from infra.lxd.host import purge
from infra.lxd.layout import LxdNames

REPLACE = frozenset({"project", "pool", "name"})
MARK, REMOVE, RETAIN = "user.scaletier.on-destroy", "remove", "retain"
"""The mark on a volume that says what a destroy does with it. A volume without one may hold data, and is never deleted."""
WISH = (
    "`pulumi config set retainBucket true` for it to stay on this machine, or `pulumi config set forceDestroy true` for it to "
    "go with all that is in it, `pulumi up`, and `pulumi destroy` again"
)


class BucketVolume(ModuleResource, module="lxd", name="Bucket"):
    """Inputs: project, pool, name, size (bytes that it may hold at most; 0 for no limit)."""

    lifecycle = __name__


def get_volume(props: Props) -> dict[str, Any] | None:
    """Return LXD's volume, or None if it does not exist."""
    try:
        answer = _volumes(props)[props["name"]].get(params={"project": props["project"]})
    except pylxd.exceptions.LXDAPIException as error:
        if missing(error):
            return None
        raise
    volume: dict[str, Any] = answer.json()["metadata"]
    return volume


def _volumes(props: Props) -> Any:
    return client(props["project"]).api.storage_pools[props["pool"]].volumes.custom


def pool_of(project: str) -> str | None:
    """Return the storage pool that a project's bucket is in, or None if it has none."""
    with errors("storage pools"):
        if not client().projects.exists(project):
            return None
        pools = [pool.name for pool in client().storage_pools.all()]
        volumes = ({"project": project, "pool": pool, "name": LxdNames.bucket} for pool in pools)
        return next((props["pool"] for props in volumes if get_volume(props)), None)


def mark(props: Props, wish: str | None) -> None:
    """Write on the volume whether it is retained."""
    _configure(props, MARK, wish)


def _configure(props: Props, key: str, value: str | None) -> None:
    with errors(f"volume {props['name']}"):
        if (volume := get_volume(props)) is None:
            raise LxdError(f"volume {props['name']} is not there any more: `pulumi refresh`, then `pulumi up` makes a new one")
        config = {other: item for other, item in volume["config"].items() if other != key} | ({key: value} if value else {})
        body = {"config": config, "description": volume["description"]}
        _volumes(props)[props["name"]].put(params={"project": props["project"]}, json=body)


def _limit(props: Props) -> str | None:
    return str(props["size"]) if props["size"] else None


def used(props: Props) -> int | None:
    """Return the bucket's size in bytes, or None if it is missing or its pool does not count."""
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
            body = {"name": props["name"], "config": {MARK: REMOVE}, "content_type": "filesystem"}
            _volumes(props).post(json=body, params={"project": props["project"]})
        _configure(props, "size", _limit(props))
    quotas.count(props["pool"])
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def read(name: str, props: Props) -> Props | None:
    with errors(f"volume {name}"):
        volume = get_volume(props)
    if volume is None:
        return None
    # A limit without accounting is none: an update makes the pool count again.
    counted = quotas.counted(props["pool"])
    return {**props, "size": number(volume["config"].get("size", "0")) if counted else "not counted"}


def update(name: str, old: Props, new: Props) -> Props:
    _configure(new, "size", _limit(new))
    quotas.count(new["pool"])
    return new


def delete(name: str, props: Props) -> None:
    """Delete the volume unless it is to be retained.

    Raises:
        LxdError: it may hold something and neither option is set.
    """
    with errors(f"volume {name}"):
        volume = get_volume(props)
        wish = volume["config"].get(MARK) if volume else RETAIN
        if wish is None:
            raise LxdError(
                f"the bucket may hold something, so it stays: `pulumi up` and `fab get` what is to stay, then {WISH}"
            )
        # The hosts of the state are gone by now; an interrupted run may have left others, which hold on to the volume.
        purge(props["project"])
        if wish == REMOVE:
            _volumes(props)[props["name"]].delete(params={"project": props["project"]})
