"""The store in a folder that all hosts of one machine mount."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jobs.store import Conflict, Item, StoreError

_LOCK_SECONDS = 10.0
_LOCK_POLL = 0.002
# There is no object of this name: nothing, a folder, or something below a file.
_NOTHING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def version_of(content: bytes) -> str:
    """Return the hash of a file's content as its version, since a file has none."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class LocalStore:
    """A bucket that is a directory.

    A new object gets its name by link(2), which fails where the name is taken. A replacement compares and renames under
    flock(2) of its directory, which the kernel gives up with the process that holds it: no lock is ever left behind. What is
    acknowledged is on the disk: file and directory are synced first. An upload makes no folder for a job that has no record, as
    it was deleted: a further job of that id would take what a host still had of it for its own.
    """

    def __init__(self, root: Path, seconds: float = _LOCK_SECONDS) -> None:
        self._root = root
        self._seconds = seconds

    def read(self, name: str) -> Item | None:
        with _errors(self._root):
            try:
                content = (self._root / name).read_bytes()
            except _NOTHING:
                self._check_there()
                return None
        return Item(content, version_of(content))

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        return {name: item for name in names if (item := self.read(name)) is not None}

    def scan(self, pattern: str) -> dict[str, bytes]:
        with _errors(self._root):
            self._check_there()
            with suppress(*_NOTHING):  # glob takes a folder that may not be read for one that is empty
                next((self._root / pattern.partition("*")[0]).iterdir(), None)
            contents = {}
            for path in sorted(self._root.glob(pattern)):
                if not path.name.startswith("."):  # a write that is under way
                    with suppress(*_NOTHING):
                        contents[path.relative_to(self._root).as_posix()] = path.read_bytes()
            return contents

    def create(self, name: str, content: bytes) -> str:
        target = self._root / name
        with _errors(self._root), self._part(target, lambda part: part.write_bytes(content)) as part:
            try:
                os.link(part, target)
            except FileExistsError:
                if target.read_bytes() != content:
                    raise Conflict(name) from None
            _sync(target.parent)
        return version_of(content)

    def replace(self, name: str, content: bytes, version: str) -> str:
        target = self._root / name
        new = version_of(content)
        with _errors(self._root), self._locked(target.parent, name):
            try:
                there = version_of(target.read_bytes())
            except _NOTHING:
                raise Conflict(name) from None
            if there == new:
                return new
            if there != version:
                raise Conflict(name)
            with self._part(target, lambda part: part.write_bytes(content)) as part:
                part.replace(target)
            _sync(target.parent)
        return new

    def upload(self, name: str, source: Path) -> None:
        target = self._root / name
        job = self._root.joinpath(*Path(name).parts[:2], "job.json") if name.startswith("jobs/") else None
        with _errors(self._root), self._part(target, lambda part: shutil.copyfile(source, part), job) as part:
            part.replace(target)
            _sync(target.parent)

    def download(self, name: str, target: Path) -> bool:
        part = target.with_name(f".{target.name}.{os.urandom(16).hex()}")
        with _errors(self._root):
            try:
                source = (self._root / name).open("rb")
            except _NOTHING:
                self._check_there()
                return False
            try:
                with source, part.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        with _errors(self._root):
            try:
                paths = list((self._root / folder).iterdir())
            except _NOTHING:
                self._check_there()
                return {}
            sizes = {}
            for path in paths:
                with suppress(*_NOTHING):
                    if not path.name.startswith(".") and path.is_file():
                        sizes[path.name] = path.stat().st_size
            return sizes

    def delete(self, name: str) -> None:
        with _errors(self._root):
            try:
                (self._root / name).unlink()
            except _NOTHING:
                self._check_there()

    def _check_there(self) -> None:
        if not self._root.is_dir():
            raise StoreError(f"{self._root} is not there")  # an unmounted bucket is not an empty one

    @contextmanager
    def _part(self, target: Path, fill: Callable[[Path], object], job: Path | None = None) -> Iterator[Path]:
        """Yield a temporary file with the content; remove it afterwards unless it was renamed.

        Raises Conflict if that needs a folder of a `job` whose record was deleted.
        """
        self._check_there()
        part = target.with_name(f".{target.name}.{os.urandom(16).hex()}")
        try:
            try:
                fill(part)
            except FileNotFoundError:
                if job and not job.exists():
                    self._check_there()
                    raise Conflict(job.parent.name) from None
                target.parent.mkdir(parents=True, exist_ok=True)
                fill(part)
            _sync(part)
            yield part
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, directory: Path, name: str) -> Iterator[None]:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except _NOTHING:
            self._check_there()
            raise Conflict(name) from None
        try:
            deadline = time.monotonic() + self._seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreError(f"{directory} is locked by another for {self._seconds:g} s") from None
                    time.sleep(_LOCK_POLL)
            yield
        finally:
            os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _errors(root: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(error.errno, f"{root}: {error.strerror or error}") from error
