"""Folders and files that exist completely or not at all; a folder is named by its inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAKING = ".making-"


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a name for the result of these parts, 32 hexadecimal digits."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


@contextmanager
def making(folder: Path, refusal: type[Exception]) -> Iterator[Path]:
    """Yield an empty path beside a folder, which becomes that folder once filled.

    Another process that builds the same may be first. Raises `refusal` if it cannot be renamed.
    """
    with beside(folder) as part:
        yield part
        settle(part, folder, refusal)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield an empty path beside a file or folder, and remove it afterwards, with paths that a killed process left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name  # what is made may have its own path in it
    temporary = _beside(path)
    for stale in path.parent.glob(f"{_MAKING}*"):
        if stale == temporary or not _runs(stale.name.rpartition("-")[2]):  # numbers of processes come again
            shutil.rmtree(stale, ignore_errors=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def settle(part: Path, path: Path, refusal: type[Exception]) -> None:
    """Sync a path to the disk and rename it: so a power cut leaves no such name with empty files below."""
    os.sync()
    with suppress(OSError):
        part.rename(path)
    if not path.exists():
        raise refusal(f"{path} cannot be made: check the free space and the folder's permissions")


def remove(folder: Path) -> None:
    """Remove a folder atomically: if that is interrupted, the rest has another name."""
    folder.rename(going := _beside(folder))
    shutil.rmtree(going)


def _beside(path: Path) -> Path:
    return path.parent / f"{_MAKING}{path.name}-{os.getpid()}"


def _runs(process: str) -> bool:
    """Return True if there is a process of that number, on a system without /proc too."""
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
