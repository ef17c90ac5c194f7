"""Print progress lines during long loops."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from scaletier.tensorflow_setup import say

T = TypeVar("T")
_SAY_SECONDS = 2.0


def with_progress(items: Iterable[T], activity: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; every 2 s print a line such as `decoding image 1,200 of 60,000`."""
    printed = time.monotonic()
    for number, item in enumerate(items, 1):
        if time.monotonic() - printed > _SAY_SECONDS:
            printed = time.monotonic()
            say(f"{activity} {number:,}{f' of {total:,}' if total else ''}")
        yield item
