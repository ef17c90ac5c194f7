"""Parallel work on all hosts: each returns a result or an error within a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ops.errors import HostError

T = TypeVar("T")
OnDone = Callable[[str], None]
if TYPE_CHECKING:
    _Ended = queue.SimpleQueue[tuple[str, T | None, Exception | None]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The results and errors of all hosts, in the order of the names."""

    results: dict[str, T] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)


def fan_out(names: Iterable[str], work: Callable[[str], T], seconds: float, on_done: OnDone | None = None) -> Outcome[T]:
    """Run `work` for every name, a thread each, and wait until all have ended or `seconds` have passed.

    `on_done` is called with each name whose work has ended. An interrupt ends the wait at once; threads that hang block
    nothing, since they are daemons.
    """
    all_names = list(names)
    ended: _Ended[T] = queue.SimpleQueue()
    for name in all_names:
        _start(name, work, ended)
    results: dict[str, T] = {}
    failures: dict[str, Exception] = {}
    deadline = time.monotonic() + seconds
    while len(results) + len(failures) < len(all_names):
        try:
            name, result, error = ended.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            break
        if error is None:
            results[name] = result  # type: ignore[assignment]  # it is None only if `work` returns None
        else:
            failures[name] = error
        if on_done:
            on_done(name)
    for name in all_names:
        if name not in results and name not in failures:
            failures[name] = HostError(name, f"did not finish within {seconds:.0f} s")
    return Outcome(
        {name: results[name] for name in all_names if name in results},
        {name: failures[name] for name in all_names if name in failures},
    )


def _start(name: str, work: Callable[[str], T], ended: _Ended[T]) -> None:
    def run() -> None:
        try:
            ended.put((name, work(name), None))
        except Exception as error:  # noqa: BLE001  each host's error is a result
            ended.put((name, None, error))

    threading.Thread(target=run, name=name, daemon=True).start()


def first_of(names: Iterable[str], work: Callable[[str], T], stagger: float, seconds: float) -> T:
    """Return the first result of `work`, else raise the first error.

    The work for the next name starts `stagger` seconds after the last one, or when one fails.
    """
    waiting = list(names)
    ended: _Ended[T] = queue.SimpleQueue()
    first_error: Exception | None = None
    deadline, running = time.monotonic() + seconds, 0
    while (waiting or running) and time.monotonic() < deadline:
        if waiting:
            _start(waiting.pop(0), work, ended)
            running += 1
        try:
            _, result, error = ended.get(timeout=stagger if waiting else max(deadline - time.monotonic(), 0))
        except queue.Empty:
            continue
        running -= 1
        if error is None:
            return result  # type: ignore[return-value]  # it is None only if `work` returns None
        first_error = first_error or error
    raise first_error or TimeoutError(f"nothing answers within {seconds:.0f} s")
