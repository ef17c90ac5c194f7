"""Run work in a daemon thread, so it does not stop the process from exiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Run a function in a thread, from now on; `join` returns its result or raises its error.

    The thread calls `ended` once `running` is False.
    """

    def __init__(self, work: Callable[[], T], ended: Callable[[], None] = lambda: None) -> None:
        self._ended = ended
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
        return result  # type: ignore[return-value]  # if the result is None, then None is a T

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._outcome.put((work(), None))
        except Exception as error:  # noqa: BLE001  join raises it
            self._outcome.put((None, error))
        self.running = False
        self._ended()


class BackgroundTask(Generic[T]):
    """Polled work: `result` is that of the function, or of `failed` with the reason in one line.

    The function has failed too if it has not returned after `seconds`; a later result is dropped. `ended` is called in a thread
    once the function has returned or failed.
    """

    def __init__(
        self, work: Callable[[], T], seconds: float, failed: Callable[[str], T], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._background, self._failed, self._seconds = Background(work, ended), failed, seconds
        self._give_up_at = time.monotonic() + seconds
        self._result: T | None = None

    @property
    def result(self) -> T | None:
        """The result; None until it is known. It is for one thread."""
        if self._result is not None:
            return self._result
        if not self._background.running:
            try:
                self._result = self._background.join(0)
            except Exception as error:  # noqa: BLE001  whatever it is, the job has ended all the same
                self._result = self._failed(reason_of(error))
        elif time.monotonic() > self._give_up_at:
            self._result = self._failed(f"it took longer than {self._seconds:g} s")
        return self._result


def reason_of(error: Exception) -> str:
    """Return an error's message, without the number of a system's error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
