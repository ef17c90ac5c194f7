"""The LXD project that holds all of a stack: deleting it deletes whatever an interrupted run left inside."""

from __future__ import annotations

from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd import firewall, network
from infra.lxd.api import client, errors, missing
from infra.lxd.host import purge

REPLACE = frozenset({"name"})
_CONFIG = {"features.images": "false", "features.profiles": "true", "features.storage.volumes": "true"}


class Project(ModuleResource, module="lxd", name="Project"):
    """Inputs: name; bridge and table, which are no part of the project and go with it all the same."""

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
    return new


def delete(name: str, props: Props) -> None:
    with errors(f"project {name}"):
        purge(name)
        try:
            for pool in client().storage_pools.all():
                for volume in _volumes(name, pool.name):
                    client(name).api.storage_pools[pool.name].volumes.custom[volume].delete(params={"project": name})
            client().projects.get(name).delete(wait=True)
        except pylxd.exceptions.LXDAPIException as error:
            if not missing(error):
                raise
    # What an interrupted run made and did not live to write down.
    network.delete(props["bridge"], props)
    firewall.delete(props["table"], props)


def _volumes(project: str, pool: str) -> list[str]:
    answer: dict[str, Any] = client(project).api.storage_pools[pool].volumes.custom.get(params={"project": project}).json()
    return [url.split("?")[0].rsplit("/", 1)[1] for url in answer["metadata"]]
