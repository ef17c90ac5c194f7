"""The lines that users of Cloud ML's sample know, to the character."""

from __future__ import annotations

from scaletier.lines import EvalInterval, eval_line, final_line, train_line


def test_lines() -> None:
    assert train_line("worker/0", 348, 0.7291, {"accuracy": 0.8339}, 1.0371, 200.44, 99.66) == (
        "Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s"
    )
    assert eval_line(990, 0.4, {"accuracy": 0.89}) == "Eval, step 990: loss: 0.400, accuracy: 0.890"
    assert final_line(5006, 0.228, {"accuracy": 0.9351}) == "Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935"


def test_lines_of_any_metrics_and_of_none() -> None:
    assert train_line("master/0", 1, 2.0, {}, 0.5, 1, 1).startswith("Train [master/0], step 1: loss: 2.000 (0.500 sec) ")
    assert eval_line(9, 1e9, {"mae": 1.5, "top 3": 0.1}) == "Eval, step 9: loss: 1000000000.000, mae: 1.500, top 3: 0.100"
    assert final_line(9, 0.1, {}) == "Final metrics after 9 steps, loss: 0.100"


def test_the_interval_grows_to_twenty_evaluations() -> None:
    interval = EvalInterval(1.0)
    assert not interval.due(10.0)
    assert not interval.due(10.9)
    assert interval.due(11.0)
    assert interval.record(11.0, 11.263) == "Adjusting eval interval from 1.00s to 5.26s"
    assert not interval.due(16.5)
    assert interval.due(16.6)


def test_the_interval_stays_for_a_quick_evaluation() -> None:
    interval = EvalInterval(1.0)
    assert interval.record(1.0, 1.04) is None
    assert interval.seconds == 1.0
