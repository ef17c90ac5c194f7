"""The work of the tiny trainer: passing the time."""

import time
from collections.abc import Iterator
from pathlib import Path


def steps(seconds: float, pause: float, enough: Path | None = None) -> Iterator[int]:
    """Yield 1, 2, … until the time is over or the file `enough` exists."""
    began, step = time.monotonic(), 0
    while step == 0 or (time.monotonic() - began < seconds and not (enough and enough.exists())):
        step += 1
        yield step
        time.sleep(pause)


def fail(name: str) -> None:
    raise RuntimeError(f"{name} was told to raise")


def eat() -> None:
    held = []
    while True:
        held.append(b"x" * 2**24)
