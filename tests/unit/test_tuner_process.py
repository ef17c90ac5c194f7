"""The signals by which a trial in a unit of its own is stopped."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hosts.agent.process import ProgramSpec
from hosts.tuner import process
from hosts.tuner.process import TrialUnit


class FakeLaunched:
    """A program of the launcher that ends after some waits."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.calls: list[tuple[str, float]] = []
        self.pid, self.now = 7, 0.0

    def wait(self, seconds: float) -> bool:
        self.calls.append(("wait", round(seconds, 6)))
        self.waits -= 1
        self.now += seconds
        return self.waits < 0

    def stop(self, seconds: float) -> None:
        self.calls.append(("stop", seconds))

    def signal(self, number: signal.Signals) -> None:
        self.calls.append(("signal", number))


@pytest.mark.parametrize(
    ("waits", "calls"),
    [
        (0, [("wait", 8.0), ("wait", 10.0)]),
        (1, [("wait", 8.0), ("signal", signal.SIGTERM), ("wait", 2.0)]),
        (
            3,
            [
                *(("wait", 8.0), ("signal", signal.SIGTERM), ("wait", 2.0)),
                *(("signal", signal.SIGKILL), ("wait", 0.1), ("signal", signal.SIGKILL), ("wait", 0.1)),
            ],
        ),
    ],
)
def test_the_signals_of_a_stop(monkeypatch: pytest.MonkeyPatch, waits: int, calls: list[tuple[str, float]]) -> None:
    """Its first process gets SIGTERM, then all, and at last SIGKILL until it has ended."""
    launched: Any = FakeLaunched(waits)
    with Path(os.devnull).open() as output:
        monkeypatch.setattr(sys, "stdout", output)
        unit = TrialUnit(lambda *_: launched, ProgramSpec("job01", ["true"], Path("/"), {}))  # type: ignore[arg-type]
    unit.stop(10.0)
    assert launched.calls == [("stop", 10.0), *calls]


def test_a_trial_that_no_signal_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    launched: Any = FakeLaunched(10_000)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: launched.now))
    with Path(os.devnull).open() as output:
        monkeypatch.setattr(sys, "stdout", output)
        unit = TrialUnit(lambda *_: launched, ProgramSpec("job01", ["true"], Path("/"), {}))  # type: ignore[arg-type]
    unit.stop(10.0)
    assert 70.0 < launched.now < 71.0
    assert capfd.readouterr().err.startswith("error: the program (pid 7) has not ended 60 s after SIGKILL, and is given up: ")
