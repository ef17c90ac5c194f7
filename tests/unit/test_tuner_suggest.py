"""The suggestions for trials: within bounds, on the scale, never twice, better with more results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hosts.tuner.suggest import suggest
from jobs.study import (
    Algorithm,
    Goal,
    Measurement,
    Parameter,
    ParameterType,
    PriorTrial,
    ScaleType,
    Study,
    Trial,
    TrialState,
    best,
)

RATE = Parameter("rate", ParameterType.DOUBLE, 1e-4, 1.0, scaleType=ScaleType.UNIT_LOG_SCALE)
UNITS = Parameter("units", ParameterType.INTEGER, 1, 64)
BATCH = Parameter("batch", ParameterType.DISCRETE, discreteValues=[16, 32, 64.5])
KIND = Parameter("kind", ParameterType.CATEGORICAL, categoricalValues=["adam", "sgd"])
STUDY = Study([RATE, UNITS, BATCH, KIND], maxTrials=24)


def played(study: Study, value: Callable[[dict[str, str]], float]) -> list[Trial]:
    """Return all the trials of a study, run one after another."""
    trials: list[Trial] = []
    for number in range(1, study.trials + 1):
        tried = suggest(study, trials, number)
        trials.append(Trial(number, tried, "m", state=TrialState.SUCCEEDED, finalMetric=Measurement(1, value(tried))))
    return trials


def test_each_type_has_what_it_may_have() -> None:
    for trial in played(STUDY, lambda _: 0.0):
        tried = trial.hyperparameters
        assert list(tried) == ["rate", "units", "batch", "kind"], "in the order of config.yaml"
        assert 1e-4 <= float(tried["rate"]) <= 1
        assert 1 <= int(tried["units"]) <= 64
        assert tried["batch"] in {"16", "32", "64.5"}
        assert tried["kind"] in {"adam", "sgd"}


def test_the_same_is_suggestd_for_the_same_trials_and_another_for_another_seed() -> None:
    first = played(STUDY, lambda tried: float(tried["rate"]))
    assert [t.hyperparameters for t in first] == [t.hyperparameters for t in played(STUDY, lambda tried: float(tried["rate"]))]
    assert suggest(replace(STUDY, seed=1), [], 1) != suggest(replace(STUDY, seed=2), [], 1)


@pytest.mark.parametrize(
    ("scale", "low", "high"),
    [
        (ScaleType.UNIT_LINEAR_SCALE, 0.4, 0.6),
        (ScaleType.UNIT_LOG_SCALE, 0.005, 0.02),
        (ScaleType.UNIT_REVERSE_LOG_SCALE, 0.98, 0.9955),
    ],
)
def test_a_scale_says_where_the_middle_is(scale: ScaleType, low: float, high: float) -> None:
    """Half of what is drawn lies below the middle of the scale: 0.5, 0.01, and 1 - 0.01."""
    study = Study([replace(RATE, scaleType=scale)], algorithm=Algorithm.RANDOM_SEARCH, maxTrials=1)
    drawn = sorted(float(suggest(replace(study, seed=seed), [], 1)["rate"]) for seed in range(200))
    assert low < drawn[100] < high


@settings(max_examples=10)
@given(
    st.integers(-1000, 1000),
    st.integers(1, 1000),
    st.sampled_from([ScaleType.NONE, ScaleType.UNIT_LOG_SCALE, ScaleType.UNIT_REVERSE_LOG_SCALE]),
    st.sampled_from([ParameterType.DOUBLE, ParameterType.INTEGER]),
    st.integers(0, 100),
)
def test_whatever_was_drawn_can_be_told_again(low: int, more: int, scale: ScaleType, kind: ParameterType, seed: int) -> None:
    low = low if scale is ScaleType.NONE else abs(low) + 1
    study = Study([Parameter("x", kind, low, low + more, scaleType=scale)], maxTrials=20)
    for trial in played(replace(study, maxTrials=12, seed=seed), lambda tried: float(tried["x"])):
        assert low <= float(trial.hyperparameters["x"]) <= low + more


def test_a_large_whole_number_is_passed_with_all_its_digits() -> None:
    study = Study([Parameter("x", ParameterType.INTEGER, 123456789, 123456790)])
    assert suggest(study, [], 1)["x"] in {"123456789", "123456790"}


def test_nothing_is_tried_twice_while_there_is_anything_else() -> None:
    study = Study([Parameter("x", ParameterType.INTEGER, 1, 8)], maxTrials=8)
    tried = [trial.hyperparameters["x"] for trial in played(study, lambda tried: -abs(int(tried["x"]) - 3))]
    assert sorted(tried) == [str(number) for number in range(1, 9)]
    assert len(played(replace(study, maxTrials=10), lambda _: 0.0)) == 10, "then again what was there"


def test_a_grid_has_every_point_once_in_order_and_no_more() -> None:
    study = Study([Parameter("n", ParameterType.INTEGER, 1, 2), BATCH], algorithm=Algorithm.GRID_SEARCH, maxTrials=100)
    assert study.trials == 6
    tried = [tuple(trial.hyperparameters.values()) for trial in played(study, lambda _: 0.0)]
    assert tried == [("1", "16"), ("1", "32"), ("1", "64.5"), ("2", "16"), ("2", "32"), ("2", "64.5")]
    trials = played(study, lambda _: 0.0)
    with pytest.raises(ValueError, match="every point"):
        suggest(study, trials, 7)
    rest = replace(study, earlier=[PriorTrial({"n": "1", "batch": "32"}, 0.5)])
    assert rest.trials == 5
    assert ("1", "32") not in [tuple(trial.hyperparameters.values()) for trial in played(rest, lambda _: 0.0)]


def test_a_grid_is_walked_and_not_laid_out() -> None:
    wide = Parameter("n", ParameterType.INTEGER, 1, 2**53)
    study = Study([BATCH, wide], algorithm=Algorithm.GRID_SEARCH, maxTrials=3)
    assert [trial.hyperparameters["n"] for trial in played(study, lambda _: 0.0)] == ["1", "2", "3"]


def test_a_narrow_range_has_digits_enough_to_tell_its_places_apart() -> None:
    study = Study([Parameter("x", ParameterType.DOUBLE, 0.5, 0.50000001)], maxTrials=12)
    tried = [trial.hyperparameters["x"] for trial in played(study, lambda tried: float(tried["x"]))]
    assert len(set(tried)) == 12
    assert all(0.5 <= float(x) <= 0.50000001 for x in tried)
    assert len(played(Study([Parameter("x", ParameterType.DOUBLE, -1, 1)]), lambda _: 0.0)[0].hyperparameters["x"]) <= 10


def bowl(tried: dict[str, str]) -> float:
    """Return a value that is best at rate 0.01 and 48 units with adam."""
    return (math.log10(float(tried["rate"])) + 2) ** 2 + ((int(tried["units"]) - 48) / 16) ** 2 + (tried["kind"] == "sgd")


def test_what_is_known_is_learnt_from() -> None:
    """On a bowl, the best of 24 is better than the best of 24 by chance, on average over some seeds."""

    def found(algorithm: Algorithm) -> float:
        studies = [replace(STUDY, goal=Goal.MINIMIZE, algorithm=algorithm, seed=seed) for seed in range(6)]
        ends = [best(study, played(study, bowl)) for study in studies]
        return fmean(end.finalMetric.objectiveValue for end in ends if end and end.finalMetric)

    assert found(Algorithm.ALGORITHM_UNSPECIFIED) < 0.7 * found(Algorithm.RANDOM_SEARCH)


def test_to_make_most_of_a_thing_is_to_make_least_of_its_opposite() -> None:
    least = played(replace(STUDY, goal=Goal.MINIMIZE), bowl)
    most = played(replace(STUDY, goal=Goal.MAXIMIZE), lambda tried: -bowl(tried))
    assert [trial.hyperparameters for trial in least] == [trial.hyperparameters for trial in most]


def test_what_an_earlier_job_found_is_known() -> None:
    study = replace(STUDY, goal=Goal.MINIMIZE, maxTrials=20)
    known = [PriorTrial(trial.hyperparameters, bowl(trial.hyperparameters)) for trial in played(study, bowl)]
    after = [bowl(suggest(replace(study, earlier=known, seed=seed), [], 1)) for seed in range(40)]
    before = [bowl(suggest(replace(study, seed=seed), [], 1)) for seed in range(40)]
    assert fmean(after) < 0.75 * fmean(before)


def test_trials_that_run_or_failed_do_not_stop_it() -> None:
    states = [TrialState.RUNNING, TrialState.FAILED]
    trials = [Trial(number, suggest(STUDY, [], number), "m", state=states[number % 2]) for number in range(1, 15)]
    tried = suggest(STUDY, trials, 15)
    assert tried not in [trial.hyperparameters for trial in trials]
