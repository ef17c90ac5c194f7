"""Hyperparameters and their possible values, the number of trials, and the order of their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.study import (
    Algorithm,
    EarlierTrial,
    Goal,
    Measurement,
    Parameter,
    ParameterType,
    Study,
    Trial,
    TrialState,
    best,
    flags,
    format_value,
    ranked,
    thin,
)

DOUBLE, INTEGER, CATEGORICAL, DISCRETE = ParameterType
KIND = Parameter("kind", CATEGORICAL, categoricalValues=["adam", "sgd"])
BATCH = Parameter("batch", DISCRETE, discreteValues=[16, 32, 64.5])
UNITS = Parameter("units", INTEGER, 0, 2)


@pytest.mark.parametrize(
    ("parameter", "choices", "possible", "impossible"),
    [
        (KIND, ["adam", "sgd"], ["adam", "sgd"], ["", "ada", None]),
        (BATCH, ["16", "32", "64.5"], ["16", "64.5"], ["16.0", "17", None]),
        (UNITS, range(3), ["0", "1", "2"], ["-1", "3", "1.5", "1.0", "x", "", None]),
        (Parameter("n", INTEGER, -2, 0), range(-2, 1), ["-2", "0"], ["-3", "1", None]),
        (Parameter("n", INTEGER, 5, 5), range(5, 6), ["5"], ["0", "4", "6"]),
        (Parameter("x", DOUBLE, 0, 0.75), None, ["0", "0.5", "0.75", "1e-9"], ["-0.1", "0.76", "nan", "x", None]),
        (Parameter("x", DOUBLE, -1, 0), None, ["-1", "-0.5", "0"], ["-1.1", "0.1", None]),
        (Parameter("x", DOUBLE, 3.5, 4), None, ["3.5", "4"], ["0", "3.4", "4.1"]),
    ],
)
def test_the_values_of_a_parameter(
    parameter: Parameter, choices: object, possible: list[str], impossible: list[str | None]
) -> None:
    assert parameter.choices == choices
    assert [value for value in [*possible, *impossible] if parameter.allows(value)] == possible


def test_the_number_of_trials_of_a_grid() -> None:
    grid = Study([KIND, BATCH, UNITS], maxTrials=100, algorithm=Algorithm.GRID_SEARCH)
    assert (grid.grid_size, grid.trial_count, replace(grid, maxTrials=7).trial_count) == (18, 18, 7)
    assert replace(grid, algorithm=Algorithm.RANDOM_SEARCH).trial_count == 100
    endless = replace(grid, params=[KIND, Parameter("x", DOUBLE, 0, 1)])
    assert (endless.grid_size, endless.trial_count) == (None, 100)
    tried = [
        {"kind": "sgd", "batch": "16", "units": "1"},
        {"units": "1", "batch": "16", "kind": "sgd"},
        {"kind": "sgd", "batch": "16", "units": "2"},
        {"kind": "other", "batch": "16", "units": "1"},
        {"kind": "sgd"},
    ]
    assert [grid.allows(values) for values in tried] == [True, True, True, False, False]
    assert replace(grid, earlier=[EarlierTrial(values, 0.5) for values in tried]).trial_count == 16


def trial(number: int, value: float | None = None, **keys: Any) -> Trial:
    return Trial(number, {}, "ps-0", finalMetric=None if value is None else Measurement(9, value), **keys)


def test_trials_are_ranked_by_the_goal() -> None:
    trials = [trial(4), trial(5, 0.5), trial(2, -1.0), trial(3, 0.5), trial(1), trial(6, 2.0)]
    largest, smallest = Study([], goal=Goal.MAXIMIZE), Study([], goal=Goal.MINIMIZE)
    assert [each.trialId for each in ranked(largest, trials)] == [6, 3, 5, 2, 1, 4]
    assert [each.trialId for each in ranked(smallest, trials)] == [2, 3, 5, 6, 1, 4]
    assert (best(largest, trials), best(smallest, trials)) == (trials[5], trials[2])
    assert best(largest, [trial(1)]) is best(largest, []) is None


def test_a_goal_compares_values() -> None:
    assert [goal.best([1.0, 3.0, 2.0]) for goal in Goal] == [3.0, 1.0]
    pairs = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0))
    assert [[goal.better(*pair) for pair in pairs] for goal in Goal] == [[False, True, False], [True, False, False]]


def test_the_state_of_a_trial() -> None:
    metrics = [Measurement(1, 0.5), Measurement(2, 0.25)]
    running = trial(1, startTime="2026-01-31T12:00:10Z")
    assert [replace(running, state=state).final for state in TrialState] == [False, True, True]
    assert (running.last, replace(running, allMetrics=metrics).last) == (None, metrics[1])
    assert trial(1, 0.75, allMetrics=metrics).last == Measurement(9, 0.75)
    assert (running.seconds("2026-01-31T12:01:00Z"), running.seconds("2026-01-31T12:00:00Z")) == (50.0, 0.0)
    assert replace(running, endTime="2026-01-31T12:00:15Z").seconds("2026-01-31T12:01:00Z") == 5.0


def test_a_trial_s_arguments_and_folder() -> None:
    values = [32.0, 32, 0.5, -3.0, 999_999_999_999_999.0, 1e15, 1e20]
    assert [format_value(value) for value in values] == [
        "32",
        "32",
        "0.5",
        "-3",
        "999999999999999",
        "1000000000000000.0",
        "1e+20",
    ]
    assert flags({"rate": "-1e-3", "kind": "a b"}) == ["--rate=-1e-3", "--kind=a b"]
    assert Study([], jobDir="/bucket/out").folder(12) == "/bucket/out/12"


@pytest.mark.parametrize(("count", "step"), [(0, 1), (1, 1), (200, 1), (201, 2), (400, 2), (401, 3)])
def test_measurements_are_thinned_evenly_from_the_last(count: int, step: int) -> None:
    measurements = [Measurement(number, 0.0) for number in range(count)]
    assert [each.trainingStep for each in thin(measurements)] == sorted(range(count - 1, -1, -step))
