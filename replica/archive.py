"""A replica's log into the bucket, in a thread of its own: a log of any size delays no heartbeat."""

from __future__ import annotations

import threading
import time

from jobs.store import Files
from replica.log import Log

SECONDS = 30.0
_LAST_SECONDS = 60.0


class Archive:
    """Copies the log every SECONDS, less often where that takes long, and once more at the end."""

    def __init__(self, log: Log, store: Files, name: str) -> None:
        self._log, self._store, self._name = log, store, name
        self._ending = threading.Event()
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """True once the last line is in the bucket, or a minute has passed: the log stays on the host."""
        self._ending.set()
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + _LAST_SECONDS
        return not self._thread.is_alive() or time.monotonic() > self._give_up_at

    def _run(self) -> None:
        pause = SECONDS
        while True:
            last = self._ending.wait(pause)
            begun = time.monotonic()
            try:
                self._log.archive(self._store, self._name)
                if last:
                    return
            except OSError:
                if last and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    return
                if last:
                    time.sleep(1.0)
            pause = max(SECONDS, 10 * (time.monotonic() - begun))  # a huge log shall not fill the day
