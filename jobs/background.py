"""Run work in a daemon thread, so it does not stop the process from exiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Run a function in a thread that starts at once; `join` returns its result or raises its error.

    The thread sets `running` to False at its end, and then calls `on_end`.
    """

    def __init__(self, work: Callable[[], T], on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end
        self.running = True
        self._outcome: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> T:
        """Return the result, or raise the work's error; each only once. TimeoutError if the work still runs."""
        try:
            result, error = self._outcome.get(timeout=max(seconds, 0))
        except queue.Empty:
            raise TimeoutError(f"it takes longer than {seconds:.0f} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None only if T allows it

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._outcome.put((work(), None))
        except Exception as error:  # noqa: BLE001  join raises it
            self._outcome.put((None, error))
        self.running = False
        self._on_end()


class BackgroundTask(Generic[T]):
    """Run a function in a thread; `result` is what it returned, or what `on_failure` returned for a reason in one line.

    A function that has not returned after `seconds` has failed, too; a later result is dropped. The thread calls `on_end` once
    the function has returned or raised an error.
    """

    def __init__(
        self, work: Callable[[], T], seconds: float, on_failure: Callable[[str], T], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._background, self._on_failure, self._seconds = Background(work, on_end), on_failure, seconds
        self._give_up_at = time.monotonic() + seconds
        self._result: T | None = None

    @property
    def result(self) -> T | None:
        """The result; None until it is known. Only one thread may read it."""
        if self._result is not None:
            return self._result
        if not self._background.running:
            try:
                self._result = self._background.join(0)
            except Exception as error:  # noqa: BLE001  no error may stop the caller
                self._result = self._on_failure(reason_of(error))
        elif time.monotonic() > self._give_up_at:
            self._result = self._on_failure(f"it took longer than {self._seconds:g} s")
        return self._result


def reason_of(error: Exception) -> str:
    """Return an error's message, without the errno of an OSError."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
