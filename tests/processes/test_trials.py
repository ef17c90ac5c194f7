"""A trial's unit: its exit code, and the signals of a stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcherhost import Host
from replicahosts import PATIENCE
from waiting import until

from hosts.tuner.process import TrialUnit, trial_launcher


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[str], TrialUnit]]:
    """Start trials, each a line of shell, in units of their own."""
    host = Host(tmp_path)
    (scratch := host.state / "trials/trial-0abc").mkdir()
    start = trial_launcher(host.launcher, "job01", host.package, stop_seconds=90.0)
    environment = {"PATH": os.environ["PATH"], "CLOUD_ML_HP_METRIC_FILE": str(scratch / "output.metrics")}
    with (tmp_path / "printed").open("w") as printed:

        def spawned(script: str) -> TrialUnit:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "stdout", printed)
                return start(["sh", "-c", script], environment)

        yield spawned
    host.close()
    assert f'BindPaths="{scratch}":"{scratch}"' in host.systemd_run_calls
    assert "'TimeoutStopSec=90.0'" in host.systemd_run_calls


def test_a_unit_returns_its_exit_code(spawn: Callable[[str], TrialUnit], tmp_path: Path) -> None:
    assert spawn("echo told; exit 3").wait(PATIENCE) == 3
    assert (tmp_path / "printed").read_text() == "told\n"
    killed = spawn("kill -9 $$")
    assert (killed.wait(PATIENCE), killed.out_of_memory) == (-9, False)


def test_a_unit_gets_sigterm_first(spawn: Callable[[str], TrialUnit], tmp_path: Path) -> None:
    polite = spawn("trap 'echo saved; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    assert polite.out_of_memory is False
    until(lambda: (tmp_path / "printed").read_text() == "up\n")
    assert polite.wait(0.1) is None
    polite.terminate(PATIENCE)
    assert polite.wait(PATIENCE) == 5
    assert (tmp_path / "printed").read_text().endswith("saved\n")
    rude = spawn("trap '' TERM; echo up; sleep 300")
    until(lambda: (tmp_path / "printed").read_text().endswith("saved\nup\n"))
    rude.stop(0.3)
    assert rude.wait(PATIENCE) == -9
