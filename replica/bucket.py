"""The bucket as a replica uses it: small objects read and written whole, and never seen half written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Bucket(Protocol):
    """Objects by name, such as `jobs/job01/job.json`. Every method raises OSError where the bucket cannot be reached."""

    def read(self, name: str) -> bytes | None:
        """The object's content, None where there is no such object."""

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """The content of those of the objects that exist."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace the object at once: a reader sees the old content or the new."""

    def upload(self, name: str, source: Path) -> None:
        """Make or replace the object with the content of a file."""

    def download(self, name: str, target: Path) -> bool:
        """Write the object to a file; False where there is no such object."""


def open_bucket(url: str, writer: str) -> Bucket:
    """The bucket at a path or at a URL that fsspec knows, such as `gs://name`; `writer` is unique among its writers."""
    scheme, separator, path = url.partition("://")
    if not separator:
        return Directory(Path(url), writer)
    return Directory(Path(path), writer) if scheme == "file" else ObjectStore(url)


class Directory:
    """A bucket that is a directory which all hosts mount."""

    def __init__(self, root: Path, writer: str) -> None:
        self._root = root
        self._writer = writer

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: content for name in names if (content := self.read(name)) is not None}

    def write(self, name: str, content: bytes) -> None:
        self._replace(name, lambda part: part.write_bytes(content))

    def upload(self, name: str, source: Path) -> None:
        self._replace(name, lambda part: shutil.copyfile(source, part))

    def download(self, name: str, target: Path) -> bool:
        try:
            shutil.copyfile(self._root / name, target)
        except FileNotFoundError:
            return False
        return True

    def _replace(self, name: str, fill: Callable[[Path], object]) -> None:
        target = self._root / name
        if not self._root.is_dir():
            raise FileNotFoundError(f"{self._root} is not there")  # an unmounted bucket must not be made anew on the host
        target.parent.mkdir(parents=True, exist_ok=True)
        # One part file a writer: what a killed writer leaves behind is what it next writes over.
        part = target.with_name(f".{target.name}.{self._writer}")
        fill(part)
        part.replace(target)


class ObjectStore:
    """A bucket behind fsspec, whose objects are replaced at once by nature."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def read(self, name: str) -> bytes | None:
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        names = list(names)
        if not names:
            return {}
        filesystem, root = self._open()
        paths = {f"{root}/{name}": name for name in names}
        found = self._call(lambda: filesystem.cat(list(paths), on_error="return"))
        if errors := [e for e in found.values() if isinstance(e, Exception) and not isinstance(e, FileNotFoundError)]:
            raise OSError(f"{self._url}: {errors[0]}") from errors[0]
        return {paths[path]: content for path, content in found.items() if isinstance(content, bytes)}

    def write(self, name: str, content: bytes) -> None:
        filesystem, root = self._open()
        self._call(lambda: filesystem.pipe_file(f"{root}/{name}", content))

    def upload(self, name: str, source: Path) -> None:
        filesystem, root = self._open()
        self._call(lambda: filesystem.put_file(str(source), f"{root}/{name}"))

    def download(self, name: str, target: Path) -> bool:
        filesystem, root = self._open()
        try:
            self._call(lambda: filesystem.get_file(f"{root}/{name}", str(target)))
        except FileNotFoundError:
            return False
        return True

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs  # slow, and of no use to a host whose bucket is a directory

            self._opened = self._call(lambda: url_to_fs(self._url, use_listings_cache=False))
        return self._opened

    def _call(self, action: Callable[[], T]) -> T:
        """Clients raise errors of their own and of their transport; to a replica all mean that the bucket is away."""
        try:
            return action()
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self._url}: {error}") from error
