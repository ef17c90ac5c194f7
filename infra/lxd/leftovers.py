"""What local stacks left on this machine: `python -m infra.lxd.leftovers STACK` prints what a destroyed one left, or nothing.

Without STACK, the LXD projects of every stack of every checkout that still has something; `--up` those that are no bucket that
was to stay, `--kept` what may become of those that are, a line each. `--claimed STACK` prints what a new stack of that name
finds.
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
from infra.lxd.layout import PREFIX, Names
from infra.lxd.nft import tables
from infra.lxd.project import Owner, kept, owners
from infra.templates import ROOT

_KEY = "[0-9a-f]{6}"
_BRIDGES = "/sys/class/net"


def own(stack: str) -> list[Names]:
    """Return the names of a stack, by the labels of its LXD project; more than one if a bucket was kept.

    The stack of the state in use counts, whichever checkout made it, before others of the name in this checkout.
    """
    named = [owner for owner in owners() if owner.stack == stack]
    current = [owner for owner in named if owner.backend == backend.url(ROOT)]
    return [Names(owner.project) for owner in current or [each for each in named if each.checkout == str(ROOT)]]


def leftovers(stack: str) -> list[str]:
    """What is there of the stack: its project with all in it, and bridges, firewalls and processes that are of no project."""
    known = owners()
    mine = [owner for owner in known if (owner.stack, owner.checkout) == (stack, str(ROOT))]
    others = {Names(owner.project).key for owner in known if owner not in mine}
    found = [_told(owner) for owner in mine]
    bridges = {*psutil.net_if_addrs(), *(network.name for network in client().networks.all())}
    found += [f"network {name}" for name in sorted(bridges) if _astray(rf"st({_KEY})\b", name, others)]
    found += [f"nft table {name}" for name in tables() if _astray(rf"scaletier_({_KEY})\b", name, others)]
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if _astray(rf"{PREFIX}[a-z0-9-]*-({_KEY})_|--interface=st({_KEY}) ", command, others):
            found.append(f"process {process.pid} ({command})")
    return found


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
    known = owners()
    found = [_orphan(owner) for owner in known if not owner.kept and _lost(owner, stacks)]
    keys = {Names(owner.project).key for owner in known}
    bridges = sorted({*psutil.net_if_addrs(), *(network.name for network in client().networks.all())})
    found += [
        Orphan(f"network {name} is in no stack", f"lxc network delete {name}")
        for name in bridges
        if _astray(rf"^st({_KEY})$", name, keys) and not _in_use(name)
    ]
    ours = rf"^scaletier_({_KEY})(?:_asleep_.*)?$"
    return found + [
        Orphan(f"nft table {name} is in no stack", f"nft delete table bridge {name}")
        for name in tables()
        if (match := re.match(ours, name)) and match[1] not in keys and not _in_use(f"st{match[1]}")
    ]


def _in_use(bridge: str) -> bool:
    """Tell whether hosts are connected to a bridge, perhaps those of another LXD on this machine."""
    return any(Path(_BRIDGES, bridge, "brif").glob("*"))


def _lost(owner: Owner, stacks: Container[str] | None) -> bool:
    """Tell whether no state can have the stack: the state of its label is read, and every other that can be."""
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
    """This checkout's projects of the stack, and the bucket that the next one of its name takes up, whoever kept it."""
    known = owners()
    mine = {owner.project for owner in known if (owner.stack, owner.checkout) == (stack, str(ROOT))}
    return [_told(owner) for owner in known if owner.project in {*mine, kept(known, stack, ROOT)}]


def advice(owner: Owner) -> str:
    """What may become of a bucket that was kept, in a line."""
    pool, name = pool_of(owner.project), owner.project
    volume = f"lxc storage volume delete {pool} {Names.bucket} --project {name} && " if pool else ""
    return (
        f"the bucket of stack {owner.stack} stays: the next stack of that name in {owner.checkout} takes it up; "
        f"`{volume}lxc project delete {name}` removes it"
    )


def _told(owner: Owner) -> str:
    return f"project {owner.project}" + (" (its bucket, which was to be retained)" if owner.kept else "")


def _astray(pattern: str, text: str, others: set[str]) -> bool:
    """True where the text names a stack, and none of the others."""
    keys = {key for match in re.finditer(pattern, text) for key in match.groups() if key}
    return bool(keys) and not keys & others


def main(arguments: list[str]) -> str:
    """What the command prints."""
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
