"""The bucket in a folder that all hosts of one machine mount. `open_bucket` opens any kind by its URL."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jobs.bucket import (
    PIECE,
    Bucket,
    BucketError,
    Conflict,
    Item,
    Progress,
    file_errors,
    no_progress,
    pieces,
    replacing,
    temporary_name,
    time_of,
)

_LOCK_SECONDS = 10.0
_LOCK_POLL = 0.002
# The paths that links to folders may add to a walk: a job can have many links to many files.
_MOST_LINKED = 10_000
# The errors for a name of no object: nothing is there, or a folder, or the name goes on below a file.
_NOTHING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# A job can remove other users' permission to read its files, and nest folders until their path is longer than any call takes.
_CLOSED = (errno.EACCES, errno.ENAMETOOLONG)


def version_of(content: bytes) -> str:
    """Return the hash of a file's content as its version, since a file has none."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class FolderBucket:
    """A bucket that is a folder.

    `create` names an object by link(2), which fails if the name exists. `replace` compares and renames under flock(2) of its
    folder, which the kernel releases when the process ends: no lock is ever left behind. Other writes only rename. A write
    that is acknowledged is on the disk: the file, its folder and those above a new folder are fsynced first. An upload creates
    no folder for a job without a record: that job was deleted, and a later job with the same id would find its files.
    """

    def __init__(self, root: Path, seconds: float = _LOCK_SECONDS) -> None:
        self._root = root
        self._seconds = seconds

    def read(self, name: str) -> Item | None:
        with file_errors(self._root):
            try:
                content = (self._root / name).read_bytes()
            except _NOTHING:
                self._check_there()
                return None
        return Item(content, version_of(content))

    def stamp(self, name: str) -> object:
        """Return a value that changes with the object, at a small part of the cost of reading it; None if there is none."""
        with suppress(OSError):
            status = (self._root / name).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        return {name: item for name in names if (item := self.read(name)) is not None}

    def scan(self, pattern: str) -> dict[str, bytes]:
        with file_errors(self._root):
            self._check_there()
            with suppress(*_NOTHING):  # raises for an unreadable folder, for which glob returns nothing
                next((self._root / pattern.partition("*")[0]).iterdir(), None)
            contents = {}
            for path in sorted(self._root.glob(pattern)):
                if not path.name.startswith("."):  # a write that is under way
                    with suppress(*_NOTHING):
                        contents[path.relative_to(self._root).as_posix()] = path.read_bytes()
            return contents

    def create(self, name: str, content: bytes) -> str:
        target = self._root / name
        with file_errors(self._root), self._temporary(target, [content]) as part:
            try:
                os.link(part, target)
            except FileExistsError:
                if target.read_bytes() != content:
                    raise Conflict(name) from None
            _fsync_directory(target.parent)
        return version_of(content)

    def replace(self, name: str, content: bytes, version: str) -> str:
        target = self._root / name
        new = version_of(content)
        with file_errors(self._root), self._locked(target.parent, name):
            try:
                current = version_of(target.read_bytes())
            except _NOTHING:
                raise Conflict(name) from None
            if current == new:
                return new
            if current != version:
                raise Conflict(name)
            with self._temporary(target, [content]) as part:
                part.replace(target)
            _fsync_directory(target.parent)
        return new

    def open(self, name: str) -> BinaryIO | None:
        """Open an object for reading, which shows one version of it; None if there is none."""
        with file_errors(self._root):
            try:
                return (self._root / name).open("rb")
            except _NOTHING:
                self._check_there()
                return None

    def read_part(self, name: str, start: int, end: int) -> bytes:
        with file_errors(self._root):
            if (source := self.open(name)) is None:
                return b""
            with source:
                source.seek(start)
                return source.read(end - start)

    def upload(self, name: str, content: bytes | Path, progress: Progress = no_progress) -> None:
        self.write(name, _counted(pieces(content), progress), time_of(content))

    def write(self, name: str, content: Iterable[bytes], modified: int | None) -> None:
        """Write an object piece by piece, with this time in ns; readers see it only once it is complete."""
        target = self._root / name
        job = self._root.joinpath(*Path(name).parts[:2], "job.json") if name.startswith("jobs/") else None
        with file_errors(self._root), self._temporary(target, content, job) as part:
            if modified is not None:
                os.utime(part, ns=(modified, modified))
            part.replace(target)
            _fsync_directory(target.parent)

    def download(self, name: str, target: Path, progress: Progress = no_progress) -> bool:
        if (source := self.open(name)) is None:
            return False
        with source, file_errors(target), replacing(target) as copy:
            for piece in _counted(self._pieces(source), progress):
                copy.write(piece)
        return True

    def _pieces(self, source: BinaryIO) -> Iterator[bytes]:
        with file_errors(self._root):
            while piece := source.read(PIECE):
                yield piece

    def sizes(self, folder: str) -> dict[str, int]:
        with file_errors(self._root):
            try:
                paths = list((self._root / folder).iterdir())
            except _NOTHING:
                self._check_there()
                return {}
            sizes = {path.name: _size(path) for path in paths if not path.name.startswith(".")}
        return {name: size for name, size in sizes.items() if size is not None}

    def walk(self, folder: str) -> dict[str, int]:
        return self._look_through(folder, all_readable=True)[0]

    def times(self, folder: str) -> dict[str, int]:
        times = dict[str, int]()
        for path in self.walk(folder):
            with file_errors(self._root), suppress(*_NOTHING):  # it may vanish after the walk
                times[path] = (self._root / folder / path).stat().st_mtime_ns
        return times

    def walk_following_links(self, folder: str) -> tuple[dict[str, int], list[str]]:
        sizes, links, skipped = self._look_through(folder, all_readable=False)
        names, linked = sorted(sizes), dict[str, int]()
        for path, target in sorted(links.items()):
            within = names[bisect_left(names, f"{target}/") : bisect_left(names, f"{target}0")]  # 0 comes after /
            if len(linked) + len(within) > _MOST_LINKED:
                skipped.append(path)
            else:
                linked |= {path + name.removeprefix(target): sizes[name] for name in within}
        return {**sizes, **linked}, sorted(skipped)

    def _look_through(self, folder: str, all_readable: bool) -> tuple[dict[str, int], dict[str, str], list[str]]:
        """Return the sizes of objects below a folder, the targets of its links to folders below it, and the skipped paths.

        A link to a file of the bucket is an object, too. Skipped are all other links, such as to a folder around the link, what
        is no regular file, and what cannot be read. With `all_readable`, an unreadable file is an object, too, and an
        unreadable folder raises BucketError.
        """
        top = self._root / folder
        sizes, links, others = dict[str, int | None](), dict[str, str](), list[str]()

        def skip(path: str, error: OSError) -> None:
            if all_readable or not path or error.errno not in _CLOSED:
                raise error
            others.append(path)

        with file_errors(self._root):
            self._check_there()
            sizes[""] = _size(top)
            bucket, whole = (Path(os.path.realpath(path)) for path in (self._root, top))
            folders = [(str(top), "")]
            while folders:
                here, below = folders.pop()
                try:
                    entries = list(os.scandir(here))
                except _NOTHING:
                    continue
                except OSError as error:
                    skip(below[:-1], error)
                    continue
                for entry in entries:
                    path = below + entry.name
                    target = Path(os.path.realpath(entry.path)) if entry.is_symlink() else None
                    if target is None and entry.is_dir():
                        folders.append((entry.path, f"{path}/"))
                    elif target is None or (target.is_relative_to(bucket) and not _is_folder(target)):
                        try:
                            size = _size(Path(entry.path))
                        except OSError as error:
                            skip(path, error)
                        else:
                            sizes[path] = size if all_readable or os.access(entry.path, os.R_OK) else None
                    elif target.is_relative_to(whole) and not Path(os.path.realpath(here)).is_relative_to(target):
                        links[path] = target.relative_to(whole).as_posix()
                    else:
                        others.append(path)
            others += [path for path, size in sizes.items() if path and size is None and os.path.lexists(top / path)]
        return {path: size for path, size in sizes.items() if size is not None}, links, others

    def delete(self, name: str) -> None:
        with file_errors(self._root):
            try:
                (self._root / name).unlink()
            except _NOTHING:
                self._check_there()

    def remove(self, folder: str, last: str = "") -> None:
        top, last_path = self._root / folder, self._root / last if last else None
        with file_errors(self._root):
            self._check_there()
            if not top.is_dir() or top.is_symlink():  # the target of a link stays
                top.unlink(missing_ok=True)
                return
            for parent, folders, names in os.walk(top, topdown=False, onerror=_raise_unless_gone):
                for path in (Path(parent, name) for name in (*names, *folders)):
                    if path.is_dir() and not path.is_symlink():
                        path.rmdir()
                    elif path != last_path:
                        path.unlink(missing_ok=True)
            if last_path:
                last_path.unlink(missing_ok=True)
            top.rmdir()

    def _check_there(self) -> None:
        if not self._root.is_dir():
            raise BucketError(f"{self._root} is not there")  # an unmounted bucket is not an empty one

    @contextmanager
    def _temporary(self, target: Path, content: Iterable[bytes], job: Path | None = None) -> Iterator[Path]:
        """Yield a temporary file with the content; remove it afterwards unless it was renamed.

        Raises Conflict if the file needs a new folder, and the record `job` of its job was deleted.
        """
        self._check_there()
        part = temporary_name(target)
        try:
            file = part.open("wb")
        except FileNotFoundError:
            if job and not job.exists():
                self._check_there()
                raise Conflict(job.parent.name) from None
            missing = [folder for folder in target.parents if not folder.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                _fsync_directory(folder.parent)
            file = part.open("wb")
        try:
            with file:
                for piece in content:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            yield part
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, folder: Path, name: str) -> Iterator[None]:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
                        raise BucketError(f"{folder} is locked by another for {self._seconds:g} s") from None
                    time.sleep(_LOCK_POLL)
            yield
        finally:
            os.close(descriptor)


