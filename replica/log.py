"""A replica's log: JSON lines in a file that followers read as it grows, the journal, and an archive in the bucket."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from replica.bucket import Bucket
from replica.lines import Line

ARCHIVE_SECONDS = 30.0
_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


class Log:
    """`<directory>/<job>.jsonl`, appended to from more than one thread; `newest` beside it links to it."""

    def __init__(self, directory: Path, job_id: str, replica: str) -> None:
        """Open the log, or go on with the one that a former life of this replica left."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{job_id}.jsonl"
        self._replica = replica
        self._lock = threading.Lock()
        self._archived = -1
        self._archive_at = 0.0
        self._file = self._open()
        self.is_new = self.size() == 0
        link = directory / ".newest"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path.name)
        link.replace(directory / "newest")

    def say(self, message: str, severity: str = "INFO") -> None:
        """Write a line of the replica's own."""
        self.write([Line(time.time(), severity, line) for line in message.splitlines()])

    def write(self, lines: Iterable[Line]) -> None:
        """Write lines to the file and to the journal, at once. A full disk loses lines and stops no trainer."""
        lines = list(lines)
        records = "".join(self._json(line) for line in lines)
        journal = "".join(f"<{_PRIORITY[line.severity]}>{line.message}\n" for line in lines)
        with self._lock:
            for descriptor, text in ((self._file, records), (sys.stdout.fileno(), journal)):
                with suppress(OSError):
                    _write(descriptor, text.encode("utf-8", "replace"))

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file).st_size

    def archive(self, bucket: Bucket, name: str, at_once: bool) -> None:
        """Copy the log to the bucket where it has grown since the last time: every ARCHIVE_SECONDS, or at once."""
        begun = time.monotonic()
        if (size := self.size()) == self._archived or not (at_once or begun >= self._archive_at):
            return
        self._archive_at = begun + ARCHIVE_SECONDS  # also where the upload fails
        bucket.upload(name, self.path)
        self._archived = size
        ended = time.monotonic()
        self._archive_at = ended + max(ARCHIVE_SECONDS, 10 * (ended - begun))  # a huge log shall not fill the day

    def adopt(self, bucket: Bucket, name: str) -> None:
        """Put the archive in front of a log that is new: the host was made anew, the replica was not."""
        if not self.is_new:
            return
        former = self.path.with_name(f".{self.path.name}")
        if bucket.download(name, former):
            with self._lock:
                with former.open("ab") as whole:
                    whole.write(self.path.read_bytes())
                former.replace(self.path)
                os.close(self._file)
                self._file = self._open()
        self.is_new = False

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o664)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # a replica that was killed may have left half a line
        return descriptor

    def _json(self, line: Line) -> str:
        moment = datetime.fromtimestamp(line.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {"time": moment, "severity": line.severity, "replica": self._replica, "message": line.message}
        return json.dumps(record, ensure_ascii=False) + "\n"


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
