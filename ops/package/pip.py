"""pip, run here for the hosts; what it says when it fails is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ops.cluster.inventory import PYTHON
from ops.errors import UsageError
from ops.package import piperror

# Of the user's environment, what would have pip find or put packages elsewhere than it is told.
_STRAYS = frozenset({"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_PYTHON"})


def pip(command: str, *arguments: str, start: Path, python: Path | None = None, hosts: str = PYTHON) -> None:
    """`pip COMMAND ARGUMENTS` in the folder `start`, from which a requirement's paths start; UsageError where it fails.

    With a `python` that is whose packages it manages. What it makes can be read by everybody, as hosts have other users.
    `hosts` is the version of theirs, for what is said.
    """
    whose = ["--python", str(python)] if python else []
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    run([sys.executable, "-m", "pip", *whose, command, *quiet, *arguments], start, hosts)


def run(command: Sequence[str], start: Path, hosts: str = PYTHON) -> None:
    """A command that must succeed; UsageError with pip's reason where it does not."""
    done = subprocess.run(
        command,
        cwd=start,
        env={key: value for key, value in os.environ.items() if key not in _STRAYS} | {"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        umask=0o022,
        check=False,
    )
    if done.returncode:
        raise UsageError(piperror.explain(done.stdout, hosts))
