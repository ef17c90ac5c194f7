"""Command lines of the one program that runs as root on a host for `fab` and checks its arguments.

It also runs programs of fab in a sandbox: a unit that lives as long as they do, and takes what a job leaves of the host.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence

from infra.inventory import Host

PROGRAM = "/usr/lib/scaletier/root-helper"
MEMORY_SHARE = 0.4
"""The limit of a sandbox's share of a host's memory. A job may take most of it, and comes first."""
_TOKEN_BROKER, _PORT = "cd /opt/scaletier && venv/bin/python -m hosts.agent.token_broker", "@port@"


def command(verb: str, *words: str) -> str:
    """Return the command line of an operation; the SSH user may run nothing else as root."""
    return shlex.join(["sudo", "-n", PROGRAM, verb, *words])


def reader_command(host: Host, argv: Sequence[str]) -> str:
    """Return the command line of a program that reads jobs' files, and writes nothing."""
    return command("sandbox", "reading", _memory(host), "--", *argv)


def writer_command(host: Host, argv: Sequence[str], folder: str) -> str:
    """Return the command line of a job's program that writes to a folder.

    Besides, it sees only the data of a bucket that is a folder itself. In Google's it has the rights that the job had
    (`hosts.agent.token_broker`).
    """
    if folder.startswith("/"):
        return command("sandbox", "writing", _memory(host), posixpath.normpath(folder), "--", *argv)
    return f"{_TOKEN_BROKER} {shlex.quote(folder)} -- {command('sandbox', 'writing', _memory(host), _PORT, '--', *argv)}"


def _memory(host: Host) -> str:
    return str(int(host.memory_bytes * MEMORY_SHARE))
