"""A time limit on every call of a store without one: a file system that hangs blocks no caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from jobs.store import Item, Store, StoreError

T = TypeVar("T")


class Limited:
    """A store whose calls are made in a thread of their own, one at a time.

    While a call hangs, further ones fail at once: what hangs may still take effect, which conditional writes allow for. A call
    that was given up before its turn came is never made.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._hangs = threading.Event()
        threading.Thread(target=self._work, name="store", daemon=True).start()

    def read(self, name: str) -> Item | None:
        return self._call(lambda: self._store.read(name))

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        name_list = list(names)
        return self._call(lambda: self._store.read_all(name_list))

    def scan(self, pattern: str) -> dict[str, bytes]:
        return self._call(lambda: self._store.scan(pattern))

    def create(self, name: str, content: bytes) -> str:
        return self._call(lambda: self._store.create(name, content))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self._call(lambda: self._store.replace(name, content, version))

    def _call(self, work: Callable[[], T]) -> T:
        if self._hangs.is_set():
            raise StoreError(f"an earlier call has been hanging for more than {self._seconds:g} s")
        ended: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        turn = threading.Lock()  # whoever has it decides whether the call is made

        def run() -> None:
            if not turn.acquire(blocking=False):
                return
            try:
                ended.put((work(), None))
            except Exception as error:  # noqa: BLE001  it is raised where the call was made
                ended.put((None, error))

        self._calls.put(run)
        try:
            result, error = ended.get(timeout=self._seconds)
        except queue.Empty:
            self._hangs.set()
            if not turn.acquire(blocking=False) and not ended.empty():
                self._hangs.clear()  # it ended just now, and nobody else would say so
            raise StoreError(f"no answer within {self._seconds:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None is a T where the call returns None

    def _work(self) -> None:
        while True:
            self._calls.get()()
            self._hangs.clear()
