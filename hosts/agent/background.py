"""Work in a thread of its own, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from jobs.background import Background

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Polled work: `result` is that of the function, or of `failed` with the reason in one line.

    The function has failed too if it has not returned after `seconds`; a later result is dropped.
    """

    def __init__(self, work: Callable[[], T], seconds: float, failed: Callable[[str], T]) -> None:
        self._background, self._failed, self._seconds = Background(work), failed, seconds
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
