"""Commands on the cluster: its hosts, their load, their cost."""

import sys
from typing import Any

from ops.cli.commandline import after_dashes
from ops.cli.task import JSON, load_cluster, task


@task(help={"json": JSON})
def hosts(_: Any, json: bool = False) -> int:
    """List the hosts of the cluster, and whether each of them answers; exit code 1 if none does.

    fab hosts
    fab hosts --json
    """
    from ops.show.hosts import hosts as run

    return run(load_cluster(), json)


@task(help={"json": JSON})
def connect(_: Any, json: bool = False) -> int:
    """Fetch inventory and SSH files from the stack's state again.

    fab connect
    fab connect --json

    Needed after another user's `pulumi up`; the first fab command in a checkout does it by itself.
    """
    from ops.cluster.inventory import connect as run

    return run(json)


@task(help={"fix": "apply safe fixes: the firewall, stopped hosts, permissions of keys", "json": JSON})
def doctor(_: Any, fix: bool = False, json: bool = False) -> int:
    """Look for problems: versions, limits, keys, clocks, disks, firewall, hosts, units, leftover resources.

    fab doctor
    fab doctor --fix
    fab doctor --json

    Prints one line for each check: ok, warning or error, with the command that fixes it; exit code 1 if there is an error. It
    works with half of the cluster down, and without a stack. It never deletes anything: for leftover resources it prints the
    command.
    """
    from ops.show.doctor import doctor as run

    return run(fix, json)


@task(help={"once": "print it once, also on a terminal", "json": f"{JSON}, once"})
def top(_: Any, once: bool = False, json: bool = False) -> int:
    """Show the whole cluster until Ctrl-C: each host's job and usage, running and waiting jobs, the cost.

    fab top
    fab top --once

    Without a terminal it prints once. The numbers are from the last heartbeats of the replicas: no host is queried.
    """
    from ops.show.top import top as run

    return run(load_cluster(), once, json)


@task(help={"json": JSON})
def cost(_: Any, json: bool = False) -> int:
    """Show the cost so far by list price: of existing hosts by role, also stopped ones, and of each job.

    fab cost
    fab cost --json
    """
    from ops.show.cost import cost as run

    return run(load_cluster(), json)


@task(
    positionals=["host"],
    rest="COMMAND",
    help={"host": "a host, such as worker-2 (default: the master's); fab describe lists the host of each replica"},
)
def shell(_: Any, host: str | None = None) -> int:
    """Open a shell on a host, or run a command there, as `admin`, who may use sudo.

    fab shell worker-2
    fab shell worker-2 -- df -h
    fab shell worker-2 -- 'cd /tmp; ls | wc -l'
    """
    from ops.cluster.inventory import load
    from ops.cluster.shell import shell as run

    return run(load(), host, after_dashes(sys.argv))
