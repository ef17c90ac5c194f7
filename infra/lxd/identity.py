"""Names of a stack's objects, generated once and kept in its state, so a renamed stack or moved checkout keeps them."""

from __future__ import annotations

import secrets
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd import project
from infra.lxd.api import errors
from infra.lxd.layout import LxdNames, names
from infra.state import StackState


class StoredProjectName(ModuleResource, module="lxd", name="Identity"):  # the old name, kept for existing stacks
    """The name of the stack's LXD project; kept in the state. Deleting it removes what a killed run left.

    Input: project (the name). It is created first and deleted last.
    """

    module_name = __name__


def names_of(stack: str, root: Path, state: StackState) -> LxdNames:
    """Return the names in the stack's state, else those of an earlier stack's retained bucket, else new ones."""
    for kind, key in (("lxd:Identity", "project"), ("lxd:Project", "name")):
        for outputs in state.of(kind).values():
            return LxdNames(str(outputs[key]))
    with errors("projects"):
        retained = project.retained_project(project.owners(), stack, root)
    return LxdNames(retained) if retained else names(stack, secrets.token_hex(3))


def create(props: Props) -> tuple[str, Props]:
    return props["project"], props


def update(name: str, old: Props, new: Props) -> Props:
    return {**new, "project": old["project"]}


def delete(name: str, props: Props) -> None:
    project.delete(name, props)
