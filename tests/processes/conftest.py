"""The fixtures of tests whose replicas, or other programs, are processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from replicahosts import make

from ops.plan import profile, runs
from trainer import records
from trainer.mnist import Split

__all__ = ["make"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 40 images whose first pixels encode the digit, so that a few steps can learn it."""
    directory = tmp_path_factory.mktemp("data")
    labels = bytes(number % 10 for number in range(40))
    images = b"".join(bytes([255 if pixel // 20 == label else 0 for pixel in range(784)]) for label in labels)
    for split in ("train", "test"):
        records.write_shard(directory / f"{split}-00000-of-00001.tfrecord", Split(images, labels), 0, 1)
    return directory


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let ten hours pass at once for jobs that run on this machine."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    for module in (profile, runs):
        monkeypatch.setattr(module, "time", clock)
    return lambda: ahead.append(ahead.pop() + 36_000)
