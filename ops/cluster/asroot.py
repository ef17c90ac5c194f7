"""Privileged operations for `fab` on a host: one program on the host that validates its arguments."""

from __future__ import annotations

import shlex

PROGRAM = "/usr/lib/scaletier/host"


def command(verb: str, *words: str) -> str:
    """Return the command line of an operation; the SSH user may run nothing else as root."""
    return shlex.join(["sudo", "-n", PROGRAM, verb, *words])
