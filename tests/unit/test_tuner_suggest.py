"""The suggestions for trials: within bounds, on the scale, never twice, better with more results."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hosts.tuner import suggest as module
from hosts.tuner.suggest import suggest
from jobs.study import (
    Algorithm,
    EarlierTrial,
    Goal,
    Measurement,
    Parameter,
    ParameterType,
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


def run_trials(study: Study, value: Callable[[dict[str, str]], float]) -> list[Trial]:
    """Return all the trials of a study, run one after another."""
    trials: list[Trial] = []
    for number in range(1, study.trial_count + 1):
        tried = suggest(study, trials, number)
        trials.append(Trial(number, tried, "m", state=TrialState.SUCCEEDED, finalMetric=Measurement(1, value(tried))))
    return trials


def test_each_type_has_allowed_values() -> None:
    for trial in run_trials(STUDY, lambda _: 0.0):
        tried = trial.hyperparameters
        assert list(tried) == ["rate", "units", "batch", "kind"], "in the order of config.yaml"
        assert 1e-4 <= float(tried["rate"]) <= 1
        assert 1 <= int(tried["units"]) <= 64
        assert tried["batch"] in {"16", "32", "64.5"}
        assert tried["kind"] in {"adam", "sgd"}


def test_suggestions_depend_on_trials_and_seed() -> None:
    first = run_trials(STUDY, lambda tried: float(tried["rate"]))
    assert [t.hyperparameters for t in first] == [
        t.hyperparameters for t in run_trials(STUDY, lambda tried: float(tried["rate"]))
    ]
    assert suggest(replace(STUDY, seed=1), [], 1) != suggest(replace(STUDY, seed=2), [], 1)


@pytest.mark.parametrize(
    ("scale", "low", "high"),
    [
        (ScaleType.UNIT_LINEAR_SCALE, 0.4, 0.6),
        (ScaleType.UNIT_LOG_SCALE, 0.005, 0.02),
        (ScaleType.UNIT_REVERSE_LOG_SCALE, 0.98, 0.9955),
    ],
)
def test_a_scale_determines_the_median(scale: ScaleType, low: float, high: float) -> None:
    """Half of the drawn values are below the middle of the scale: 0.5, 0.01, and 1 - 0.01."""
    study = Study([replace(RATE, scaleType=scale)], algorithm=Algorithm.RANDOM_SEARCH, maxTrials=1)
    rates = sorted(float(suggest(replace(study, seed=seed), [], 1)["rate"]) for seed in range(200))
    assert low < rates[100] < high


@settings(max_examples=10)
@given(
    st.integers(-1000, 1000),
    st.integers(1, 1000),
    st.sampled_from([ScaleType.NONE, ScaleType.UNIT_LOG_SCALE, ScaleType.UNIT_REVERSE_LOG_SCALE]),
    st.sampled_from([ParameterType.DOUBLE, ParameterType.INTEGER]),
    st.integers(0, 100),
)
def test_parameters_map_back_to_their_positions(low: int, more: int, scale: ScaleType, kind: ParameterType, seed: int) -> None:
    low = low if scale is ScaleType.NONE else abs(low) + 1
    study = Study([Parameter("x", kind, low, low + more, scaleType=scale)], maxTrials=20)
    for trial in run_trials(replace(study, maxTrials=12, seed=seed), lambda tried: float(tried["x"])):
        assert low <= float(trial.hyperparameters["x"]) <= low + more


def test_a_large_integer_keeps_all_digits() -> None:
    study = Study([Parameter("x", ParameterType.INTEGER, 123456789, 123456790)])
    assert suggest(study, [], 1)["x"] in {"123456789", "123456790"}


def test_no_point_is_repeated_before_all_are_tried() -> None:
    study = Study([Parameter("x", ParameterType.INTEGER, 1, 8)], maxTrials=8)
    tried = [trial.hyperparameters["x"] for trial in run_trials(study, lambda tried: -abs(int(tried["x"]) - 3))]
    assert sorted(tried) == [str(number) for number in range(1, 9)]
    assert len(run_trials(replace(study, maxTrials=10), lambda _: 0.0)) == 10, "then points are repeated"


def test_a_grid_has_every_point_once_in_order() -> None:
    study = Study([Parameter("n", ParameterType.INTEGER, 1, 2), BATCH], algorithm=Algorithm.GRID_SEARCH, maxTrials=100)
    assert study.trial_count == 6
    tried = [tuple(trial.hyperparameters.values()) for trial in run_trials(study, lambda _: 0.0)]
    assert tried == [("1", "16"), ("1", "32"), ("1", "64.5"), ("2", "16"), ("2", "32"), ("2", "64.5")]
    trials = run_trials(study, lambda _: 0.0)
    with pytest.raises(ValueError, match="every point"):
        suggest(study, trials, 7)
    rest = replace(study, earlier=[EarlierTrial({"n": "1", "batch": "32"}, 0.5)])
    assert rest.trial_count == 5
    assert ("1", "32") not in [tuple(trial.hyperparameters.values()) for trial in run_trials(rest, lambda _: 0.0)]


def test_a_grid_is_enumerated_lazily() -> None:
    wide = Parameter("n", ParameterType.INTEGER, 1, 2**53)
    study = Study([BATCH, wide], algorithm=Algorithm.GRID_SEARCH, maxTrials=3)
    assert [trial.hyperparameters["n"] for trial in run_trials(study, lambda _: 0.0)] == ["1", "2", "3"]


def test_a_narrow_range_has_enough_digits() -> None:
    study = Study([Parameter("x", ParameterType.DOUBLE, 0.5, 0.50000001)], maxTrials=12)
    tried = [trial.hyperparameters["x"] for trial in run_trials(study, lambda tried: float(tried["x"]))]
    assert len(set(tried)) == 12
    assert all(0.5 <= float(x) <= 0.50000001 for x in tried)
    assert len(run_trials(Study([Parameter("x", ParameterType.DOUBLE, -1, 1)]), lambda _: 0.0)[0].hyperparameters["x"]) <= 10


def test_a_range_with_few_values_is_repeated() -> None:
    study = Study([Parameter("x", ParameterType.DOUBLE, 1, math.nextafter(1, 2))], maxTrials=8)
    assert {trial.hyperparameters["x"] for trial in run_trials(study, lambda _: 0.0)} <= {"1", "1.0000000000000002"}


@pytest.mark.parametrize(
    ("parameter", "distribution", "values"),
    [
        (KIND, CategoricalDistribution(["adam", "sgd"]), {"adam": "adam"}),
        (BATCH, IntDistribution(0, 2), {0: "16", 2: "64.5"}),
        (Parameter("x", ParameterType.INTEGER, 0, 9), IntDistribution(0, 9), {0: "0", 9: "9"}),
        (Parameter("x", ParameterType.INTEGER, -9, 0), IntDistribution(-9, 0), {-9: "-9", 0: "0"}),
        (
            replace(UNITS, minValue=10, scaleType=ScaleType.UNIT_REVERSE_LOG_SCALE),
            IntDistribution(10, 64, log=True),
            {10: "64", 11: "63", 64: "10"},
        ),
        (Parameter("x", ParameterType.DOUBLE, 0, 1), FloatDistribution(0, 1), {0.0: "0", 0.25: "0.25"}),
        (Parameter("x", ParameterType.DOUBLE, -1, 0), FloatDistribution(-1, 0), {-1.0: "-1", -0.125: "-0.125"}),
        (Parameter("x", ParameterType.DOUBLE, 100, 101), FloatDistribution(100, 101), {100.12345625: "100.123456"}),
        (RATE, FloatDistribution(1e-4, 1, log=True), {1e-4: "0.0001", 1.0: "1"}),
        (
            replace(RATE, minValue=0.5, maxValue=2, scaleType=ScaleType.UNIT_REVERSE_LOG_SCALE),
            FloatDistribution(0.5, 2, log=True),
            {0.5: "2", 0.75: "1.75", 2.0: "0.5"},
        ),
    ],
)
def test_the_distribution_of_a_parameter(parameter: Parameter, distribution: BaseDistribution, values: dict[Any, str]) -> None:
    """A trial gets a drawn value as text, and the text gives the drawn value."""
    assert module._distribution(parameter) == distribution
    assert {drawn: module._to_argument(parameter, drawn) for drawn in values} == values
    drawn_values = [module._from_argument(parameter, text) for text in values.values()]
    assert drawn_values == pytest.approx(list(values), abs=1e-6) if parameter is not KIND else ["adam"]


def test_the_sampler_is_told_all_trials() -> None:
    study = Study([UNITS], earlier=[EarlierTrial({"units": "5"}, 0.5), EarlierTrial({"units": "99"}, 0.5)])
    trials = [
        Trial(1, {"units": "1"}, "m", finalMetric=Measurement(1, 0.1)),
        Trial(2, {"units": "2"}, "m", state=TrialState.SUCCEEDED, finalMetric=Measurement(1, 0.2)),
        Trial(3, {"units": "3"}, "m", state=TrialState.SUCCEEDED),
        Trial(4, {"units": "4"}, "m", state=TrialState.FAILED, finalMetric=Measurement(1, 0.4)),
        Trial(5, {"units": "far"}, "m", state=TrialState.SUCCEEDED, finalMetric=Measurement(1, 0.5)),
    ]
    known = [(trial.params["units"], trial.state.name, trial.value) for trial in module._frozen_trials(study, trials)]
    assert known == [(5, "COMPLETE", 0.5), (1, "RUNNING", None), (2, "COMPLETE", 0.2), (3, "FAIL", None), (4, "FAIL", None)]


def test_the_sampler_of_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel trials differ, as running ones count as bad, and the first trials of a study are random."""
    monkeypatch.setattr(module, "TPESampler", lambda **options: options)
    monkeypatch.setattr(module, "RandomSampler", lambda **options: options)
    for most, first in ((1, 4), (24, 6), (99, 10)):
        expected = {"seed": 7, "multivariate": True, "constant_liar": True, "n_startup_trials": first}
        assert module._sampler(replace(STUDY, maxTrials=most), 7) == expected
    assert module._sampler(replace(STUDY, algorithm=Algorithm.RANDOM_SEARCH), 7) == {"seed": 7}


