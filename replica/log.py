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

from jobs.store import Files
from replica.lines import Line

_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


class Log:
    """`<directory>/<job>.jsonl`, appended to from more than one thread; `newest` beside it links to it."""

    def __init__(self, directory: Path, job_id: str, replica: str) -> None:
        """Open the log, or go on with the one that a former life of this replica left."""
        directory.mkdir(parents=True, exist_ok=True)
        self.job_id = job_id
        self.path = directory / f"{job_id}.jsonl"
        self._replica = replica
        self._lock = threading.Lock()
        self._archived = -1
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

    def archive(self, store: Files, name: str) -> None:
        """Copy the log to the bucket where it has grown since the last time; StoreError where the bucket fails."""
        if (size := self.size()) != self._archived:
            store.upload(name, self.path)
            self._archived = size

    def adopt(self, store: Files, name: str) -> None:
        """Put the archive in front of a log that is new: the host was made anew, the replica was not."""
        if not self.is_new:
            return
        former = self.path.with_name(f".{self.path.name}")
        if store.download(name, former):
            with self._lock:
                with former.open("ab") as whole:
                    whole.write(self.path.read_bytes())
                former.replace(self.path)
                os.close(self._file)
                self._file = self._open()
        self.is_new = False

    def close(self) -> None:
        """No line is written any more."""
        with self._lock:
            os.close(self._file)
            self._file = -1

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
