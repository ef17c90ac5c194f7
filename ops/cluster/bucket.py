"""Channels to the bucket on a host, and uploads of missing files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import paramiko

from jobs.bucket import Bucket, time_of
from ops import terminal
from ops.cluster.remote import send_bursts

_READ = 262_144
_SEND_SECONDS = 60.0
_STDERR_SECONDS = 1.0


class SshChannel:
    """The stdin and stdout of a command on a host.

    All calls raise OSError or EOFError if the connection breaks, and TimeoutError if no data moves for too long.
    """

    def __init__(self, connection: Any, command: str) -> None:
        with _as_os_error():
            self._channel = connection.create_session()
            self._channel.exec_command(command)
        self._rest = b""

    def send(self, data: bytes) -> None:
        self._channel.settimeout(_SEND_SECONDS)
        with _as_os_error():
            send_bursts(self._channel, data)

    def read_line(self, seconds: float) -> bytes:
        """Return the next line; TimeoutError after `seconds`, EOFError if the command has ended."""
        deadline = time.monotonic() + seconds
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            pieces.append(self._receive(_READ, max(deadline - time.monotonic(), 0.01)))
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return line

    def read(self, size: int, seconds: float) -> bytes:
        """Return some of the next bytes, with the errors of `read_line`."""
        if not self._rest:
            return self._receive(size, seconds)
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def _receive(self, size: int, seconds: float) -> bytes:
        self._channel.settimeout(seconds)
        with _as_os_error():
            data: bytes = self._channel.recv(size)
        if not data:
            raise EOFError(f"the host ended it{self._last_error_line()}")
        return data

    def close(self) -> None:
        self._channel.close()

    def _last_error_line(self) -> str:
        """Return the last line of the command's stderr, if there is one."""
        with _as_os_error():
            self._channel.settimeout(_STDERR_SECONDS)
            with suppress(TimeoutError):
                last_lines = self._channel.recv_stderr(_READ).decode("utf-8", "replace").strip().splitlines()[-1:]
                return "".join(f": {line}" for line in last_lines)
        return ""


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise paramiko's own errors as OSError."""
    try:
        yield
    except paramiko.SSHException as error:
        raise OSError(str(error) or type(error).__name__) from error


def upload_changed(bucket: Bucket, folder: str, files: Mapping[str, Path], existing: Mapping[str, int], what: str) -> list[str]:
    """Upload files that the bucket lacks, or has with another size or modification time.

    `existing` are the sizes of the folder's objects, as of `Bucket.walk`. Returns: the names of the uploaded files, '' for the
    object `folder`.
    """
    times = bucket.times(folder) if existing else {}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    names = [name for name, path in files.items() if (existing.get(name), times.get(name)) != (sizes[name], time_of(path))]
    if names:
        with terminal.ProgressLine(f"uploading {what}", always=True) as step:
            progress = terminal.byte_counter(step, sum(sizes[name] for name in names))
            for name in names:
                bucket.upload(f"{folder}/{name}" if name else folder, files[name], progress)
    return names


def read_whole(bucket: Bucket, name: str) -> bytes | None:
    """Return an object of any size, None if there is none: the time limit of `Bucket.read` is that of a small record."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "object")
        return target.read_bytes() if bucket.download(name, target) else None
