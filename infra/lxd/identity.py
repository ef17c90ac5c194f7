"""Names of a stack's objects, generated once and kept in its state, so a renamed stack or moved checkout keeps them."""

from __future__ import annotations

import hashlib
from itertools import count
from pathlib import Path

import psutil

from infra import backend
from infra.dynamic import ModuleResource, Props
from infra.lxd import project
from infra.lxd.api import errors
from infra.lxd.layout import LxdNames, names
from infra.state import StackState


class StoredProjectName(ModuleResource, module="lxd", name="Identity"):  # the old name, kept for existing stacks
    """The name of the stack's LXD project; kept in the state. Deleting it removes what an interrupted `pulumi up` left.

    Input: project (the name). It is created first and deleted last.
    """

    module_name = __name__


def names_of(stack: str, root: Path, state: StackState) -> LxdNames:
    """Return the names in the stack's state, else those of an earlier stack's retained bucket, else new ones.

    New ones depend only on the stack and on what exists, so that an update has the names that its preview showed.
    """
    for kind, key in (("lxd:Identity", "project"), ("lxd:Project", "name")):
        for outputs in state.of(kind).values():
            return LxdNames(str(outputs[key]))
    with errors("projects"):
        stack_projects = project.stack_projects()
    if retained := project.retained_project(stack_projects, stack, root):
        return LxdNames(retained)
    identity = f"{root}\0{backend.url(root)}\0{stack}"
    digests = (hashlib.sha256(f"{identity}\0{attempt}".encode()).hexdigest() for attempt in count())
    taken = {*psutil.net_if_addrs(), *(LxdNames(each.name).bridge for each in stack_projects)}
    return next(new for digest in digests if (new := names(stack, digest[:6])).bridge not in taken)


def create(props: Props) -> tuple[str, Props]:
    return props["project"], props


def update(name: str, old: Props, new: Props) -> Props:
    return {**new, "project": old["project"]}


def delete(name: str, props: Props) -> None:
    project.delete(name, props)
