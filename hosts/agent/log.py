"""Write a replica's log: JSON lines in chunks on its host, where `fab logs` reads them; also to the journal and the bucket."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from hosts.agent.lines import OutputLine
from jobs.bucket import Bucket, Conflict
from jobs.chunks import CHUNK_BYTES, LIMIT, Chunk, ChunkFolder, chunks_of, chunks_to_remove

_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_PIECE = 1 << 18
_MIN_CHUNKS = 16
ARCHIVE_SECONDS = 30.0
_MOST_SECONDS = 300.0
_AGE_DIVISOR = 100
_LAST_SECONDS = 60.0


class Log:
    """The chunks in `<directory>/<job>/`, written by several threads; `newest` beside it links to it."""

    def __init__(self, directory: Path, job_id: str, replica: str, limit: int = LIMIT, archived: Iterable[Chunk] = ()) -> None:
        """Open the log, or continue that of an earlier incarnation of this replica.

        `archived` are its chunks in the bucket. The host keeps `limit` bytes of this log, and as many of all other jobs' logs.
        """
        self.job_id, self.limit = job_id, limit
        self.path = directory / job_id
        self.path.mkdir(parents=True, exist_ok=True)
        self._replica, self._chunk_bytes = replica, min(CHUNK_BYTES, max(limit // _MIN_CHUNKS, 1))
        self._lock = threading.Lock()
        self._chunks = [chunk for chunk in chunks_of(ChunkFolder(self.path).sizes()) if chunk.size]
        self._file: int | None = None
        self._open_chunk, self._lines = self._continuation(archived), 0
        self._lost_ends: list[OutputLine] = []  # the first and the last lost line
        self._lost_count, self._lost_reason = 0, ""
        _remove_old_logs(self.path, limit)
        with suppress(OSError):  # of a full disk
            link = directory / ".newest"
            link.unlink(missing_ok=True)
            link.symlink_to(self.path.name)
            link.replace(directory / "newest")

    def write_message(self, message: str, severity: str = "INFO") -> None:
        """Write a message of the agent."""
        self.write([OutputLine(time.time(), severity, line) for line in message.splitlines()])

    def write(self, lines: Iterable[OutputLine]) -> None:
        """Write lines to the chunk and the journal at once; a full disk loses lines, which is logged, and stops nothing."""
        lines = list(lines)
        journal = "".join(f"<{_PRIORITY[line.severity]}>{line.message}\n" for line in lines)
        with self._lock:
            self._append_all(lines)
            with suppress(OSError):
                _write(sys.stdout.fileno(), journal.encode("utf-8", "replace"))

    def closed(self) -> list[Chunk]:
        """Return the chunks that no longer grow, in order."""
        with self._lock:
            return list(self._chunks)

    def roll(self) -> None:
        """Close the chunk that is being written, so that it can be copied; later lines go into another."""
        with self._lock:
            self._roll()

    def add_chunk(self, chunk: Chunk) -> None:
        """Add a chunk of an earlier host, which was fetched into the folder."""
        with self._lock:
            self._chunks = sorted([*self._chunks, chunk])

    def _continuation(self, archived: Iterable[Chunk]) -> Chunk:
        """Return the next chunk: after the local chunks, or on a new host or after a power cut after the archived ones."""
        newest = max(archived, default=Chunk(0, 0, 0, 0))
        if not self._chunks:
            return Chunk(max(int(time.time()), newest.incarnation + 1), 0, 0, 0)
        *_, last_chunk = self._chunks
        if (newest.incarnation, newest.end) > (last_chunk.incarnation, last_chunk.end):
            return Chunk(newest.incarnation + 1, 0, 0, 0)  # local chunks are not fsynced, and those in the bucket are
        path = self.path / last_chunk.name
        with suppress(OSError), path.open("rb+") as file:
            lines, end = 0, b""
            while block := file.read(_PIECE):
                lines, end = lines + block.count(b"\n"), block[-1:]
            if end not in (b"", b"\n"):
                file.write(b"\n")  # an agent that was killed may have left half a line
                lines += 1
            self._chunks[-1] = last_chunk = last_chunk._replace(size=file.tell())
            return Chunk(last_chunk.incarnation, last_chunk.end, last_chunk.line + lines, 0)
        return Chunk(last_chunk.incarnation + 1, 0, 0, 0)  # as it cannot be continued

    def _append_all(self, lines: list[OutputLine]) -> None:
        try:
            if self._lost_ends:
                begin, end = (format_time(line.time) for line in self._lost_ends)
                message = f"… {self._lost_count} lines lost from {begin} to {end}: {self._lost_reason} …"
                self._append([OutputLine(time.time(), "WARNING", message)])
                self._lost_ends, self._lost_count = [], 0
        except OSError:
            self._count_lost(lines)
        else:
            self._append_or_count_lost(lines)

    def _append_or_count_lost(self, lines: list[OutputLine]) -> None:
        count = 0
        try:
            for piece in _pieces(lines):
                self._append(piece)
                count += len(piece)
        except OSError as error:
            self._lost_reason = error.strerror or str(error)
            self._count_lost(lines[count:])

    def _count_lost(self, lines: list[OutputLine]) -> None:
        if lines:
            self._lost_ends = [*self._lost_ends[:1], lines[-1]] if self._lost_ends else [lines[0], lines[-1]]
            self._lost_count += len(lines)

    def _append(self, lines: list[OutputLine]) -> None:
        """Append lines to the chunk, all of them or none; OSError."""
        content = "".join(map(self._json, lines)).encode("utf-8", "replace")
        chunk = self._open_chunk
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path / chunk.name, flags, 0o664)
        try:
            _write(self._file, content)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, chunk.size)
            raise
        self._lines += len(lines)
        self._open_chunk = chunk._replace(size=chunk.size + len(content))
        if self._open_chunk.size >= self._chunk_bytes:
            self._roll()

    def _roll(self) -> None:
        if self._file is None or not self._open_chunk.size:
            return
        chunk = self._open_chunk
        os.close(self._file)
        self._file = None
        self._chunks.append(chunk)
        self._open_chunk, self._lines = Chunk(chunk.incarnation, chunk.end, chunk.line + self._lines, 0), 0
        for removed in chunks_to_remove(self._chunks, self.limit):
            self._chunks.remove(removed)
            (self.path / removed.name).unlink(missing_ok=True)

    def _json(self, line: OutputLine) -> str:
        record = {"time": format_time(line.time), "severity": line.severity, "replica": self._replica, "message": line.message}
        return json.dumps(record, ensure_ascii=False) + "\n"


class LogArchive:
    """Copies a log to the bucket in a thread of its own, so that a log of any size delays no heartbeat.

    Closed chunks are copied every ARCHIVE_SECONDS, the open one more seldom, and all of it at the end. No chunk is written
    twice. A chunk is open for a hundredth of the time so far, but at least ARCHIVE_SECONDS and at most five minutes: a long job
    would otherwise have too many chunks.
    """

    def __init__(self, log: Log, store: Bucket, folder: str, archived_chunks: list[Chunk]) -> None:
        """Prepare to copy a log; `archived_chunks` are its chunks that the bucket has already."""
        self._log, self._store, self._folder = log, store, folder
        self._archived = archived_chunks
        self._incarnations = {chunk.incarnation for chunk in archived_chunks} - {chunk.incarnation for chunk in log.closed()}
        self._ending = threading.Event()
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """Return True once the last line is in the bucket, or a minute has passed: then it stays on the host."""
        self._ending.set()
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + _LAST_SECONDS
        return not self._thread.is_alive() or time.monotonic() > self._give_up_at

    def _run(self) -> None:
        began = rolled = time.monotonic()
        with suppress(OSError):
            self._fetch_earlier()
        while True:
            last = self._ending.wait(ARCHIVE_SECONDS)
            now = time.monotonic()
            try:
                if last or now - rolled >= min(max(ARCHIVE_SECONDS, (now - began) / _AGE_DIVISOR), _MOST_SECONDS):
                    self._log.roll()
                    rolled = now
                self._copy()
                if last:
                    return
                self._fetch_earlier()
            except Conflict:
                return  # the job was deleted
            except OSError:
                if last and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    return
                if last:
                    time.sleep(1.0)

    def _copy(self) -> None:
        """Upload the chunks that the bucket does not have yet; beyond the limit, delete chunks from the log's middle there."""
        last = max(self._archived, default=None)
        for chunk in self._log.closed():
            if last is None or chunk[:2] > last[:2]:
                if not (path := self._log.path / chunk.name).exists():
                    continue  # removed just now
                self._store.upload(f"{self._folder}/{chunk.name}", path)
                self._archived.append(chunk)
        for chunk in chunks_to_remove(self._archived, self._log.limit):
            self._store.delete(f"{self._folder}/{chunk.name}")
            self._archived.remove(chunk)

    def _fetch_earlier(self) -> None:
        """Fetch what earlier hosts of the replica have written, so that this host has the whole log."""
        for chunk in [chunk for chunk in self._archived if chunk.incarnation in self._incarnations]:
            if not (path := self._log.path / chunk.name).exists() and self._store.download(
                f"{self._folder}/{chunk.name}", path
            ):
                self._log.add_chunk(chunk)
        self._incarnations = set()


@lru_cache(64)
def format_time(time: float) -> str:
    """Format seconds since 1970 as in a log; cached, as lines that come together have one time."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _pieces(lines: list[OutputLine]) -> Iterator[list[OutputLine]]:
    """Yield groups of lines, each of about _PIECE characters, as a chunk has a limited size."""
    piece: list[OutputLine] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line.message) + 100
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _remove_old_logs(own: Path, limit: int) -> None:
    """Remove the oldest logs of other jobs, which are all in the bucket, beyond the limit."""
    with suppress(OSError):
        others = [path for path in own.parent.iterdir() if path != own and path.is_dir() and not path.is_symlink()]
        total = 0
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            total += sum(file.stat().st_size for file in path.iterdir())
            if total > limit:
                shutil.rmtree(path)


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
