"""Suggest a trial's hyperparameters: a pure function of the other trials, by Optuna's samplers.

Cloud ML's scale types are distributions of Optuna's: UNIT_LINEAR_SCALE is uniform in x, UNIT_LOG_SCALE in log(x),
UNIT_REVERSE_LOG_SCALE in log(min + max - x).
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as State

from jobs.study import Algorithm, Goal, Parameter, ParameterType, ScaleType, Study, Trial, TrialState, format_value

# The number of seeds to try until one gives a point that no trial has used.
_SEEDS = 20
_DIGITS = 6
optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise each study logs its creation
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # multivariate, constant_liar
_STATES = {TrialState.RUNNING: State.RUNNING, TrialState.SUCCEEDED: State.COMPLETE, TrialState.FAILED: State.FAIL}


def suggest(study: Study, trials: Sequence[Trial], number: int) -> dict[str, str]:
    """Return the hyperparameters of the trial with this number, in the order of the study's parameters.

    Equal trials and seeds of the study give equal hyperparameters. ValueError if a grid search has used all points.
    `study.earlier`, the trials of the jobs that this one resumes, count as used, too.
    """
    used_points = [*(trial.hyperparameters for trial in study.earlier), *(trial.hyperparameters for trial in trials)]
    samples = [] if study.algorithm is Algorithm.GRID_SEARCH else _samples(study, trials, number)
    sample = None
    for sample in samples:
        if sample not in used_points:
            return sample
    # If few points are left, sampling may miss them.
    if unused := next((point for point in _grid(study) if point not in used_points), sample):
        return unused
    raise ValueError("every point of the grid was tried")


def _grid(study: Study) -> Iterator[dict[str, str]]:
    """Yield the points of the grid, the last parameter changing fastest; nothing if a parameter is continuous."""
    for place in range(study.grid_size or 0):
        values: dict[str, str] = {}
        for parameter in reversed(study.params):
            choices = parameter.choices or ()
            place, index = divmod(place, len(choices))
            values[parameter.parameterName] = str(choices[index])
        yield {parameter.parameterName: values[parameter.parameterName] for parameter in study.params}


def _samples(study: Study, trials: Sequence[Trial], number: int) -> Iterator[dict[str, str]]:
    direction: Literal["maximize", "minimize"] = "maximize" if study.goal is Goal.MAXIMIZE else "minimize"
    frozen_trials = _frozen_trials(study, trials)
    for attempt in range(_SEEDS):
        sampler = _sampler(study, zlib.crc32(f"{study.seed} {number} {attempt}".encode()))
        optuna_study = optuna.create_study(direction=direction, sampler=sampler)
        optuna_study.add_trials(frozen_trials)
        drawn = optuna_study.ask({each.parameterName: _distribution(each) for each in study.params}).params
        yield {each.parameterName: _to_argument(each, drawn[each.parameterName]) for each in study.params}


def _sampler(study: Study, seed: int) -> BaseSampler:
    """Return the sampler; running trials count as bad (`constant_liar`), so that parallel ones differ."""
    if study.algorithm is Algorithm.RANDOM_SEARCH:
        return RandomSampler(seed=seed)
    first = max(4, min(10, study.maxTrials // 4))
    return TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=first)


def _frozen_trials(study: Study, trials: Sequence[Trial]) -> list[FrozenTrial]:
    space = {each.parameterName: _distribution(each) for each in study.params}

    def frozen(state: State, text: Mapping[str, str], value: float | None) -> FrozenTrial:
        params = {each.parameterName: _from_argument(each, text[each.parameterName]) for each in study.params}
        return optuna.trial.create_trial(state=state, params=params, distributions=space, value=value)

    earlier = (trial for trial in study.earlier if study.allows(trial.hyperparameters))
    frozen_trials = [frozen(State.COMPLETE, trial.hyperparameters, trial.objectiveValue) for trial in earlier]
    for trial in filter(lambda trial: study.allows(trial.hyperparameters), trials):
        value = trial.finalMetric.objectiveValue if trial.finalMetric else None
        state = State.FAIL if trial.final and value is None else _STATES[trial.state]
        frozen_trials.append(frozen(state, trial.hyperparameters, value if state is State.COMPLETE else None))
    return frozen_trials


def _bounds(parameter: Parameter) -> tuple[float, float]:
    return parameter.minValue or 0.0, parameter.maxValue or 0.0


def _distribution(parameter: Parameter) -> BaseDistribution:
    """Return a parameter's distribution; for DISCRETE that of the values' indices, so that the sampler knows their order."""
    if parameter.type is ParameterType.CATEGORICAL:
        return CategoricalDistribution(parameter.categoricalValues)
    if parameter.type is ParameterType.DISCRETE:
        return IntDistribution(0, len(parameter.discreteValues) - 1)
    low, high = _bounds(parameter)
    log = parameter.scaleType in (ScaleType.UNIT_LOG_SCALE, ScaleType.UNIT_REVERSE_LOG_SCALE)
    if parameter.type is ParameterType.INTEGER:
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)


def _to_argument(parameter: Parameter, drawn: Any) -> str:
    """Return a drawn value as the argument of a trial."""
    if parameter.type is ParameterType.CATEGORICAL:
        return str(drawn)
    if parameter.type is ParameterType.DISCRETE:
        return format_value(parameter.discreteValues[drawn])
    low, high = _bounds(parameter)
    value = low + high - drawn if parameter.scaleType is ScaleType.UNIT_REVERSE_LOG_SCALE else drawn
    if parameter.type is ParameterType.INTEGER:
        return str(int(value))
    # Round to 6 significant digits of the range's width.
    digits = _DIGITS + math.ceil(math.log10(max(abs(low), abs(high)) / (high - low)))
    rounded = float(f"{value:.{min(max(digits, _DIGITS), 17)}g}")
    return format_value(rounded if low <= rounded <= high else value)


def _from_argument(parameter: Parameter, text: str) -> Any:
    """Return the drawn value for an argument of a trial."""
    if parameter.type is ParameterType.CATEGORICAL:
        return text
    if parameter.type is ParameterType.DISCRETE:
        return [format_value(value) for value in parameter.discreteValues].index(text)
    low, high = _bounds(parameter)
    value = float(text)
    drawn = low + high - value if parameter.scaleType is ScaleType.UNIT_REVERSE_LOG_SCALE else value
    return int(drawn) if parameter.type is ParameterType.INTEGER else min(max(drawn, low), high)
