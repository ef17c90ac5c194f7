"""Wait for conditions, with limits that follow the speed of this machine.

A test never states how fast a machine is: it waits for a condition, and gives up after a limit that is far beyond what
the condition needs. `calibrate()` measures once how much slower than a usual machine this one is now, other load
included; every limit is multiplied by that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

VARIABLE = "SCALETIER_TEST_SCALE"
"""The environment variable by which the processes of one run share one calibration."""
_USUAL_SECONDS = 0.25  # of the loop below, on an idle core of a usual machine
_LEAST, _MOST = 1.0, 20.0
_POLL_SECONDS = 0.05
Value = TypeVar("Value")


def calibrate() -> float:
    """Measure how much slower than a usual machine this one is now, 1.0 at least."""
    start = time.perf_counter()
    value = b""
    for _ in range(400_000):
        value = hashlib.sha1(value, usedforsecurity=False).digest()
    return min(max((time.perf_counter() - start) / _USUAL_SECONDS, _LEAST), _MOST)


@functools.cache
def scale() -> float:
    """Return the calibration of this run: the environment's, or one measured now and put there for child processes."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{calibrate():.2f}"
    return float(os.environ[VARIABLE])


def limit(seconds: float = 120) -> float:
    """Return the seconds after which a test gives up, for a condition that takes far fewer on a typical machine."""
    return seconds * scale()


def wait_for(condition: Callable[[], Value | None], what: str, seconds: float = 120, poll: float = _POLL_SECONDS) -> Value:
    """Wait until `condition` returns neither None nor False, and return that.

    Args:
        condition: is called again and again.
        what: a description of the condition, for the message.
        seconds: the limit on a typical machine.
        poll: seconds between two calls.

    Raises:
        AssertionError: the limit has passed; the condition is checked once more after it.
    """
    deadline = time.monotonic() + limit(seconds)
    while True:
        is_late = time.monotonic() > deadline
        value = condition()
        if value is not None and value is not False:
            return value
        if is_late:
            raise AssertionError(f"waited {limit(seconds):.0f} s in vain for: {what}")
        time.sleep(poll)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; the traceback shows which."""
    wait_for(condition, "the condition", poll=0.02)
