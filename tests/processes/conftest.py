"""The fixtures of tests whose replicas, or other programs, are processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from replicahosts import make

from ops.plan import profile, runs

__all__ = ["make"]


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let ten hours pass at once for jobs that run on this machine."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    for module in (profile, runs):
        monkeypatch.setattr(module, "time", clock)
    return lambda: ahead.append(ahead.pop() + 36_000)
