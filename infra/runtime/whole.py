"""What is there whole or not at all: folders that are named by what they were made of, and files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAKING = ".making-"


def key(parts: Iterable[bytes]) -> str:
    """A name for what is made of these parts, 32 hexadecimal digits."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


@contextmanager
def making(folder: Path, refusal: type[Exception]) -> Iterator[Path]:
    """An empty place beside a folder, which becomes that folder once it is filled; another who makes the same may be first.

    A `refusal` where it cannot take its place.
    """
    with beside(folder) as made:
        yield made
        settle(made, folder, refusal)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """An empty place beside a file or folder, gone afterwards. What one who was killed has left there goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name  # what is made may have its own path in it
    made = _beside(path)
    for left in path.parent.glob(f"{_MAKING}*"):
        if left == made or not _runs(left.name.rpartition("-")[2]):  # numbers of processes come again
            shutil.rmtree(left, ignore_errors=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def settle(made: Path, path: Path, refusal: type[Exception]) -> None:
    """Give what was made its name, once it is on the disk: so a power cut leaves no such name with empty files below it."""
    os.sync()
    with suppress(OSError):
        made.rename(path)
    if not path.exists():
        raise refusal(f"{path} cannot be made: see whether there is room, and who may write there")


def remove(folder: Path) -> None:
    """Take a folder away: at once for whoever looks, and what is left of it where this breaks off is no folder of that name."""
    folder.rename(going := _beside(folder))
    shutil.rmtree(going)


def _beside(path: Path) -> Path:
    return path.parent / f"{_MAKING}{path.name}-{os.getpid()}"


def _runs(process: str) -> bool:
    """Whether there is a process of that number, on a system without /proc too."""
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
