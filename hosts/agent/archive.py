"""Copy a replica's log to the bucket, chunk by chunk, in its own thread.

So a log of any size delays no heartbeat.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from hosts.agent.log import Log
from jobs.chunks import Chunk, chunks_of, cut
from jobs.store import Conflict, Files

SECONDS = 30.0
_MOST_SECONDS = 300.0
_OF_THE_LOG = 100
_LAST_SECONDS = 60.0


def archived(store: Files, folder: str) -> list[Chunk]:
    """Return the chunks of a log in the bucket. Raises StoreError."""
    return chunks_of(store.sizes(folder))


class LogArchive:
    """Copies closed chunks of the log every SECONDS, the open one more seldom, and all of it at the end.

    No chunk is written twice. The open chunk is closed every SECONDS at first, later after a hundredth of the time so far, as
    a long job would otherwise have too many chunks.
    """

    def __init__(self, log: Log, store: Files, folder: str, there: list[Chunk]) -> None:
        """Prepare to copy a log; `there` are its chunks that the bucket has already."""
        self._log, self._store, self._folder = log, store, folder
        self._there = there
        self._lives = {chunk.life for chunk in there} - {chunk.life for chunk in log.closed()}
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
            self._adopt()
        while True:
            last = self._ending.wait(SECONDS)
            now = time.monotonic()
            try:
                if last or now - rolled >= min(max(SECONDS, (now - began) / _OF_THE_LOG), _MOST_SECONDS):
                    self._log.roll()
                    rolled = now
                self._copy()
                if last:
                    return
                self._adopt()
            except Conflict:
                return  # the job was deleted
            except OSError:
                if last and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    return
                if last:
                    time.sleep(1.0)

    def _copy(self) -> None:
        """Upload what follows the chunks in the bucket, and delete from its middle what exceeds the limit."""
        behind = max(self._there, default=None)
        for chunk in self._log.closed():
            if behind is None or chunk[:2] > behind[:2]:
                if not (path := self._log.path / chunk.name).exists():
                    continue  # cut out just now
                self._store.upload(f"{self._folder}/{chunk.name}", path)
                self._there.append(chunk)
        for chunk in cut(self._there, self._log.limit):
            self._store.delete(f"{self._folder}/{chunk.name}")
            self._there.remove(chunk)

    def _adopt(self) -> None:
        """Fetch what earlier hosts of the replica have written: who reads the log here is to find it whole."""
        for chunk in [chunk for chunk in self._there if chunk.life in self._lives]:
            if not (path := self._log.path / chunk.name).exists() and self._store.download(
                f"{self._folder}/{chunk.name}", path
            ):
                self._log.adopt(chunk)
        self._lives = set()
