"""Find objects of local stacks on this machine: `python -m infra.lxd.orphans STACK` prints those of a stack.

Without STACK, it prints the LXD projects of all stacks of all checkouts. `--up` prints projects that are still in use; `--kept`
prints, one line each, how to reuse or delete a retained bucket. `--claimed STACK` prints the projects that a new stack of that
name would collide with or reuse.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import psutil

from infra import backend
from infra.findings import Finding, warning
from infra.lxd.api import LxdError, client, errors
from infra.lxd.bucket import pool_of
from infra.lxd.layout import PREFIX, LxdNames
from infra.lxd.nft import tables
from infra.lxd.project import StackProject, retained_project, stack_projects
from infra.templates import ROOT

_STACK_ID = "[0-9a-f]{6}"
_BRIDGES = "/sys/class/net"


def existing_names(stack: str) -> list[LxdNames]:
    """Return the names of an existing stack, from the labels of LXD's projects; several if a bucket was retained.

    Prefer projects whose label names the current state; without one, take this checkout's projects of that name.
    """
    projects = [project for project in stack_projects() if project.stack == stack]
    current = [project for project in projects if project.backend == backend.url(ROOT)]
    return [LxdNames(project.name) for project in current or [each for each in projects if each.checkout == str(ROOT)]]


def stack_objects(stack: str) -> list[str]:
    """Return a stack's projects, and bridges, nft tables and processes that belong to no other project."""
    projects = stack_projects()
    own_projects = [project for project in projects if (project.stack, project.checkout) == (stack, str(ROOT))]
    others = {LxdNames(project.name).stack_id for project in projects if project not in own_projects}
    lines = [_describe(project) for project in own_projects] + [f"{kind} {name}" for kind, name, _ in _unknown_objects(others)]
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        matches = re.finditer(rf"{PREFIX}[a-z0-9-]*-({_STACK_ID})_|--interface=st({_STACK_ID}) ", command)
        ids = {match[1] or match[2] for match in matches}
        if ids and not ids & others:
            lines.append(f"process {process.pid} ({command})")
    return lines


def _unknown_objects(known_ids: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and bridge of each bridge and nft table whose stack ID is not a known one."""
    bridges = {*psutil.net_if_addrs(), *(network.name for network in client().networks.all())}
    objects = [("network", name) for name in sorted(bridges)] + [("nft table", name) for name in tables()]
    for kind, name in objects:
        pattern = rf"st({_STACK_ID})" if kind == "network" else rf"scaletier_({_STACK_ID})(?:_[a-z]+_.*)?"
        if (match := re.fullmatch(pattern, name)) and match[1] not in known_ids:
            yield kind, name, f"st{match[1]}"


def find_orphans(stacks: Container[str] | None) -> list[Finding]:
    """Return a finding for each object that belongs to no stack.

    An object is no orphan if a state might still list it. No finding suggests to delete something that runs.

    Args:
        stacks: the names of the stacks in the current state, None if it cannot be read.
    """
    projects = stack_projects()
    states = {backend.url(ROOT), backend.own_url(ROOT)}
    commands = {"network": "lxc network delete", "nft table": "nft delete table bridge"}
    return [_orphan(project) for project in projects if not project.retained and _is_lost(project, stacks)] + [
        warning(f"{kind} {name} is in no stack", f"{commands[kind]} {name}")
        for kind, name, bridge in _unknown_objects({LxdNames(project.name).stack_id for project in projects})
        if not _in_use(bridge) and not any(backend.mentions(url, bridge) for url in states)
    ]


def _in_use(bridge: str) -> bool:
    """Return True if hosts are connected to a bridge; they may belong to another LXD on this machine."""
    return any(Path(_BRIDGES, bridge, "brif").glob("*"))


def _is_lost(project: StackProject, stacks: Container[str] | None) -> bool:
    """Return True if no state can list the stack: neither the state in its label, nor any other readable state."""
    current, own = backend.url(ROOT), backend.own_url(ROOT)
    if not project.backend or any(backend.mentions(url, project.name) for url in {current, own}):
        return False
    if project.backend == current:
        return stacks is not None and project.stack not in stacks
    return backend.mentions(project.backend, project.name) is False


def _orphan(project: StackProject) -> Finding:
    """Return the finding about a lost project, with numbered choices if none of its hosts runs."""
    name = project.name
    what = f"project {name} (stack {project.stack} of {project.checkout}) is not in its state, {project.backend}"
    with errors(f"project {name}"):
        instances = client(name).instances.all()
    running = sum(instance.status == "Running" for instance in instances)
    if running:
        return warning(
            f"{what}, and {running} of its hosts run",
            f"if the state was moved, move it back; if nobody needs the hosts, lxc stop --all --project {name}, fab doctor",
        )
    hosts = " ".join(instance.name for instance in instances)
    delete_hosts = f"lxc delete --force --project {name} {hosts} && " if hosts else ""
    return warning(
        what,
        f"(1) if the state was moved, move it back; or (2) lxc project set {name} user.scaletier.kept true: the next stack "
        f"{project.stack} reuses the bucket; or (3) delete it with its data: {delete_hosts}{_delete_command(name)}",
    )


def claimed_projects(stack: str) -> list[str]:
    """Return this checkout's projects of the stack, and the one whose retained bucket its next `pulumi up` reuses."""
    projects = stack_projects()
    own_projects = {project.name for project in projects if (project.stack, project.checkout) == (stack, str(ROOT))}
    claimed = {*own_projects, retained_project(projects, stack, ROOT)}
    return [_describe(project) for project in projects if project.name in claimed]


def bucket_advice(project: StackProject) -> str:
    """Return one line: how to reuse or delete a retained bucket."""
    return (
        f"the bucket of stack {project.stack} is retained: the next stack of that name in {project.checkout} reuses it; "
        f"`{_delete_command(project.name)}` deletes it"
    )


def _delete_command(project: str) -> str:
    """Return the command that deletes a project's bucket, if it has one, and the project."""
    pool = pool_of(project)
    volume = f"lxc storage volume delete {pool} {LxdNames.bucket} --project {project} && " if pool else ""
    return f"{volume}lxc project delete {project}"


def _describe(project: StackProject) -> str:
    return f"project {project.name}" + (" (its retained bucket)" if project.retained else "")


def main(arguments: list[str]) -> str:
    """Return the command's output."""
    match arguments:
        case []:
            return "; ".join(project.name for project in stack_projects())
        case ["--up"]:
            return "; ".join(project.name for project in stack_projects() if not project.retained)
        case ["--kept"]:
            return "\n".join(bucket_advice(project) for project in stack_projects() if project.retained)
        case ["--claimed", stack]:
            return "; ".join(claimed_projects(stack))
        case [stack] if not stack.startswith("-"):
            return "; ".join(stack_objects(stack))
    raise LxdError("the arguments are invalid. Valid: STACK, --claimed STACK, --up, --kept, or none")


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except LxdError as error:
        sys.exit(f"leftovers: {error}")
