"""What a stack's things are called: drawn once and kept in its state, so that neither a renamed stack nor a moved checkout
is another cluster."""

from __future__ import annotations

import secrets
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd import project
from infra.lxd.api import errors
from infra.lxd.layout import Names, names
from infra.state import State

REPLACE: frozenset[str] = frozenset()


class Identity(ModuleResource, module="lxd", name="Identity"):
    """Input: project, the name of the stack's LXD project. First made, last deleted: what a killed run left goes with it."""

    lifecycle = __name__


def names_of(stack: str, root: Path, before: State) -> Names:
    """The names in the stack's state, else those of a bucket that an earlier stack of its name kept, else new ones."""
    for kind, key in (("lxd:Identity", "project"), ("lxd:Project", "name")):
        for found in before.of(kind).values():
            return Names(str(found[key]))
    with errors("projects"):
        kept = project.kept(project.owners(), stack, root)
    return Names(kept) if kept else names(stack, secrets.token_hex(3))


def create(props: Props) -> tuple[str, Props]:
    return props["project"], props


def read(name: str, props: Props) -> Props | None:
    return props


def update(name: str, old: Props, new: Props) -> Props:
    return {**new, "project": old["project"]}


def delete(name: str, props: Props) -> None:
    project.delete(name, props)
