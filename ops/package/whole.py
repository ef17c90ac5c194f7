"""Folders that are there whole or not at all, and are named by what they were made of."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ops.errors import OpsError

_MAKING = ".making-"


def key(parts: Iterable[bytes]) -> str:
    """A name for what is made of these parts, 32 hexadecimal digits."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """An empty place beside a folder, which becomes that folder once it is filled; another who makes the same may be first.

    OpsError where it cannot take its place. What one who was killed has left there goes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.parent.resolve() / folder.name  # what is made may have its own path in it
    for left in folder.parent.glob(f"{_MAKING}*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    made = _beside(folder)
    try:
        yield made
        with suppress(OSError):
            made.rename(folder)
        if not folder.is_dir():
            raise OpsError(f"{folder} cannot be made: see whether there is room, and who may write there")
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove(folder: Path) -> None:
    """Take a folder away: at once for whoever looks, and what is left of it where this breaks off is no folder of that name."""
    folder.rename(going := _beside(folder))
    shutil.rmtree(going)


def _beside(folder: Path) -> Path:
    return folder.parent / f"{_MAKING}{folder.name}-{os.getpid()}"
