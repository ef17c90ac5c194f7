"""What runs of a package: a module, as of old, or a script or any command in the package's own folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.cluster.inventory import HERE
from ops.errors import UsageError
from ops.package import package

SHIPPED = HERE / "trainer"
# As the hosts have it first on their PATH.
PYTHON = "python"


@dataclass(frozen=True)
class Program:
    """A package, and the `command` that runs in its folder; none for a module of it."""

    source: package.Source
    command: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where in the package the command runs."""
        return self.source.name if self.command and self.source.files else ""

    @property
    def script(self) -> str | None:
        """As of `script_of`."""
        return script_of(self.folder, self.command)


def script_of(folder: str, command: Sequence[str]) -> str | None:
    """The path in the package of a script of Python that runs in that folder; None for any other program."""
    return f"{folder}/{command[1]}" if folder and command and command[0] == PYTHON else None


def knows_flags(command: Sequence[str]) -> bool:
    """True where the code of the package is what reads the arguments, and not some other program."""
    return not command or command[0] == PYTHON


def find(folder: str | None, module: str | None, script: str | None, command: str | None) -> Program:
    """What is meant, the shipped trainer where nothing is named; UsageError for what is not there or cannot run."""
    named = {"--module": module, "--script": script, "--command": command}
    if len(given := [flag for flag, value in named.items() if value is not None]) > 1:
        raise UsageError(f"{given[0]} and {given[1]} both say what runs: leave one of them out")
    if script is not None:
        return _script(folder, script)
    if command is not None:
        return _command(folder, command)
    here = Path("trainer")
    return Program(package.find(folder or (here if here.is_dir() else SHIPPED)))


def _script(folder: str | None, script: str) -> Program:
    path = _path(folder, script, "--script")
    if folder is None:
        return Program(package.single(path), (PYTHON, path.name))
    return Program(package.folder(folder), (PYTHON, path.relative_to(folder).as_posix()))


def _command(folder: str | None, text: str) -> Program:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--command cannot be split ({error}): quote it as for a shell") from None
    if not words:
        raise UsageError("--command is empty: name a program of the package, such as ./run.sh, or one that the hosts have")
    source = package.folder(folder) if folder is not None else None
    if "/" in words[0] and not words[0].startswith("/"):
        path = _path(folder, words[0], "--command")
        if not os.access(path, os.X_OK):
            raise UsageError(f"--command {words[0]} is not executable: chmod +x {path}")
        if source is None:
            source, words[0] = package.single(path), f"./{path.name}"
    return Program(source or package.Source(Path(words[0]).name, {}), tuple(words))


def _path(folder: str | None, name: str, flag: str) -> Path:
    """The file, below the folder where there is one."""
    path = Path(folder or "", name)
    if folder is not None and not path.is_file() and Path(name).is_relative_to(folder):
        path = Path(name)  # told with its folder
    where = f" in {folder}" if folder is not None else ""
    if not path.is_file():
        raise UsageError(f"there is no file {name}{where}: give {flag} the path of one")
    if folder is not None and ".." in path.relative_to(folder).parts:
        raise UsageError(f"{flag} {name} is not in {folder}: give --package the folder that has it")
    return path


def words(command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)
