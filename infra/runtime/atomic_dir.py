"""Create folders and files that exist completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAKING = ".making-"


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a hash of these parts, as a name for what is made of them: 32 hexadecimal digits."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


@contextmanager
def create_atomically(folder: Path, error_type: type[Exception]) -> Iterator[Path]:
    """Yield an unused path beside a folder; rename what the caller creates there to the folder.

    Another process that creates the same may be first. Raises `error_type` if the path cannot be renamed.
    """
    with temporary_path(folder) as temporary:
        yield temporary
        publish(temporary, folder, error_type)


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield an unused path beside a file or folder, and remove it afterwards. Also remove such paths of killed processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name  # the content may include its own path
    temporary = _temporary_name(path)
    for stale in path.parent.glob(f"{_MAKING}*"):
        if stale == temporary or not _is_running(stale.name.rpartition("-")[2]):  # process ids are reused
            shutil.rmtree(stale, ignore_errors=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, path: Path, error_type: type[Exception]) -> None:
    """Flush all file systems, then rename `temporary` to `path`: after a power cut, no file below `path` is empty."""
    os.sync()
    with suppress(OSError):
        temporary.rename(path)
    if not path.exists():
        raise error_type(f"{path} cannot be made: check the free space and the folder's permissions")


def remove(folder: Path) -> None:
    """Rename a folder, then remove it: an interrupted removal leaves no incomplete folder."""
    folder.rename(temporary := _temporary_name(folder))
    shutil.rmtree(temporary)


def _temporary_name(path: Path) -> Path:
    return path.parent / f"{_MAKING}{path.name}-{os.getpid()}"


def _is_running(process_id: str) -> bool:
    """Return True if a process has this id; works without /proc too."""
    try:
        os.kill(int(process_id), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
