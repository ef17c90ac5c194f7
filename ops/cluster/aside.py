"""A program of fab's on a host: in a unit for as long as it runs, where it can do no harm, and takes what a job leaves.

What keeps it there the host knows: `/usr/lib/scaletier/host`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from ops.cluster import asroot
from ops.cluster.inventory import Host

MEMORY_SHARE = 0.4
"""What it may take of a host's memory. A job may take most of it, and comes first."""


def reading(host: Host, argv: Sequence[str]) -> str:
    """The command line that runs a program which reads what jobs have written, and writes nothing."""
    return asroot.command("aside", "reading", _memory(host), "--", *argv)


def writing(host: Host, argv: Sequence[str], folder: str) -> str:
    """The command line that runs a program of a job which writes into a folder, and sees but data besides of a bucket that is a
    folder itself.
    """
    bound = [posixpath.normpath(folder)] if folder.startswith("/") else []
    return asroot.command("aside", "writing", _memory(host), *bound, "--", *argv)


def _memory(host: Host) -> str:
    return str(int(host.memory_bytes * MEMORY_SHARE))
