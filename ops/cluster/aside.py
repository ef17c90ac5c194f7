"""A program of fab's on a host, sandboxed in a systemd unit with the resources that a job leaves.

The host's `/usr/lib/scaletier/host` sets the sandbox.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence

from ops.cluster import asroot
from ops.cluster.inventory import Host

MEMORY_SHARE = 0.4
"""What it may take of a host's memory. A job may take most of it, and comes first."""
_LENDING, _PORT = "cd /opt/scaletier && venv/bin/python -m replica.lending", "@port@"


def reading(host: Host, argv: Sequence[str]) -> str:
    """Return the command line of a program that reads jobs' files, and writes nothing."""
    return asroot.command("aside", "reading", _memory(host), "--", *argv)


def writing(host: Host, argv: Sequence[str], folder: str) -> str:
    """Return the command line of a job's program that writes to a folder.

    Besides, it sees only the data of a bucket that is a folder itself. In Google's it has the rights that the job had
    (`replica.lending`).
    """
    if folder.startswith("/"):
        return asroot.command("aside", "writing", _memory(host), posixpath.normpath(folder), "--", *argv)
    return f"{_LENDING} {shlex.quote(folder)} -- {asroot.command('aside', 'writing', _memory(host), _PORT, '--', *argv)}"


def _memory(host: Host) -> str:
    return str(int(host.memory_bytes * MEMORY_SHARE))
