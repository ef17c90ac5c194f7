"""The lines by which a trainer tells how far it is, and that the shipped one writes just those."""

from __future__ import annotations

import pytest

from ops.logs import progress
from ops.logs.progress import Mark
from scaletier import lines, period

FINAL = "Final metrics after {} steps, loss: {}, accuracy: {}"


@pytest.mark.parametrize("replica", ["master/0", "chief/0", "worker/12"])
def test_a_train_line_is_found_whoever_prints_it_and_whatever_stands_around_it(replica: str) -> None:
    assert progress.mark(f"INFO:root:Train [{replica}], step 348: loss: 0.729 (1.037 sec) 9 steps/s") == Mark(348, 1.037)
    assert progress.mark(progress.TRAIN_LINE.replace("master/0", replica)) == Mark(348, 1.037)


@pytest.mark.parametrize(
    "line", ["", "Eval, step 9: loss: 1", "Train [master/0], step 3: loss: 1", "Train, step 3: x (1.0 sec)"]
)
def test_what_is_no_train_line(line: str) -> None:
    assert progress.mark(line) is None


def test_the_period_is_what_the_trainer_says() -> None:
    told = [f"Exchange every {steps} steps: 46.1 ms a step, 9.9 ms an exchange" for steps in (4, 8)]
    assert progress.period(["x", *told]) == 8
    assert progress.period(["x"]) is None


def test_final_metrics_are_those_of_the_last_line_as_printed() -> None:
    said = ["Eval, step 9: loss: 1", FINAL.format(10, "0.300", "0.800"), FINAL.format(20, "0.250", "0.810"), "end"]
    assert progress.final_metrics(said) == {"steps": "20", "loss": "0.250", "accuracy": "0.810"}
    assert progress.final_metrics(["nothing of the kind"]) == {}


def test_the_shipped_trainer_says_so() -> None:
    assert progress.mark(lines.train_line("worker/1", 9, 0.5, {"accuracy": 0.75}, 1.25, 10, 5)) == Mark(9, 1.25)
    told = {"steps": "9", "loss": "0.500", "accuracy": "0.750"}
    assert progress.final_metrics([lines.final_line(9, 0.5, {"accuracy": 0.75})]) == told
    line = lines.train_line("master/0", 348, 0.729, {"mean_absolute_error": 0.002}, 1.0, 200.4, 99.7)
    assert progress.trained(line) == progress.Told(348, {"loss": 0.729, "mean_absolute_error": 0.002}, 99.7)
    evaluated = progress.evaluated(lines.eval_line(9, 0.5, {"top-3 accuracy": 0.75}))
    assert evaluated == progress.Told(9, {"loss": 0.5, "top-3 accuracy": 0.75})
    measured = period.Period.of(None, 2, 10_000)
    for _ in range(8):
        measured.observe(8, 2.0, 1.0)
    assert progress.period([measured.told]) == measured.steps


def test_what_a_train_line_tells_besides() -> None:
    line = (
        "Train [master/0], step 348: loss: 0.729, mean error: 2e-3, x: nan (1.037 sec) 200.4 global steps/s, 99.7 local steps/s"
    )
    assert progress.trained(line) == progress.Told(348, {"loss": 0.729, "mean error": 0.002}, 99.7)
    assert progress.trained("Train [worker/1], step 3: (0.5 sec)") == progress.Told(3, {}, None)
    assert progress.trained("Eval, step 990: loss: 0.400") is None


def test_what_an_eval_line_tells() -> None:
    told = progress.Told(990, {"loss": 0.4, "accuracy": 0.89})
    assert progress.evaluated("Eval, step 990: loss: 0.400, accuracy: 0.890") == told
    assert progress.evaluated("Final metrics after 990 steps, loss: 0.400, accuracy: 0.890") == told
    assert progress.evaluated("ReEval, step 3: loss: 1") is None
    assert progress.evaluated("Eval, step x: loss: 1") is None