def test_suggestions_print_nothing() -> None:
    """Optuna warns of its experimental options and logs each study, by default: run it in a process that imports it anew."""
    script = (
        "from hosts.tuner.suggest import suggest; from jobs.study import Parameter, ParameterType, Study;"
        "print(list(suggest(Study([Parameter('x', ParameterType.INTEGER, 1, 9)]), [], 1)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("['x']\n", "")


def bowl(tried: dict[str, str]) -> float:
    """Return a value that is best at rate 0.01 and 48 units with adam."""
    return (math.log10(float(tried["rate"])) + 2) ** 2 + ((int(tried["units"]) - 48) / 16) ** 2 + (tried["kind"] == "sgd")


def test_known_results_improve_suggestions() -> None:
    """On a bowl, the best of 24 is better than the best of 24 by chance, on average over some seeds."""

    def mean_best(algorithm: Algorithm) -> float:
        studies = [replace(STUDY, goal=Goal.MINIMIZE, algorithm=algorithm, seed=seed) for seed in range(6)]
        ends = [best(study, run_trials(study, bowl)) for study in studies]
        return fmean(end.finalMetric.objectiveValue for end in ends if end and end.finalMetric)

    assert mean_best(Algorithm.ALGORITHM_UNSPECIFIED) < 0.7 * mean_best(Algorithm.RANDOM_SEARCH)


def test_maximizing_equals_minimizing_the_negative() -> None:
    minimized = run_trials(replace(STUDY, goal=Goal.MINIMIZE), bowl)
    maximized = run_trials(replace(STUDY, goal=Goal.MAXIMIZE), lambda tried: -bowl(tried))
    assert [trial.hyperparameters for trial in minimized] == [trial.hyperparameters for trial in maximized]
