"""A program of fab's on a host: in a unit for as long as it runs, where it can do no harm, and takes what a job leaves.

What keeps it there the host knows: `/usr/lib/scaletier/host`.
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
    """The command line that runs a program which reads what jobs have written, and writes nothing."""
    return asroot.command("aside", "reading", _memory(host), "--", *argv)


def writing(host: Host, argv: Sequence[str], folder: str) -> str:
    """The command line that runs a program of a job which writes into a folder, and sees but data besides of a bucket that is a
    folder itself. In Google's it has the rights that the job had (`replica.lending`).
    """
    if folder.startswith("/"):
        return asroot.command("aside", "writing", _memory(host), posixpath.normpath(folder), "--", *argv)
    return f"{_LENDING} {shlex.quote(folder)} -- {asroot.command('aside', 'writing', _memory(host), _PORT, '--', *argv)}"


def _memory(host: Host) -> str:
    return str(int(host.memory_bytes * MEMORY_SHARE))
