"""The bucket of a local stack: one custom storage volume, which every host mounts at /bucket."""

from __future__ import annotations

from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, missing
from infra.lxd.host import purge

REPLACE = frozenset({"project", "pool", "name"})


class Bucket(ModuleResource, module="lxd", name="Bucket"):
    """Inputs: project, pool, name."""

    lifecycle = __name__


def _exists(props: Props) -> bool:
    try:
        _volumes(props)[props["name"]].get(params={"project": props["project"]})
    except pylxd.exceptions.LXDAPIException as error:
        if missing(error):
            return False
        raise
    return True


def _volumes(props: Props) -> Any:
    return client(props["project"]).api.storage_pools[props["pool"]].volumes.custom


def create(props: Props) -> tuple[str, Props]:
    with errors(f"volume {props['name']}"):
        if not _exists(props):
            body = {"name": props["name"], "config": {}, "content_type": "filesystem"}
            _volumes(props).post(json=body, params={"project": props["project"]})
    return f"{props['project']}/{props['pool']}/{props['name']}", props


def read(name: str, props: Props) -> Props | None:
    with errors(f"volume {name}"):
        return props if _exists(props) else None


def update(name: str, old: Props, new: Props) -> Props:
    raise LxdError(f"volume {name} has nothing that could change in place")


def delete(name: str, props: Props) -> None:
    with errors(f"volume {name}"):
        # The hosts of the state are gone by now; an interrupted run may have left others, which hold on to the volume.
        purge(props["project"])
        try:
            _volumes(props)[props["name"]].delete(params={"project": props["project"]})
        except pylxd.exceptions.LXDAPIException as error:
            if not missing(error):
                raise
