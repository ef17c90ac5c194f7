"""The LXD project that holds all of a stack: deleting it deletes whatever an interrupted run left inside."""

from __future__ import annotations

from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, missing
from infra.lxd.host import purge

REPLACE = frozenset({"name"})
_CONFIG = {"features.images": "false", "features.profiles": "true", "features.storage.volumes": "true"}


class Project(ModuleResource, module="lxd", name="Project"):
    """Inputs: name."""

    lifecycle = __name__


def create(props: Props) -> tuple[str, Props]:
    name = props["name"]
    with errors(f"project {name}"):
        if not client().projects.exists(name):
            client().projects.create(name, description="A scaletier cluster", config=_CONFIG)
    return name, props


def read(name: str, props: Props) -> Props | None:
    with errors(f"project {name}"):
        return props if client().projects.exists(name) else None


def update(name: str, old: Props, new: Props) -> Props:
    raise LxdError(f"project {name} has nothing that could change in place")


def delete(name: str, props: Props) -> None:
    with errors(f"project {name}"):
        if not client().projects.exists(name):
            return
        purge(name)
        for pool in client().storage_pools.all():
            for volume in _volumes(name, pool.name):
                client(name).api.storage_pools[pool.name].volumes.custom[volume].delete(params={"project": name})
        try:
            client().projects.get(name).delete(wait=True)
        except pylxd.exceptions.LXDAPIException as error:
            if not missing(error):
                raise


def _volumes(project: str, pool: str) -> list[str]:
    answer: dict[str, Any] = client(project).api.storage_pools[pool].volumes.custom.get(params={"project": project}).json()
    return [url.split("?")[0].rsplit("/", 1)[1] for url in answer["metadata"]]
