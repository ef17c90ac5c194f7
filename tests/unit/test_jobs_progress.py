"""Progress lines of trainers, their parsers, and the lines of the shipped trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jobs import progress
from jobs.progress import REPORT_KEY, JobProgress, ProgressFinder, TrainPoint, merge_replicas, read_report
from scaletier import loop
from scaletier.sync_period import SyncPeriod

FINAL = "Final metrics after {} steps, loss: {}, accuracy: {}"


@pytest.mark.parametrize("replica", ["master/0", "chief/0", "worker/12"])
def test_a_train_line_is_found_in_any_replica_and_text(replica: str) -> None:
    assert progress.parse_train_point(
        f"INFO:root:Train [{replica}], step 348: loss: 0.729 (1.037 sec) 9 steps/s"
    ) == TrainPoint(348, 1.037)
    assert progress.parse_train_point(progress.TRAIN_LINE.replace("master/0", replica)) == TrainPoint(348, 1.037)


@pytest.mark.parametrize(
    "line", ["", "Eval, step 9: loss: 1", "Train [master/0], step 3: loss: 1", "Train, step 3: x (1.0 sec)"]
)
def test_other_lines_are_no_train_lines(line: str) -> None:
    assert progress.parse_train_point(line) is None


def test_the_sync_period_is_parsed_from_the_last_line() -> None:
    lines = [f"Exchange every {steps} steps: 46.1 ms a step, 9.9 ms an exchange" for steps in (4, 8)]
    assert progress.parse_period(["x", *lines]) == 8
    assert progress.parse_period(["x"]) is None


def test_final_metrics_are_those_of_the_last_line_as_printed() -> None:
    lines = ["Eval, step 9: loss: 1", FINAL.format(10, "0.300", "0.800"), FINAL.format(20, "0.250", "0.810"), "end"]
    assert progress.parse_final_metrics(lines) == {"steps": "20", "loss": "0.250", "accuracy": "0.810"}
    assert progress.parse_final_metrics(["nothing of the kind"]) == {}


def test_the_shipped_trainer_s_lines_are_parsed() -> None:
    assert progress.parse_train_point(loop.train_line("worker/1", 9, 0.5, {"accuracy": 0.75}, 1.25, 10, 5)) == TrainPoint(
        9, 1.25
    )
    expected = {"steps": "9", "loss": "0.500", "accuracy": "0.750"}
    assert progress.parse_final_metrics([loop.final_line(9, 0.5, {"accuracy": 0.75})]) == expected
    line = loop.train_line("master/0", 348, 0.729, {"mean_absolute_error": 0.002}, 1.0, 200.4, 99.7)
    assert progress.parse_train_metrics(line) == progress.MetricPoint(348, {"loss": 0.729, "mean_absolute_error": 0.002}, 99.7)
    evaluated = progress.parse_eval_metrics(loop.eval_line(9, 0.5, {"top-3 accuracy": 0.75}))
    assert evaluated == progress.MetricPoint(9, {"loss": 0.5, "top-3 accuracy": 0.75})
    measured = SyncPeriod.of(None, 2, 10_000)
    for _ in range(8):
        measured.observe(8, 2.0, 1.0)
    assert progress.parse_period([measured.line]) == measured.steps


def test_small_numbers_of_the_library_are_not_read_as_zero() -> None:
    losses = {"loss": 3.25e-4, "mae": -1.5e-7, "zero": 0.0, "usual": 0.004}
    point = progress.parse_eval_metrics(loop.eval_line(9, losses["loss"], losses))
    assert point and point.values == losses
    trained = progress.parse_train_metrics(loop.train_line("master/0", 9, 0.5, {}, 1.0, 0.033, 0.033))
    assert trained and trained.rate == 0.033


def test_the_metrics_of_an_eval_line() -> None:
    expected = progress.MetricPoint(990, {"loss": 0.4, "accuracy": 0.89})
    assert progress.parse_eval_metrics("Eval, step 990: loss: 0.400, accuracy: 0.890") == expected
    assert progress.parse_eval_metrics("Final metrics after 990 steps, loss: 0.400, accuracy: 0.890") == expected
    assert progress.parse_eval_metrics("ReEval, step 3: loss: 1") is None
    assert progress.parse_eval_metrics("Eval, step x: loss: 1") is None


def test_lines_that_are_too_long_are_not_read() -> None:
    """Check the samples' lines: the time for a text of words, or of digits, may rise with the square of its length."""

    def parse_all(filler: str) -> list[object]:
        train, evaluated = f"Train [ps/0], step 3: (0.5 sec) {filler}", f"Eval, step 3: {filler}"
        final, period = f"{FINAL.format(3, 1, 2)} {filler}", f"{filler} Exchange every 8 steps"
        parsed = [
            progress.parse_train_point(train),
            progress.parse_train_metrics(train),
            progress.parse_eval_metrics(evaluated),
        ]
        of_lines = [progress.parse_final_metrics([final]), progress.parse_period([period])]
        return [*parsed, *of_lines, *map(progress.is_progress_line, (train, evaluated, final, period))]

    assert all(parse_all("a 1"))
    assert not any(parse_all("a 1" * progress.LONGEST_LINE))


