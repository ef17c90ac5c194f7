"""The LXD project that contains a stack: deleting the project also deletes what an interrupted run left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd import bucket, firewall, network
from infra.lxd.api import client, errors, is_not_found
from infra.lxd.layout import PREFIX, LxdNames
from infra.lxd.removal import purge

REPLACE_ON_CHANGES = frozenset({"name"})
_CONFIG = {"features.images": "false", "features.profiles": "true", "features.storage.volumes": "true"}
_STACK, _CHECKOUT, _RETAINED = "user.scaletier.stack", "user.scaletier.checkout", "user.scaletier.kept"
_BACKEND = "user.scaletier.backend"


class Project(ModuleResource, module="lxd", name="Project"):
    """The LXD project. Inputs: name, and labels that may change: stack, checkout, backend (the URL of the stack's state)."""

    module_name = __name__


@dataclass(frozen=True)
class StackProject:
    """The LXD project of a stack, as its labels describe it.

    `retained`: the stack is destroyed and its bucket retained. `backend` is the URL of its state, empty if it is unknown.
    """

    name: str
    stack: str
    checkout: str
    retained: bool
    backend: str = ""


def stack_projects() -> list[StackProject]:
    """Return the projects of all stacks on this machine, of any checkout."""
    answer: dict[str, Any] = client().api.projects.get(params={"recursion": 1}).json()
    return [
        StackProject(
            item["name"],
            config.get(_STACK, ""),
            config.get(_CHECKOUT, ""),
            config.get(_RETAINED) == "true",
            config.get(_BACKEND, ""),
        )
        for item in answer["metadata"]
        if item["name"].startswith(PREFIX)
        for config in [item["config"]]
    ]


def retained_project(projects: Iterable[StackProject], stack: str, root: Path) -> str | None:
    """Return the project whose retained bucket a new stack of that name reuses, or None.

    Prefer this checkout's project; without one, take a project whose checkout no longer exists.
    """
    retained = [project for project in projects if project.retained and project.stack == stack]
    here = [project.name for project in retained if project.checkout == str(root)]
    abandoned = [project.name for project in retained if is_missing(project.checkout)]
    return next(iter([*here, *abandoned]), None)


def is_missing(checkout: str) -> bool:
    """Return True if a checkout's folder no longer exists; an unreadable one may exist."""
    try:
        return not Path(checkout).exists()
    except PermissionError:
        return False


def create(props: Props) -> tuple[str, Props]:
    name = props["name"]
    with errors(f"project {name}"):
        if not client().projects.exists(name):
            client().projects.create(name, description="A scaletier cluster", config={**_CONFIG, **_labels(props)})
    return name, update(name, props, props)


def _labels(props: Props) -> dict[str, str]:
    return {_STACK: props["stack"], _CHECKOUT: props["checkout"], _BACKEND: props["backend"]}


def read(name: str, props: Props) -> Props | None:
    with errors(f"project {name}"):
        return props if client().projects.exists(name) else None


def update(name: str, old: Props, new: Props) -> Props:
    _configure(name, _labels(new), without=_RETAINED)
    return new


def _configure(name: str, values: dict[str, str], without: str = "") -> None:
    with errors(f"project {name}"):
        project = client().projects.get(name)
        project.config = {key: value for key, value in {**project.config, **values}.items() if key != without}
        project.save(wait=True)


def delete(name: str, props: Props) -> None:
    """Remove the project, or label it if its bucket is retained; remove what an interrupted run did not record."""
    own = LxdNames(name)
    with errors(f"project {name}"):
        if (pool := bucket.pool_of(name)) is not None:
            bucket.delete(own.bucket, {"project": name, "pool": pool, "name": own.bucket})
        purge(name)
        if bucket.pool_of(name) is None:
            _remove(name)
        else:
            _configure(name, {_RETAINED: "true"})
    network.delete(own.bridge, props)
    firewall.delete(own.table, props)


def _remove(name: str) -> None:
    try:
        client().projects.get(name).delete(wait=True)
    except pylxd.exceptions.LXDAPIException as error:
        if not is_not_found(error):
            raise
