"""What root does for `fab` on a host: one program that comes with the host, and that checks all that it is told."""

from __future__ import annotations

import shlex

PROGRAM = "/usr/lib/scaletier/host"


def command(verb: str, *words: str) -> str:
    """The command line that has it done; who logs in may have nothing else done as root."""
    return shlex.join(["sudo", "-n", PROGRAM, verb, *words])