@pytest.mark.parametrize("digits", [16, 25, 400])
def test_steps_above_the_limit_are_not_read(digits: int) -> None:
    def parse_all(step: int) -> list[object]:
        train, evaluated, period = (
            f"Train [ps/0], step {step}: loss: 1 (0.5 sec)",
            f"Eval, step {step}: loss: 1",
            f"Exchange every {step} steps",
        )
        final = FINAL.format(step, 1, 2)
        parsed = [progress.parse_train_point(train), progress.parse_train_metrics(train)]
        parsed += [progress.parse_eval_metrics(evaluated), progress.parse_eval_metrics(final)]
        of_lines = [progress.parse_final_metrics([final]), progress.parse_period([period])]
        return [*parsed, *of_lines, *map(progress.is_progress_line, (train, evaluated, final, period))]

    assert all(parse_all(2**53))
    assert not any(parse_all(int("9" * digits)))


def report(**keys: Any) -> str:
    return json.dumps({REPORT_KEY: keys})


def test_a_report_is_parsed_and_other_lines_are_none() -> None:
    assert read_report(report(step=3, totalSteps=9.0, loss=1, metrics={"a": 2})) == JobProgress(
        3, 9, None, None, 1.0, {"a": 2.0}
    )
    assert read_report(f'  {{ "{REPORT_KEY}" : {{"step": 0, "loss": null}}}}') == JobProgress(0)
    for line in ("", "{}", '{"progress": 0.5}', f"see {REPORT_KEY}", json.dumps({"level": "INFO", REPORT_KEY: {"step": 1}})):
        assert read_report(line) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{"{REPORT_KEY}": {{"step": 1', "it is not one line of JSON"),
        (f'{{"{REPORT_KEY}": ' + "[" * 4000, "it is not one line of JSON"),
        (f'{{"{REPORT_KEY}": {{"step": 1{"0" * 5000}}}}}', "characters. Valid: 4096 at most"),
        (report(loss=1.0), "it has no step. Valid keys: step, totalSteps, "),
        (json.dumps({REPORT_KEY: [1]}), "it has no step. Valid keys: step, "),
        (report(step=1, stpes=2), "'stpes' is unknown. Valid keys: step, "),
        (report(step=None), "step is null. Valid: a whole number from 0 to "),
        (report(step=True), "step is true. Valid: a whole number from 0"),
        (report(step=-1), "step is -1. Valid: a whole number from 0"),
        (report(step=2**60), "step is 1152921504606846976. Valid: a whole number from 0"),
        (report(step=1, etaSeconds=-1), "etaSeconds is -1. Valid: a finite number from 0"),
        (report(step=1, loss=float("nan")), "loss is NaN. Valid: a finite number"),
        (report(step=1, loss=10**400), f"loss is 1{'0' * 62}…. Valid: a finite number"),
        (report(step=1, loss="low"), 'loss is "low". Valid: a finite number'),
        (report(step=1, metrics={"a": float("inf")}), "metrics.a is Infinity. Valid: a finite number"),
        (report(step=1, metrics={"a" * 65: 1}), 'metrics is {"aaa'),
        (report(step=1, metrics={str(n): n for n in range(33)}), "names at most, each of 64 characters at most"),
    ],
)
def test_an_invalid_report_is_dropped_and_logged_once(line: str, message: str) -> None:
    with pytest.raises((ValueError, RecursionError), match=r".") as error:
        read_report(line)
    assert message in str(error.value)
    finder = ProgressFinder()
    finder.add_line(report(step=7), 0.0, "t")
    warnings = [finder.add_line(line, seconds, "t") for seconds in (1.0, 2.0)]
    assert warnings == [f"invalid progress reports are ignored: {error.value}", ""]
    assert finder.progress == JobProgress(7, time="t")


def test_omitted_keys_keep_their_values_and_rate_and_eta_are_computed() -> None:
    finder = ProgressFinder()
    finder.add_line(report(step=0, totalSteps=100, loss=2.0, metrics={"a": 1.0}), 10.0, "t0")
    assert finder.progress == JobProgress(0, 100, None, None, 2.0, {"a": 1.0}, "t0")
    finder.add_line(report(step=20, metrics={"b": 2.0}), 14.0, "t1")
    assert finder.progress == JobProgress(20, 100, 5.0, 16.0, 2.0, {"a": 1.0, "b": 2.0}, "t1")
    for step in range(21, 99):
        finder.add_line(report(step=step), step + 10.0, "t2")
    assert finder.progress.stepsPerSecond == 1.0
    finder.add_line(report(step=30), 120.0, "t3")  # after a restart from its checkpoint
    assert finder.progress == JobProgress(30, 100, None, None, 2.0, {"a": 1.0, "b": 2.0}, "t3")
    finder.add_line(report(step=31, stepsPerSecond=3, etaSeconds=0), 120.0, "t4")
    assert (finder.progress.stepsPerSecond, finder.progress.etaSeconds) == (3.0, 0.0)


def test_metrics_and_lines_are_bounded() -> None:
    finder = ProgressFinder()
    for n in range(100):
        assert finder.add_line(report(step=n, metrics={f"m{n}": n}), 0.0, "t") == ""
    assert list(finder.progress.metrics) == [f"m{n}" for n in range(68, 100)]
    before = finder.progress
    for line in (
        f"Train [master/0], step 5: {'a ' * 40_000}(1.0 sec)",
        f"Train [master/0], step {'9' * 300}: loss: 1 (1.0 sec)",
    ):
        assert finder.add_line(line, 0.0, "t") == ""
    assert finder.progress == before


def test_the_library_s_own_lines_are_reports() -> None:
    finder = ProgressFinder()
    for seconds, step in ((0.0, 1), (2.0, 201)):
        finder.add_line(loop.train_line("worker/1", step, 0.5, {"accuracy": 0.75}, 1.25, 10, 5), seconds, "t")
    assert finder.progress == JobProgress(201, None, 100.0, None, 0.5, {"accuracy": 0.75}, "t")
    finder.add_line(loop.eval_line(150, 0.25, {"accuracy": 0.875}), 3.0, "later")
    expected = replace(finder.progress, metrics={"accuracy": 0.75, "eval_loss": 0.25, "eval_accuracy": 0.875})
    assert finder.progress == expected
    finder.add_line(loop.final_line(205, 0.125, {"accuracy": 0.9}), 4.0, "later")
    assert finder.progress == replace(expected, step=205, metrics={"accuracy": 0.75, "eval_loss": 0.125, "eval_accuracy": 0.9})


def test_the_progress_of_a_job_is_its_chief_s_or_the_farthest() -> None:
    chief, worker, other = (
        JobProgress(10, None, 2.0, metrics={"a": 1.0}),
        JobProgress(90),
        JobProgress(30, metrics={"a": 9.0, "b": 2.0}),
    )
    reports = {"master-0": chief, "worker-0": worker, "worker-1": other, "ps-0": None}
    assert merge_replicas(reports, "master-0", 100, True) == JobProgress(10, 100, 2.0, 45.0, metrics={"b": 2.0, "a": 1.0})
    assert merge_replicas(reports, "master-0", 100, False) == JobProgress(10, 100, 2.0, None, metrics={"b": 2.0, "a": 1.0})
    assert merge_replicas({**reports, "master-0": None}, "master-0", 5, True) == JobProgress(
        90, 5, metrics={"a": 9.0, "b": 2.0}
    )
    assert merge_replicas({"master-0": JobProgress(5, 7, 1.0)}, "master-0", 100, True) == JobProgress(5, 7, 1.0, 2.0)
    assert merge_replicas({"master-0": None}, "master-0", 5, True) is None


@pytest.mark.parametrize(
    ("steps", "total", "rate", "eta", "expected"),
    [
        (3, 10, 3.0, None, 2.3),
        (10, 10, 3.0, None, 0.0),
        (12, 10, 3.0, None, 0.0),
        (3, 10, 3.0, 7.77, 7.8),
        (3, 10, 0.0, None, None),
        (3, 10, None, None, None),
        (3, None, 3.0, None, None),
        (3, 10, 5e-324, None, None),  # as JSON has no infinite number
    ],
)
def test_the_time_left_is_computed(
    steps: int, total: int | None, rate: float | None, eta: float | None, expected: float | None
) -> None:
    assert JobProgress(steps, total, rate, eta).with_eta() == JobProgress(steps, total, rate, expected)
    assert JobProgress(steps, None, rate, eta).with_eta(total) == JobProgress(steps, total, rate, expected)
    assert JobProgress(steps, 0, rate, eta).with_eta(total).totalSteps == 0, "the program's own number has priority"


@pytest.mark.parametrize(
    "keys",
    [
        {"step": 0},
        {"step": 2**53, "totalSteps": 2**53},
        {"step": 1, "stepsPerSecond": 0, "etaSeconds": 0, "loss": -1.5},
        {"step": 1, "metrics": {"a" * 64: -1, **{f"m{n}": n for n in range(31)}}},
    ],
)
def test_the_limits_of_a_report_are_valid(keys: dict[str, Any]) -> None:
    assert read_report(report(**keys)) == JobProgress(**keys)
    line = report(**keys)
    assert read_report(line + " " * (4096 - len(line))) == JobProgress(**keys)
    with pytest.raises(ValueError, match="it has 4097 characters"):
        read_report(line + " " * (4097 - len(line)))


@pytest.mark.parametrize(("size", "shown"), [(62, "x" * 62 + '"'), (63, "x" * 62 + "…")])
def test_a_long_value_is_shortened_in_an_error(size: int, shown: str) -> None:
    with pytest.raises(ValueError, match=r"^loss") as error:
        read_report(report(step=1, loss="x" * size))
    assert str(error.value) == f'loss is "{shown}. Valid: a finite number'


def test_most_lines_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, parsed = ProgressFinder(), list[str]()
    monkeypatch.setattr(progress, "read_report", lambda line: parsed.append(line))
    lines = ["step 3 of 9, loss: 0.5", "Exchange every 8 steps", "Train [", "Eval, step", "Final metrics", REPORT_KEY]
    assert [finder.add_line(line, 0.0, "t") for line in lines] == [""] * 6
    assert parsed[0] == "Train ["
    assert set(parsed) == set(lines[2:])


def rates(*reports: tuple[float, int]) -> list[float | None]:
    """Return the steps/s after each report at a time."""
    finder, found = ProgressFinder(), list[float | None]()
    for seconds, step in reports:
        finder.add_line(report(step=step), seconds, "t")
        found.append(finder.progress.stepsPerSecond)
    return found


def test_the_rate_is_that_of_the_last_thirty_seconds() -> None:
    assert rates((5.0, 0), (5.5, 4), (6.0, 8), (6.5, 9)) == [None, None, 8.0, 6.0]
    assert rates((5.0, 0), (105.0, 10), (106.0, 30)) == [None, 0.1, 20.0], "a single earlier report is used however old it is"
    steady = [(float(second), 2 * second) for second in range(31)]
    assert rates(*steady, (31.0, 62 + 30), (32.0, 62 + 62))[-3:] == [2.0, 3.0, 4.0]
    assert rates((0.0, 0), (10.0, 100), (20.0, 50), (21.0, 53)) == [None, 10.0, None, 3.0], "a restart is a new beginning"
    assert rates((0.0, 7), (10.0, 7)) == [None, 0.0]
    many = [(tick / 10, tick) for tick in range(290)]
    assert rates(*many)[-1] == 10.0, "reports in quick succession do not shorten the time"
    assert rates((0.0, 0), (3.0, 1))[-1] == 0.333


def test_lines_of_evaluation_come_before_and_after_those_of_training() -> None:
    finder = ProgressFinder()
    finder.add_line("Eval, step 40: loss: 0.5, accuracy: nan, rate: x", 0.0, "first")
    assert finder.progress == JobProgress(40, metrics={"eval_loss": 0.5}, time="first")
    finder.add_line("Eval, step 30: loss: 0.25", 1.0, "second")
    assert finder.progress == JobProgress(40, metrics={"eval_loss": 0.25}, time="first")
    for name, kept in (("n" * 64, True), ("n" * 65, False)):
        finder.add_line(f"Train [master/0], step 50: loss: 2, {name}: 1 (1.0 sec)", 2.0, "third")
        assert (finder.progress.step, finder.progress.loss, name in finder.progress.metrics) == (50, 2.0, kept)
    before = finder.progress
    for line in (
        f"Eval, step {2**53 + 1}: loss: 1",
        f"Train [master/0], step {2**53 + 1}: loss: 1 (1.0 sec)",
        "Exchange every 8 steps",
    ):
        assert finder.add_line(line, 3.0, "fourth") == ""
        assert finder.progress == before
    line = "Train [master/0], step 60: loss: 3 (1.0 sec)"
    finder.add_line(line + " " * (1001 - len(line)), 4.0, "fifth")
    assert finder.progress == before
    finder.add_line(line + " " * (1000 - len(line)), 4.0, "fifth")
    assert finder.progress.step == 60
    finder.add_line(f"Eval, step {2**53}: loss: 1", 5.0, "sixth")
    assert finder.progress.step == 2**53


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Train [ps/0], step 348: loss: 0.729, a b: -2e-3, x: nan, c: inf (1.037 sec) 9 global steps/s, 12.5 local steps/s",
         progress.MetricPoint(348, {"loss": 0.729, "a b": -0.002}, 12.5)),
        ("Train [worker/1], step 3: (0.5 sec)", progress.MetricPoint(3, {}, None)),
        ("Train [ps/1], step 3: … (1.0 sec) …", progress.MetricPoint(3, {})),
        (json.dumps({REPORT_KEY: {"step": 4, "metrics": {"a": 1}}}), progress.MetricPoint(4, {"a": 1.0})),
        (json.dumps({REPORT_KEY: {"step": -3}}), None),
        (json.dumps({REPORT_KEY: {"step": 4, "loss": 0.0}}), progress.MetricPoint(4, {"loss": 0.0})),
        ("Eval, step 3: loss: 1", None),
    ],
)  # fmt: skip
def test_the_metrics_of_a_train_line(line: str, expected: progress.MetricPoint | None) -> None:
    assert progress.parse_train_metrics(line) == expected


def test_progress_lines() -> None:
    kinds = [progress.TRAIN_LINE, "Eval, step 3: loss: 1", FINAL.format(1, 2, 3), "Exchange every 8 steps", report(step=1)]
    assert [progress.is_progress_line(line) for line in [*kinds, "step 3", "", "ReEval, step 3: x"]] == [True] * 5 + [False] * 3
    assert not progress.is_progress_line(f"x {report(step=1)}"), "it is not read as a report"
