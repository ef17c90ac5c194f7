"""Leftovers of local stacks on this machine: `python -m infra.lxd.orphans STACK` prints them.

Without STACK, the LXD projects of every stack of every checkout that still has something; `--up` those that are no retained
bucket, `--kept` the options for those that are, a line each. `--claimed STACK` prints what a new stack of that name finds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra import backend
from infra.lxd.api import LxdError, client, errors
from infra.lxd.bucket import pool_of
from infra.lxd.layout import PREFIX, LxdNames
from infra.lxd.nft import tables
from infra.lxd.project import Owner, kept, owners
from infra.templates import ROOT

_KEY = "[0-9a-f]{6}"
_BRIDGES = "/sys/class/net"


def own(stack: str) -> list[LxdNames]:
    """Return the names of a stack, by the labels of its LXD project; more than one if a bucket was kept.

    The stack of the state in use counts, whichever checkout made it, before others of the name in this checkout.
    """
    projects = [owner for owner in owners() if owner.stack == stack]
    current = [owner for owner in projects if owner.backend == backend.url(ROOT)]
    return [LxdNames(owner.project) for owner in current or [each for each in projects if each.checkout == str(ROOT)]]


def leftovers(stack: str) -> list[str]:
    """Return a stack's objects: its project, and bridges, firewalls and processes outside of it."""
    projects = owners()
    mine = [owner for owner in projects if (owner.stack, owner.checkout) == (stack, str(ROOT))]
    others = {LxdNames(owner.project).key for owner in projects if owner not in mine}
    lines = [_told(owner) for owner in mine]
    bridges = {*psutil.net_if_addrs(), *(network.name for network in client().networks.all())}
    lines += [f"network {name}" for name in sorted(bridges) if _astray(rf"st({_KEY})\b", name, others)]
    lines += [f"nft table {name}" for name in tables() if _astray(rf"scaletier_({_KEY})\b", name, others)]
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if _astray(rf"{PREFIX}[a-z0-9-]*-({_KEY})_|--interface=st({_KEY}) ", command, others):
            lines.append(f"process {process.pid} ({command})")
    return lines


@dataclass(frozen=True)
class Orphan:
    """Something of a local stack that no state has, and what to do about it."""

    what: str
    remedy: str


def orphans(stacks: Container[str] | None) -> list[Orphan]:
    """List what belongs to no stack.

    Nothing that a state may still have is an orphan, and nothing that runs is to be deleted.

    Args:
        stacks: the names of the stacks in the state in use, None if it cannot be read.
    """
    projects = owners()
    lines = [_orphan(owner) for owner in projects if not owner.kept and _lost(owner, stacks)]
    keys = {LxdNames(owner.project).key for owner in projects}
    bridges = sorted({*psutil.net_if_addrs(), *(network.name for network in client().networks.all())})
    lines += [
        Orphan(f"network {name} is in no stack", f"lxc network delete {name}")
        for name in bridges
        if _astray(rf"^st({_KEY})$", name, keys) and not _in_use(name)
    ]
    ours = rf"^scaletier_({_KEY})(?:_asleep_.*)?$"
    return lines + [
        Orphan(f"nft table {name} is in no stack", f"nft delete table bridge {name}")
        for name in tables()
        if (match := re.match(ours, name)) and match[1] not in keys and not _in_use(f"st{match[1]}")
    ]


def _in_use(bridge: str) -> bool:
    """Tell whether hosts are connected to a bridge, perhaps those of another LXD on this machine."""
    return any(Path(_BRIDGES, bridge, "brif").glob("*"))


def _lost(owner: Owner, stacks: Container[str] | None) -> bool:
    """Return True if no state can have the stack: all readable states and that of its label lack it."""
    here, own = backend.url(ROOT), backend.own_url(ROOT)
    if not owner.backend or any(backend.mentions(url, owner.project) for url in {here, own}):
        return False
    if owner.backend == here:
        return stacks is not None and owner.stack not in stacks
    return backend.mentions(owner.backend, owner.project) is False


def _orphan(owner: Owner) -> Orphan:
    name = owner.project
    what = f"project {name} (stack {owner.stack} of {owner.checkout}) is not in its state, {owner.backend}"
    with errors(f"project {name}"):
        running = sum(instance.status == "Running" for instance in client(name).instances.all())
    if running:
        return Orphan(
            f"{what}, and {running} of its hosts run",
            f"put the state back if it was moved; if nobody needs the hosts, lxc stop --all --project {name}, and look again",
        )
    return Orphan(
        what,
        f"put the state back if it was moved; lxc project set {name} user.scaletier.kept true, and the next stack "
        f"{owner.stack} takes its bucket up; or lxc delete --force --project {name} its hosts, then its volume and the project",
    )


def claimed(stack: str) -> list[str]:
    """Return this checkout's projects of the stack, and the bucket that its next `up` adopts."""
    projects = owners()
    mine = {owner.project for owner in projects if (owner.stack, owner.checkout) == (stack, str(ROOT))}
    return [_told(owner) for owner in projects if owner.project in {*mine, kept(projects, stack, ROOT)}]


def advice(owner: Owner) -> str:
    """Return the options for a retained bucket, in a line."""
    pool, name = pool_of(owner.project), owner.project
    volume = f"lxc storage volume delete {pool} {LxdNames.bucket} --project {name} && " if pool else ""
    return (
        f"the bucket of stack {owner.stack} stays: the next stack of that name in {owner.checkout} takes it up; "
        f"`{volume}lxc project delete {name}` removes it"
    )


def _told(owner: Owner) -> str:
    return f"project {owner.project}" + (" (its bucket, which was to be retained)" if owner.kept else "")


def _astray(pattern: str, text: str, others: set[str]) -> bool:
    """Return True if the text names a stack, and none of the others."""
    keys = {key for match in re.finditer(pattern, text) for key in match.groups() if key}
    return bool(keys) and not keys & others


def main(arguments: list[str]) -> str:
    """Return the command's output."""
    match arguments:
        case []:
            return "; ".join(owner.project for owner in owners())
        case ["--up"]:
            return "; ".join(owner.project for owner in owners() if not owner.kept)
        case ["--kept"]:
            return "\n".join(advice(owner) for owner in owners() if owner.kept)
        case ["--claimed", stack]:
            return "; ".join(claimed(stack))
        case [stack] if not stack.startswith("-"):
            return "; ".join(leftovers(stack))
    raise LxdError("say a stack, --claimed and a stack, --up, --kept, or nothing")


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except LxdError as error:
        sys.exit(f"leftovers: {error}")
