"""pip, run here for the hosts; what it says when it fails is one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.runtime import pip as bare_pip
from ops.cluster.inventory import PYTHON
from ops.errors import UsageError
from ops.package import piperror


def pip(command: str, *arguments: str, start: Path, python: Path | None = None, hosts: str = PYTHON) -> None:
    """`pip COMMAND ARGUMENTS` in the folder `start`, from which a requirement's paths start; UsageError where it fails.

    With a `python` that is whose packages it manages. What it makes can be read by everybody, as hosts have other users.
    `hosts` is the version of theirs, for what is said.
    """
    run(bare_pip.command(command, *arguments, whose=python), start, hosts)


def run(command: Sequence[str], start: Path, hosts: str = PYTHON) -> None:
    """A command that must succeed; UsageError with pip's reason where it does not."""
    done = bare_pip.run(command, start)
    if done.returncode:
        raise UsageError(piperror.explain(done.stdout, hosts))
