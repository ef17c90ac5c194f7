"""A trial's process: ended with all that it started, and never without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Host
from replicahosts import PATIENCE, until
from waiting import limit

from hosts.tuner.process import TrialChild, TrialUnit, trial_launcher

ROOT = Path(__file__).resolve().parents[2]
# In a group of its own, as a replica starts it: what it ends is the group's.
HARNESS = """
import os, sys, time
from hosts.tuner.process import TrialChild, _others
child = TrialChild(["sh", "-c", sys.argv[1]], dict(os.environ))
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""


def harness(code: str, script: str, ready: Path | None = None) -> str:
    """Return the output of code with a trial `child`, a shell with a script that first makes `ready`."""
    ran = subprocess.run(
        [sys.executable, "-c", HARNESS + code, script, *([str(ready)] if ready else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(),
        check=True,
        start_new_session=True,
    )
    return ran.stdout


def test_a_signal_is_told_from_an_exit_code() -> None:
    assert harness("print(child.wait(30))", "exit 3") == "3\n"
    assert harness("print(child.wait(30))", "kill -9 $$") == "-9\n"
    assert harness("print(child.wait(30))", "exit 137") == "137\n"
    assert harness("print(child.wait(0.1), child.out_of_memory); child.stop(5)", "sleep 60") == "None False\n"


def test_what_it_leaves_behind_is_ended() -> None:
    told = harness("print(child.wait(30)); print(_others())", "sleep 300 & sleep 300 & exit 0")
    assert told == "0\n[]\n"


def test_a_stop_is_a_request_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    told = harness(
        f"child.stop({limit(20)}); print(_others())",
        f"trap 'echo saved; exit 0' TERM; touch {ready}; while :; do sleep 0.1; done",
        ready,
    )
    assert told == "saved\n[]\n"


def test_one_that_does_not_stop_is_made_to(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    told = harness(
        "child.stop(0.5); print(_others())", f"trap '' TERM; touch {ready}; sleep infinity & wait; sleep infinity", ready
    )
    assert told == "[]\n"


def test_it_is_of_the_group_of_who_starts_it(tmp_path: Path) -> None:
    """So a replica that kills the group of its trainer misses no trial."""
    child = TrialChild(["sh", "-c", f"ps -o pgid= -p $$ > {tmp_path}/group; sleep 0"], {"PATH": os.environ["PATH"]})
    child._process.wait(30)
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


def test_a_unit_ends_with_its_code(spawn: Callable[[str], TrialUnit], tmp_path: Path) -> None:
    assert spawn("echo told; exit 3").wait(PATIENCE) == 3
    assert (tmp_path / "printed").read_text() == "told\n"
    killed = spawn("kill -9 $$")
    assert (killed.wait(PATIENCE), killed.out_of_memory) == (-9, False)


def test_a_unit_is_asked_to_stop_first(spawn: Callable[[str], TrialUnit], tmp_path: Path) -> None:
    polite = spawn("trap 'echo saved; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: (tmp_path / "printed").read_text() == "up\n")
    assert polite.wait(0.1) is None
    polite.terminate(PATIENCE)
    assert polite.wait(PATIENCE) == 5
    assert (tmp_path / "printed").read_text().endswith("saved\n")
    rude = spawn("trap '' TERM; echo up; sleep 300")
    until(lambda: (tmp_path / "printed").read_text().endswith("saved\nup\n"))
    rude.stop(0.3)
    assert rude.wait(PATIENCE) == -9
