"""The bucket as the operator reaches it, through fsspec: whole objects, seen complete or not at all.

`sftp:///bucket` is that path on whichever host answers; `gs://name` and others are fsspec's own; a plain path is itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ops import terminal
from ops.errors import OpsError

T = TypeVar("T")
Progress = Callable[[int], None]
_CHUNK = 1 << 20


class Bucket:
    """Objects by name, such as `jobs/job01/package.tar.gz`: what is large, and what has one writer.

    `renames` is for file systems, where a write shows at once: it goes to another name, and takes its own when complete.
    """

    def __init__(self, fs: Any, root: str, renames: bool) -> None:
        self._fs, self._root, self._renames = fs, root.rstrip("/"), renames

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the content, or None if there is no such object."""
        try:
            content: bytes = self._fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        return content

    def read_part(self, name: str, start: int, end: int) -> bytes:
        """Return these bytes of an object, or as many as there are; empty if there is no such object."""
        try:
            content: bytes = self._fs.cat_file(self.path(name), start=start, end=end)
        except FileNotFoundError:
            return b""
        return content

    def delete(self, name: str) -> None:
        """Take an object away; FileNotFoundError where there is none."""
        self._fs.rm_file(self.path(name))

    def remove(self, folder: str, last: str = "") -> None:
        """Remove an object, or a folder with its content, if it exists.

        The object `last` is removed at the end, so that an interrupted removal can be repeated.
        """
        top = self.path(folder)
        if self._renames and self._fs.islink(top):
            self._fs.rm_file(top)  # and what it leads to stays
            return
        entries = self._found(folder, withdirs=True)
        folders = [path for path, info in entries.items() if info["type"] == "directory"]
        last_path = self.path(last) if last else ""
        for path in entries.keys() - set(folders) - {last_path}:
            self._fs.rm_file(path)
        if self._renames:  # elsewhere a folder is but a part of names
            for path in sorted(set(folders) - {top}, key=len, reverse=True):
                self._fs.rmdir(path)
        if last_path in entries:
            self._fs.rm_file(last_path)
        if self._renames and top in folders:
            self._fs.rmdir(top)

    def names(self, folder: str) -> dict[str, int]:
        """Return the names in a folder, with their sizes in bytes; empty if there is no such folder."""
        try:
            entries = self._fs.ls(self.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names = {info["name"].rstrip("/").rpartition("/")[2]: info["size"] or 0 for info in entries}
        return {name: size for name, size in names.items() if name and not name.startswith(".")}

    def walk(self, folder: str) -> dict[str, int]:
        """Return the objects below a folder by relative path, with their sizes; an object of that name is ``.

        An object whose name ends in /, with which TensorFlow marks a folder in a `gs://` bucket, does not count.
        """
        top = self.path(folder).lstrip("/")
        entries = {path: info for path, info in self._found(folder).items() if not path.endswith("/")}
        return {path.lstrip("/").removeprefix(top).lstrip("/"): info["size"] or 0 for path, info in entries.items()}

    def _found(self, folder: str, **options: Any) -> dict[str, dict[str, Any]]:
        try:
            entries = self._fs.find(self.path(folder), detail=True, **options)
            return {
                path: info or self._fs.info(path) for path, info in entries.items()
            }  # fsspec tells nothing of a file itself
        except FileNotFoundError:
            return {}

    def upload(self, name: str, content: bytes | Path, progress: Progress = lambda _: None) -> None:
        """Create or replace an object by bytes or a file's content; call `progress` with each piece's bytes."""
        target = self.path(name) if not self._renames else self._part_name(name)
        with self._writing(target) as out:
            for piece in _pieces(content):
                out.write(piece)
                progress(len(piece))
        if self._renames:
            self._fs.mv(target, self.path(name))

    def download(self, name: str, target: Path, progress: Progress = lambda _: None) -> None:
        """Write an object to a file, which is complete or not there."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            with self._fs.open(self.path(name), "rb") as source, part.open("wb") as out:
                if hasattr(source, "prefetch"):
                    source.prefetch()  # over SFTP: all of it under way at once, instead of a round trip a piece
                while piece := source.read(_CHUNK):
                    out.write(piece)
                    progress(len(piece))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def _part_name(self, name: str) -> str:
        folder, _, base = self.path(name).rpartition("/")
        return f"{folder}/.{base}.{uuid.uuid4().hex}"

    def _writing(self, path: str) -> Any:
        """Open an object for writing; create its folder only if it is missing, which saves round trips."""
        try:
            out = self._fs.open(path, "wb")
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            out = self._fs.open(path, "wb")
        if hasattr(out, "set_pipelined"):
            out.set_pipelined(True)  # SFTP: do not wait for each piece to be acknowledged
        return out


def open_bucket(url: str, connect: Callable[[], Any]) -> Bucket:
    """Open the bucket at a URL; `connect` returns a Fabric connection, and is only called for `sftp:///`."""
    scheme, separator, path = url.partition("://")
    if scheme == "sftp" and separator:
        from ops.cluster.sftp import HostFileSystem

        return Bucket(HostFileSystem(connect().client.open_sftp()), path, renames=True)
    if not separator or scheme == "file":
        from fsspec.implementations.local import LocalFileSystem

        return Bucket(LocalFileSystem(auto_mkdir=False), path if separator else url, renames=True)
    from jobs.objects import plain

    plain()
    import fsspec  # a twentieth of a second, which a push of files need not wait for

    try:
        return Bucket(fsspec.filesystem(scheme, use_listings_cache=False), path, renames=False)  # others write there, too
    except (ImportError, ValueError) as error:
        raise OpsError(f"the bucket {url} cannot be opened: {error}") from None


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as source:
        while piece := source.read(_CHUNK):
            yield piece


def upload_missing(bucket: Bucket, folder: str, files: Mapping[str, Path], there: Mapping[str, int], what: str) -> list[str]:
    """Upload the files that are not `there` in full size; return their names, `` for the folder itself."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    names = missing(sizes, there)
    if names:
        with terminal.Step(f"uploading {what}", always=True) as step:
            progress = terminal.sizer(step, sum(sizes[name] for name in names))
            for name in names:
                bucket.upload(f"{folder}/{name}" if name else folder, files[name], progress)
    return names


def missing(wanted: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Return the names that are not there in their full size."""
    return [name for name, size in wanted.items() if there.get(name) != size]
