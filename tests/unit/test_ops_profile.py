"""Check a job as one process of this machine: what is read from its lines, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import limit, wait_for

from jobs import progress
from jobs.progress import TrainPoint
from ops.errors import OpsError, UsageError
from ops.plan import processes, profile

LINE = "Train [master/0], step {}: loss: 2.797, accuracy: 0.110 ({:.3f} sec) 1.6 global steps/s, 1.6 local steps/s"


def make_log(*points: tuple[int, float]) -> list[str]:
    return ["other output", *(LINE.format(step, seconds) for step, seconds in points), "Eval, step 9: loss: 1, accuracy: 0"]


@pytest.mark.parametrize("replica", ["master/0", "chief/0", "worker/12"])
def test_the_warm_up_does_not_count(replica: str) -> None:
    lines = make_log((4, 2.5), (20, 3.5), (40, 4.5), (60, 5.5))
    assert profile.marks(line.replace("master/0", replica) for line in lines) == [TrainPoint(40, 4.5), TrainPoint(60, 5.5)]
    assert profile.marks(make_log((4, 2.5), (20, 3.5))) == []


def test_only_the_last_start_counts() -> None:
    lines = make_log((4, 2.5), (20, 3.5), (40, 4.5), (30, 1.0), (50, 2.0), (70, 3.0), (90, 4.0))
    assert profile.marks(lines) == [TrainPoint(70, 3.0), TrainPoint(90, 4.0)]


def test_step_seconds_is_a_median_and_mean_rate_includes_pauses() -> None:
    points = [
        TrainPoint(0, 0.0),
        TrainPoint(20, 1.0),
        TrainPoint(40, 2.0),
        TrainPoint(45, 3.0),
    ]  # an evaluation took most of the last second
    assert profile.step_seconds(points) == pytest.approx(0.05)
    assert profile.mean_rate(points) == pytest.approx(15)
    slow = [TrainPoint(0, 0.0), TrainPoint(1, 4.0), TrainPoint(2, 8.0)]
    assert (profile.step_seconds(slow), profile.mean_rate(slow)) == (4.0, 0.25)
    assert profile.step_seconds([TrainPoint(1, 1.0), TrainPoint(1, 2.0)]) is None, "it came no further"
    for too_few in ([], [TrainPoint(1, 1.0)], [TrainPoint(1, 1.0), TrainPoint(1, 1.0)]):
        assert profile.step_seconds(too_few) is None
        assert profile.mean_rate(too_few) is None


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
    assert len(profile.marks(lines)) == 4
    wait_for(lambda: not is_alive(int(lines[0])), "the child's end")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_seconds_count_from_the_first_line_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not count the time that the import of TensorFlow takes."""
    clock = [1000.0]

    class Slow:
        failed = None

        def lines(self, until: Callable[[], float]) -> Iterator[str]:
            yield "importing"
            clock[0] += 400
            assert until() == 1000 + profile._START_SECONDS + 30
            for step in range(4):
                yield LINE.format(step, step)
                assert until() == 1400 + 30
                clock[0] += 5

    monkeypatch.setattr(profile, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(profile, "start_processes", lambda *_: nullcontext(Slow()))
    assert len(profile.profile_job(["mine"], {}, tmp_path, 30.0)) == 5


def test_a_job_that_ends_by_itself_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(profile.marks(run_profile(tmp_path, PRINTS_SIX_LINES + "print(sys.argv[1:])"))) == 4
    assert capsys.readouterr().err.startswith("mine as one process here 5 steps (")


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
    monkeypatch.setattr(processes, "find_spec", lambda _: None)
    monkeypatch.setattr(processes, "HOSTS_PYTHONS", tmp_path)
    python = tmp_path / "runtime-0a1b2c3d4e5f" / "bin" / "python"
    with pytest.raises(UsageError, match="there is no TensorFlow here to run the job with: run make tensorflow"):
        run_profile(tmp_path, PRINTS_SIX_LINES)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexport WHOSE=hosts\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert "hosts" in run_profile(tmp_path, f"import os\nprint(os.environ['WHOSE'])\n{PRINTS_SIX_LINES}")
