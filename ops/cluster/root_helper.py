"""Command lines of the one program that runs as root on a host for `fab` and checks its arguments.

It also runs programs of fab in a sandbox: a systemd unit that lives as long as the program, and yields CPU and disk to jobs.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence

from infra.inventory import Host

PROGRAM = "/usr/lib/scaletier/root-helper"
MEMORY_SHARE = 0.4
"""The share of a host's memory that a sandbox may use. A job may use most of the memory, and has priority."""
_BROKER = "cd /opt/scaletier && venv/bin/python -m hosts.agent.token_broker"
_PORT = "@port@"  # the broker puts its port there


def command(verb: str, *words: str) -> str:
    """Return the command line of an operation; the SSH user may run nothing else as root."""
    return shlex.join(["sudo", "-n", PROGRAM, verb, *words])


def reader_command(host: Host, argv: Sequence[str]) -> str:
    """Return the command line of a program that reads jobs' files, and writes nothing."""
    return command("sandbox", "reading", _memory(host), "--", *argv)


def writer_command(host: Host, argv: Sequence[str], folder: str) -> str:
    """Return the command line of a job's program that writes to a folder.

    If the bucket is a folder, the program sees only this folder and the data in it. In Google's bucket it has the rights that
    the job had (`hosts.agent.token_broker`).
    """
    if folder.startswith("/"):
        return command("sandbox", "writing", _memory(host), posixpath.normpath(folder), "--", *argv)
    return f"{_BROKER} {shlex.quote(folder)} -- {command('sandbox', 'writing', _memory(host), _PORT, '--', *argv)}"


def _memory(host: Host) -> str:
    return str(int(host.memory_bytes * MEMORY_SHARE))
