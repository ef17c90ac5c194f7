"""The bucket: objects by name, such as `jobs/job01/job.json`, in a folder, over SSH, or in Google Cloud Storage.

Writes of small records are conditional: the record must not exist, or must still be the version that was read. Of two writers
one succeeds; the other gets a Conflict, reads the record again, and decides again. So a slow writer cannot undo a later write.
Large objects, such as packages and logs, have one writer each, and are written unconditionally.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from jobs.background import Background

T = TypeVar("T")
Progress = Callable[[int], None]
"""Called with the number of bytes of each piece that was transferred."""
PIECE = 2**20
"""The size of the pieces in which files are read and written."""


NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
"""The error of a full disk, also as another program or host has printed it."""


class Conflict(Exception):  # noqa: N818  no error, but an expected result
    """Another writer was first; nothing was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was changed by another writer")
        self.name = name


class BucketError(OSError):
    """The bucket refuses, or does not answer in time. A write may have taken effect."""


class Item(NamedTuple):
    """An object's content and its version."""

    content: bytes
    version: str


def no_progress(_: int) -> None:
    """Count no bytes."""


class RecordStore(Protocol):
    """The small records of a bucket.

    Every method raises BucketError if it exceeds the store's time limit. A FolderBucket has only one for the lock of `replace`,
    10 s; TimeLimited adds one. A write that is repeated, because its answer was lost, is recognized by its
    content. So the content must identify its writer, as a lease or a heartbeat does.
    """

    def read(self, name: str) -> Item | None:
        """Return the object, or None if there is none."""

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        """Return those of the objects that exist."""

    def scan(self, pattern: str) -> dict[str, bytes]:
        """Return the content, by name, of objects that fit a pattern; * is one part of a name, as in `jobs/*/job.json`."""

    def create(self, name: str, content: bytes) -> str:
        """Create an object and return its version; Conflict if it exists."""

    def replace(self, name: str, content: bytes, version: str) -> str:
        """Replace this version of an object, return the new one; Conflict if the object has another version or is gone."""


class Bucket(RecordStore, Protocol):
    """A whole bucket; any thread may use it."""

    def read_part(self, name: str, start: int, end: int) -> bytes:
        """Return these bytes of an object, or as many as there are; empty if there is no such object."""

    def upload(self, name: str, content: bytes | Path, progress: Progress = no_progress) -> None:
        """Write an object, or a file's content, whether it exists or not; Conflict if its job is known to be deleted.

        The object of a file keeps the time when that was modified.
        """

    def download(self, name: str, target: Path, progress: Progress = no_progress) -> bool:
        """Write an object to a file, which changes only once all is there; False if there is no such object."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of a folder's objects in bytes, by name; empty if there is no such folder."""

    def walk(self, folder: str) -> dict[str, int]:
        """Return the sizes of all objects below a folder by relative path. If `folder` names an object, its path is ''."""

    def times(self, folder: str) -> dict[str, int]:
        """Return the modification times of objects below a folder, in ns, by relative path as in `walk`.

        An object that was not uploaded from a file may be missing.
        """

    def walk_following_links(self, folder: str) -> tuple[dict[str, int], list[str]]:
        """Return sizes as `walk` does, also through links to folders, and the skipped paths.

        Skipped are other links, pipes, and what cannot be read; for a folder that cannot be read, `walk` raises BucketError.
        """

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""

    def remove(self, folder: str, last: str = "") -> None:
        """Remove an object, or a folder with its content, if it exists.

        The object `last` is removed at the end, so that an interrupted removal can be repeated.
        """


def with_remedy(error: str) -> str:
    """Return an error's text, with a remedy if a disk is full."""
    remedy = "fab doctor names the full disk or bucket, and the jobs that use most of the bucket"
    return f"{error}: {remedy}" if NO_SPACE.search(error) else error


def time_of(content: bytes | Path) -> int | None:
    """Return when a file was modified, in ns; None for bytes."""
    with file_errors(content):
        return content.stat().st_mtime_ns if isinstance(content, Path) else None


def pieces(content: bytes | Path) -> Iterator[bytes]:
    """Yield the content of an object that is to be written; BucketError if its file cannot be read."""
    if isinstance(content, bytes):
        yield content
        return
    with file_errors(content), content.open("rb") as source:
        while piece := source.read(PIECE):
            yield piece


def temporary_name(target: Path) -> Path:
    """Return a new path in the target's folder; its name is short, as the target's may have the longest possible one."""
    return target.with_name(f".{os.urandom(16).hex()}")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of the target at the end of the block, unless the block fails."""
    part = temporary_name(target)
    try:
        with part.open("wb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def file_errors(path: object) -> Iterator[None]:
    """Raise the errors of a file of this machine as BucketError."""
    try:
        yield
    except BucketError:
        raise
    except OSError as error:
        raise BucketError(error.errno, f"{path}: {error.strerror or error}") from error


class TimeLimited:
    """Records with a time limit for each call, so that a file system that hangs does not block the caller.

    Calls run one at a time. While one hangs, further ones fail at once. A hanging write may still succeed later; conditional
    writes make that safe. A call that times out before its turn is never made.
    """

    def __init__(self, store: RecordStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._turn = threading.Lock()
        self._hanging: Background[Any] | None = None

    def read(self, name: str) -> Item | None:
        return self.call(lambda: self._store.read(name))

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        name_list = list(names)
        return self.call(lambda: self._store.read_all(name_list))

    def scan(self, pattern: str) -> dict[str, bytes]:
        return self.call(lambda: self._store.scan(pattern))

    def create(self, name: str, content: bytes) -> str:
        return self.call(lambda: self._store.create(name, content))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self.call(lambda: self._store.replace(name, content, version))

    def call(self, work: Callable[[], T]) -> T:
        """Return the result of a call of the bucket; BucketError if it takes too long."""
        deadline = time.monotonic() + self._seconds
        if self._hanging and self._hanging.running:
            raise BucketError(f"an earlier call has been hanging for more than {self._seconds:g} s")
        if not self._turn.acquire(timeout=self._seconds):
            raise BucketError(f"no answer within {self._seconds:g} s")

        def run() -> T:
            try:
                return work()
            finally:
                self._turn.release()

        try:
            call = Background(run)
        except RuntimeError as error:
            self._turn.release()
            raise BucketError(f"no thread can be started: {error}") from error
        try:
            return call.join(deadline - time.monotonic())
        except TimeoutError:
            self._hanging = call
            raise BucketError(f"no answer within {self._seconds:g} s") from None
