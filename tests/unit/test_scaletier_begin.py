"""The beginning of a job: how long the master waits for workers that still prepare."""

from __future__ import annotations

import pytest

from scaletier.replica import StepProgress


@pytest.mark.parametrize(("seconds", "waits"), [(0.5, 5.0), (30.0, 120.0)])
def test_the_master_waits_longer_on_slow_hosts(monkeypatch: pytest.MonkeyPatch, seconds: float, waits: float) -> None:
    progress, waited = StepProgress(0, 400, 1), list[float]()
    monkeypatch.setattr(progress._prepared, "wait", waited.append)
    progress.begin(True, seconds)
    assert waited == [waits]
