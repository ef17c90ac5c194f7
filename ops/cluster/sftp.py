"""A host's directories as an fsspec file system, over Fabric's connection with a verified host key."""

from __future__ import annotations

import contextlib
import stat
from typing import Any

from fsspec.implementations.sftp import SFTPFileSystem
from fsspec.spec import AbstractFileSystem


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class HostFileSystem(SFTPFileSystem):  # type: ignore[misc]
    """fsspec's SFTP file system, except that it never connects by itself."""

    cachable = False

    def __init__(self, sftp: Any) -> None:
        AbstractFileSystem.__init__(self)
        self.ftp = sftp

    def rm_file(self, path: str) -> None:
        """Remove a file, which may be gone."""
        with contextlib.suppress(FileNotFoundError):
            self.ftp.remove(path)

    def islink(self, path: str) -> bool:
        """Return True for a symbolic link."""
        try:
            return stat.S_ISLNK(self.ftp.lstat(path).st_mode or 0)
        except FileNotFoundError:
            return False

    def walk(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Walk like fsspec, but raise an error for a folder that may not be read, instead of an empty one."""
        return super().walk(path, *args, **{**kwargs, "on_error": _raise_unless_gone})

    def mv(self, old: str, new: str, **_: Any) -> None:
        """Rename a file, over another one."""
        self.ftp.posix_rename(old, new)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return a small file's content in three round trips, or these bytes of any file."""
        with self.ftp.open(path, "rb") as file:
            file.seek(start or 0)
            content: bytes = file.read() if end is None else file.read(end - (start or 0))
        return content

    def makedirs(self, path: str, exist_ok: bool = True, mode: int = 0o777) -> None:  # noqa: ARG002
        """Make the directory and those above it; the host's umask lets the group of who logs in write to them."""
        missing: list[str] = []
        while path and not self._there(path):
            missing.append(path)
            path = path.rpartition("/")[0]
        for folder in reversed(missing):
            try:
                self.ftp.mkdir(folder, mode)
            except OSError:
                if not self._there(folder):  # another may have made it in between
                    raise

    def _there(self, path: str) -> bool:
        try:
            self.ftp.stat(path)
        except FileNotFoundError:
            return False
        return True
