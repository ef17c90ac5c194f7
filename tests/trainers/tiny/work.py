"""The work of the tiny trainer: passing the time."""

import time
from collections.abc import Iterator


def steps(seconds: float, pause: float) -> Iterator[int]:
    began, step = time.monotonic(), 0
    while step == 0 or time.monotonic() - began < seconds:
        step += 1
        yield step
        time.sleep(pause)


def fail(name: str) -> None:
    raise RuntimeError(f"{name} was told to raise")
