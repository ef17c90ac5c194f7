"""pip on the operator's machine, for hosts that may be of another system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Debian 12's C library, which Ubuntu 24.04's can stand in for.
_GLIBC = 36
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC, 4, -1)),
    *(f"manylinux{old}_x86_64" for old in ("2014", "2010", "1")),
)
"""Of wheels that hosts can use, the best first: not `linux_x86_64`, which says nothing of the C library."""
# Of the user's environment, what would have pip find or put packages elsewhere than it is told.
_STRAYS = frozenset({"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_PYTHON"})


def command(name: str, *arguments: str, whose: Path | None = None) -> list[str]:
    """Return the command line of `pip NAME ARGUMENTS`, for the packages of the Python of `whose`; pure."""
    python = ["--python", str(whose)] if whose else []
    return [
        sys.executable,
        "-m",
        "pip",
        *python,
        name,
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        *arguments,
    ]


def for_hosts(python: str) -> list[str]:
    """Return pip's options for hosts with this version of Python, whatever this machine is."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def run(
    argv: Sequence[str],
    start: Path | None = None,
    told: bool = False,
    heard: Callable[[str], None] | None = None,
    more: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; what it makes can be read by everybody, as hosts have other users.

    Args:
        argv: the command.
        start: the folder that it runs in.
        told: what it prints goes where this process' own goes, and its errors are in `stderr`.
        heard: is called with each line that it prints; the command ends where this raises.
        more: further variables of its environment.

    Returns:
        What it printed is in `stdout`, all of it, unless it was `told`.
    """
    env = {key: value for key, value in os.environ.items() if key not in _STRAYS} | {"NO_COLOR": "1", **(more or {})}
    with subprocess.Popen(
        argv,
        cwd=start,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=None if told else subprocess.PIPE,
        stderr=subprocess.PIPE if told else subprocess.STDOUT,
        text=True,
        errors="replace",
        umask=0o022,
    ) as process:
        try:
            lines = []
            if heard and process.stdout:
                for line in process.stdout:
                    lines.append(line)
                    heard(line)
            out, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(argv, process.wait(), "".join(lines) + (out or ""), errors)
