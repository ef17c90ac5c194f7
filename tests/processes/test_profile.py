"""Check a job as one process of this machine: its lines, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from replicahosts import is_alive
from waiting import limit, wait_for

from jobs import progress
from jobs.progress import TrainPoint
from ops.errors import OpsError, UsageError
from ops.plan import profile


def run_profile(tmp_path: Path, code: str, seconds: float = 0.0) -> list[str]:
    (tmp_path / "mine.py").write_text(code)
    return profile.profile_job(["mine", "--a", "b c"], dict(os.environ), tmp_path, seconds or limit())


PRINTS_SIX_LINES = (
    "import sys, time\nfor n in range(6):\n    print(f'Train [master/0], step {n}: x ({n}.0 sec) y', flush=True)\n"
)


def test_a_running_job_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leap: Callable[[], None]
) -> None:
    mark = progress.parse_train_point

    def leap_at_the_last(line: str) -> TrainPoint | None:
        if "step 5:" in line:
            leap()
        return mark(line)

    monkeypatch.setattr(progress, "parse_train_point", leap_at_the_last)
    code = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '6000'])\nprint(child.pid)\n"
        + PRINTS_SIX_LINES
        + "time.sleep(6000)\n"
    )
    lines = run_profile(tmp_path, code)
    assert len(profile.train_points(lines)) == 4
    wait_for(lambda: not is_alive(int(lines[0])), "the child's end")


def test_a_job_that_ends_by_itself_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(profile.train_points(run_profile(tmp_path, PRINTS_SIX_LINES + "print(sys.argv[1:])"))) == 4
    assert "mine as one process here 5 steps (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "seconds", "kind", "message"),
    [
        ("raise ValueError('bad shape')", 0.0, OpsError, "mine ended with 1 after .* here: ValueError: bad shape"),
        ("raise SystemExit(3)", 0.0, OpsError, "mine ended with 3 after .* here: it printed nothing"),
        (PRINTS_SIX_LINES.replace("6", "1"), 0.0, UsageError, "^mine printed 1 line of the form .*: give it more steps$"),
        (
            "import time; time.sleep(600)",
            0.5,
            UsageError,
            "mine printed 0 lines of the form .*, 4 are needed in .*: give --seconds more",
        ),
        (PRINTS_SIX_LINES.replace("6", "2"), 0.0, UsageError, "mine printed 2 lines .*: give it more steps"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float, kind: type[OpsError], message: str
) -> None:
    if "0 lines" in message:
        monkeypatch.setattr(profile, "_START_SECONDS", 0.0)
    with pytest.raises(OpsError, match=message) as error:
        run_profile(tmp_path, code, seconds)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_checkpoint_asks_for_parameters_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace TensorFlow with a module that fails to read the checkpoint."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('it is no table')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"left no checkpoint below its --job-dir .*: give --parameters-mb"):
        profile.parameter_bytes(tmp_path)
    (tmp_path / "model-1.index").write_bytes(b"x")
    with pytest.raises(OpsError, match=r"the trainer's checkpoint cannot be read \(it is no table\): give --parameters-mb"):
        profile.parameter_bytes(tmp_path)


def test_parameters_are_counted_in_the_newest_checkpoint_that_is_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace TensorFlow with a module that ends the count and says which checkpoint was read."""
    (tmp_path / "tensorflow.py").write_text(
        "import sys\nprint(40)\nraise SystemExit(sys.argv[1] if 'bad' in sys.argv[1] else 0)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for place, name in enumerate(("model-2", "bad-1", "export/variables/variables")):
        file = tmp_path / f"{name}.index"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (1000 + place, 1000 + place))
    (tmp_path / "export/saved_model.pb").touch()
    with pytest.raises(OpsError, match=rf"cannot be read \({tmp_path}/bad-1\)"):
        profile.parameter_bytes(tmp_path)
    os.utime(tmp_path / "model-2.index", (1003, 1003))
    assert profile.parameter_bytes(tmp_path) == 40


def test_a_job_runs_in_the_python_that_has_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this Python, else the hosts'; if neither has TensorFlow, print an error."""
    monkeypatch.setattr(profile, "find_spec", lambda _: None)
    monkeypatch.setattr(profile, "HOST_RUNTIMES", tmp_path)
    python = tmp_path / "runtime-0a1b2c3d4e5f" / "bin" / "python"
    with pytest.raises(UsageError, match="there is no TensorFlow here to run the job with: run make tensorflow"):
        run_profile(tmp_path, PRINTS_SIX_LINES)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexport WHOSE=hosts\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert "hosts" in run_profile(tmp_path, f"import os\nprint(os.environ['WHOSE'])\n{PRINTS_SIX_LINES}")
