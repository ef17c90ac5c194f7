"""The LXD project that holds all of a stack: deleting it deletes whatever an interrupted run left inside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd import bucket, firewall, network
from infra.lxd.api import client, errors, missing
from infra.lxd.host import purge
from infra.lxd.layout import PREFIX, Names

REPLACE = frozenset({"name"})
_CONFIG = {"features.images": "false", "features.profiles": "true", "features.storage.volumes": "true"}
_STACK, _CHECKOUT, _KEPT = "user.scaletier.stack", "user.scaletier.checkout", "user.scaletier.kept"
_BACKEND = "user.scaletier.backend"


class Project(ModuleResource, module="lxd", name="Project"):
    """Inputs: name; stack, checkout and backend (where its state is), which it is labelled with and which may change."""

    lifecycle = __name__


@dataclass(frozen=True)
class Owner:
    """The stack that an LXD project belongs to.

    `kept` if the stack is destroyed and its bucket was to stay; `backend` is the URL of its state, empty if it is unknown.
    """

    project: str
    stack: str
    checkout: str
    kept: bool
    backend: str = ""


def owners() -> list[Owner]:
    """Every project of a stack on this machine, of any checkout."""
    answer: dict[str, Any] = client().api.projects.get(params={"recursion": 1}).json()
    return [
        Owner(
            item["name"],
            config.get(_STACK, ""),
            config.get(_CHECKOUT, ""),
            config.get(_KEPT) == "true",
            config.get(_BACKEND, ""),
        )
        for item in answer["metadata"]
        if item["name"].startswith(PREFIX)
        for config in [item["config"]]
    ]


def kept(found: Iterable[Owner], stack: str, root: Path) -> str | None:
    """The project whose bucket a stack of that name may take up: this checkout's, else one of a checkout that is gone."""
    mine = [owner for owner in found if owner.kept and owner.stack == stack]
    here = [owner.project for owner in mine if owner.checkout == str(root)]
    abandoned = [owner.project for owner in mine if gone(owner.checkout)]
    return next(iter([*here, *abandoned]), None)


def gone(checkout: str) -> bool:
    """True where a checkout's folder is no more; one that this user may not look into may have it."""
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
    _configure(name, _labels(new), without=_KEPT)
    return new


def _configure(name: str, values: dict[str, str], without: str = "") -> None:
    with errors(f"project {name}"):
        found = client().projects.get(name)
        found.config = {key: value for key, value in {**found.config, **values}.items() if key != without}
        found.save(wait=True)


def delete(name: str, props: Props) -> None:
    """Removes hosts, bridge and firewall too, which an interrupted run may have made and not lived to write down."""
    own = Names(name)
    with errors(f"project {name}"):
        if (pool := bucket.pool_of(name)) is not None:
            bucket.delete(own.bucket, {"project": name, "pool": pool, "name": own.bucket})
        purge(name)
        if bucket.pool_of(name) is None:
            _remove(name)
        else:
            _configure(name, {_KEPT: "true"})
    network.delete(own.bridge, props)
    firewall.delete(own.table, props)


def _remove(name: str) -> None:
    try:
        client().projects.get(name).delete(wait=True)
    except pylxd.exceptions.LXDAPIException as error:
        if not missing(error):
            raise
