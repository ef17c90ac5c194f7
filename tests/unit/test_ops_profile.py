"""Check a job as one process of this machine: what is read from its lines, and how long it may take."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.progress import TrainPoint
from ops.errors import OpsError
from ops.plan import profile

LINE = "Train [master/0], step {}: loss: 2.797, accuracy: 0.110 ({:.3f} sec) 1.6 global steps/s, 1.6 local steps/s"


def make_log(*points: tuple[int, float]) -> list[str]:
    return ["other output", *(LINE.format(step, seconds) for step, seconds in points), "Eval, step 9: loss: 1, accuracy: 0"]


@pytest.mark.parametrize("replica", ["master/0", "chief/0", "worker/12"])
def test_the_warm_up_does_not_count(replica: str) -> None:
    lines = make_log((4, 2.5), (20, 3.5), (40, 4.5), (60, 5.5))
    assert profile.train_points(line.replace("master/0", replica) for line in lines) == [
        TrainPoint(40, 4.5),
        TrainPoint(60, 5.5),
    ]
    assert profile.train_points(make_log((4, 2.5), (20, 3.5))) == []


def test_only_the_last_start_counts() -> None:
    lines = make_log((4, 2.5), (20, 3.5), (40, 4.5), (30, 1.0), (50, 2.0), (70, 3.0), (90, 4.0))
    assert profile.train_points(lines) == [TrainPoint(70, 3.0), TrainPoint(90, 4.0)]


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
    stuck = [TrainPoint(1, 1.0), TrainPoint(1, 2.0)]
    assert profile.step_seconds(stuck) is profile.mean_rate(stuck) is None, "it came no further"
    for too_few in ([], [TrainPoint(1, 1.0)], [TrainPoint(1, 1.0), TrainPoint(1, 1.0)]):
        assert profile.step_seconds(too_few) is None
        assert profile.mean_rate(too_few) is None


def test_lines_in_quick_succession_are_measured_by_those_apart() -> None:
    """Check a line per step at 700 steps/s, whose seconds are printed to thousandths."""
    points = [TrainPoint(step, round(step / 700, 3)) for step in range(1000)]
    seconds = profile.step_seconds(points)
    assert seconds is not None
    assert 1 / seconds == pytest.approx(700, rel=0.02)
    assert profile.step_seconds(points[:60]) is None, "they cover too little time"


def test_a_checkpoint_that_takes_too_long_to_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    (tmp_path / "model-1.index").touch()
    monkeypatch.setattr(profile, "tensorflow_python", lambda: "python")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OpsError, match=r"^the trainer's checkpoint was not read in 2 min 0 s: give --parameters-mb$"):
        profile.parameter_bytes(tmp_path)


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
