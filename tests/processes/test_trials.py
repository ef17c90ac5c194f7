"""A trial's process: it ends together with all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcherhost import Host
from replicahosts import PATIENCE
from waiting import limit, until

from hosts.tuner import process
from hosts.tuner.process import TrialChild, TrialUnit, trial_launcher

ROOT = Path(__file__).resolve().parents[2]
# In its own process group, as a replica starts it: it ends only processes of the group.
HARNESS = """
import os, sys, time
from hosts.tuner.process import TrialChild, _other_pids
child = TrialChild(["sh", "-c", sys.argv[1]], dict(os.environ))
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""


def harness(code: str, script: str, ready: Path | None = None) -> str:
    """Return the output of code with a trial `child`, a shell with a script that first makes `ready`."""
    result = subprocess.run(
        [sys.executable, "-c", HARNESS + code, script, *([str(ready)] if ready else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(),
        check=True,
        start_new_session=True,
    )
    return result.stdout


def test_a_signal_is_distinguished_from_an_exit_code() -> None:
    assert harness(f"print(child.wait({PATIENCE}))", "exit 3") == "3\n"
    assert harness(f"print(child.wait({PATIENCE}))", "kill -9 $$") == "-9\n"
    assert harness(f"print(child.wait({PATIENCE}))", "exit 137") == "137\n"
    assert harness(f"print(child.wait(0.1), child.out_of_memory); child.stop({PATIENCE})", "sleep 60") == "None False\n"


def test_background_processes_are_ended() -> None:
    output = harness(f"print(child.wait({PATIENCE})); print(_other_pids())", "sleep 300 & sleep 300 & exit 0")
    assert output == "0\n[]\n"


def test_a_stop_sends_sigterm_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    output = harness(
        f"child.stop({limit(20)}); print(_other_pids())",
        f"trap 'echo saved; exit 0' TERM; touch {ready}; while :; do sleep 0.1; done",
        ready,
    )
    assert output == "saved\n[]\n"


def test_a_trial_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    output = harness(
        "child.stop(0.5); print(child._process.returncode, _other_pids())",
        f"trap '' TERM; touch {ready}; sleep infinity & wait; sleep infinity",
        ready,
    )
    assert output == "-9 []\n"


def test_no_process_outside_the_group_gets_a_signal() -> None:
    """The number of a process that has ended may be another's."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        process._signal(other.pid, signal.SIGKILL)
        assert other.poll() is None
        other.terminate()
        assert other.wait(limit()) == -signal.SIGTERM, "it was not killed"
    process._signal(other.pid, signal.SIGKILL)


def test_out_of_memory_is_read_from_the_kernel_s_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [4]
    monkeypatch.setattr(process, "oom_kills", lambda: kills[0])
    child = TrialChild(["true"], {"PATH": os.environ["PATH"]})
    child._process.wait(limit())
    assert child.out_of_memory is False
    kills[0] = 5
    assert child.out_of_memory is True


def test_a_trial_is_in_the_process_group_of_its_parent(tmp_path: Path) -> None:
    """Share the group, so that a kill of the replica's group also kills the trials."""
    child = TrialChild(["sh", "-c", f"ps -o pgid= -p $$ > {tmp_path}/group; sleep 0"], {"PATH": os.environ["PATH"]})
    child._process.wait(PATIENCE)
    assert int((tmp_path / "group").read_text()) == os.getpgrp()


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
