"""What a destroyed local stack left on this machine: `python -m infra.lxd.leftovers STACK` prints it, or nothing.

Without STACK, the projects of every stack of every checkout that still has something.
"""

from __future__ import annotations

import sys

import psutil

from infra.lxd.api import client
from infra.lxd.firewall import table_exists
from infra.lxd.layout import Names, names
from infra.templates import ROOT


def leftovers(own: Names) -> list[str]:
    """Names of what is still there: the project with all in it, the bridge, the firewall, and processes of its hosts."""
    found = []
    if client().projects.exists(own.project):
        found.append(f"project {own.project}")
    if client().networks.exists(own.bridge) or own.bridge in psutil.net_if_addrs():
        found.append(f"network {own.bridge}")
    if table_exists(own.table):
        found.append(f"nft table {own.table}")
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if f"{own.project}_" in command or f"--interface={own.bridge} " in command:
            found.append(f"process {process.pid} ({command})")
    return found


def projects() -> list[str]:
    """LXD projects of stacks of any checkout."""
    return [item.name for item in client().projects.all() if item.name.startswith("scaletier-")]


if __name__ == "__main__":
    print("; ".join(leftovers(names(ROOT, sys.argv[1])) if sys.argv[1:] else projects()))
