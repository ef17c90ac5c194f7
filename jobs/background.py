"""Run work in a daemon thread, so it does not stop the process from exiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Run a function in a thread, from now on; `join` returns its result or raises its error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._outcome: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> T:
        """Return the result, or raise the work's error; each only once. TimeoutError if the work still runs."""
        try:
            result, error = self._outcome.get(timeout=max(seconds, 0))
        except queue.Empty:
            raise TimeoutError(f"it takes longer than {seconds:.0f} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # if the result is None, then None is a T

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._outcome.put((work(), None))
        except Exception as error:  # noqa: BLE001  join raises it
            self._outcome.put((None, error))
