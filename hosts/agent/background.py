"""Work in a thread of its own, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """One call in a thread of its own, and its result: that of the function, or of `failed` with the reason in one line.

    The function has failed too if it has not returned after `seconds`; a later result is dropped.
    """

    def __init__(self, name: str, work: Callable[[], T], seconds: float, failed: Callable[[str], T]) -> None:
        self._work, self._failed, self._seconds = work, failed, seconds
        self._result: T | None = None
        self._lock = threading.Lock()
        self._give_up_at = time.monotonic() + seconds
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def result(self) -> T | None:
        """The result; None until it is known."""
        if self._result is None and time.monotonic() > self._give_up_at:
            self._end(lambda: self._failed(f"it took longer than {self._seconds:g} s"))
        return self._result

    def _run(self) -> None:
        try:
            result = self._work()
        except Exception as error:  # noqa: BLE001  whatever it is, the job has ended all the same
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self._end(lambda: self._failed(why))
        else:
            self._end(lambda: result)

    def _end(self, result: Callable[[], T]) -> None:
        with self._lock:
            if self._result is None:
                self._result = result()