def open_bucket(url: str) -> Bucket:
    """Return the bucket at `/folder`, `file:///folder`, `gs://name` or `gs://name/folder`."""
    scheme, separator, rest = url.partition("://")
    if (url and not separator) or (scheme == "file" and rest.startswith("/")):
        return FolderBucket(Path(rest if separator else url))
    if scheme == "gs":
        from jobs.gcs_bucket import GcsBucket  # some megabytes, and of no use to a host whose bucket is a folder

        return GcsBucket(url)
    raise BucketError(f"{url!r} is no bucket: valid are a folder, file:///folder, and gs://bucket")


def _counted(content: Iterable[bytes], progress: Progress) -> Iterator[bytes]:
    for piece in content:
        yield piece
        progress(len(piece))


def _is_folder(path: Path) -> bool:
    """Return True for a folder, and False if that cannot be read, for which pathlib may raise an error."""
    return os.path.isdir(path)  # noqa: PTH112


def _size(path: Path) -> int | None:
    """Return the size of a regular file, also one that a link leads to; None for anything else."""
    try:
        status = path.stat()
    except OSError:
        try:
            is_link = stat.S_ISLNK(path.lstat().st_mode)
        except _NOTHING:
            return None
        if not is_link:
            raise
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, _NOTHING):
        raise error


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
