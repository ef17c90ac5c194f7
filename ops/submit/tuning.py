"""`hyperparameters:` of config.yaml, as Cloud ML had it: checked, and made the study of a job."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infra.inventory import Inventory
from infra.spec import Role
from jobs.study import METRIC_TAG, Algorithm, Goal, Parameter, ParameterType, PriorTrial, ScaleType, Study, Trial
from ops import checks
from ops.checks import Check, check_mapping
from ops.errors import UsageError
from ops.submit import arguments
from ops.terminal import plural

HYPERPARAMETERS = "hyperparameters"
"""The key of a job's trainingInput."""
MOST_TRIALS = 1000
_LARGEST = 1e300
_LARGEST_INTEGER = 2**53
_FAILED_LEAST, _FAILED_SHARE = 3, 4
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LOGS = (ScaleType.UNIT_LOG_SCALE, ScaleType.UNIT_REVERSE_LOG_SCALE)
# Google's API has a word for an unset goal, which meant MAXIMIZE.
_GOALS = (*Goal, "GOAL_TYPE_UNSPECIFIED")
# By type, the keys that define its values.
_VALUES = {
    ParameterType.DOUBLE: ("minValue", "maxValue"),
    ParameterType.INTEGER: ("minValue", "maxValue"),
    ParameterType.CATEGORICAL: ("categoricalValues",),
    ParameterType.DISCRETE: ("discreteValues",),
}


def number(value: Any, path: str) -> float:
    """Parse a number; also a string, as in Google's config files, and as YAML reads 1e-4."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UsageError(f"{path} must be a number, not {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise UsageError(f"{path} must be a number of at most {_LARGEST:g} either way, not {str(value)[:40]}")
    return value


def _numbers(value: Any, path: str) -> list[float]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{path} must be a list of numbers, such as [16, 32, 64], not {value!r}")
    numbers = [number(item, f"{path}[{place}]") for place, item in enumerate(value)]
    return _once(numbers, path)


def _words(value: Any, path: str) -> list[str]:
    texts = checks.texts(value, path)
    if any("\0" in word for word in texts):
        raise UsageError(f"{path} holds a NUL character, which no program can receive")
    if not texts:
        raise UsageError(f"{path} is empty: name the values that are to be tried")
    return _once(texts, path)


def _once(values: list[Any], path: str) -> list[Any]:
    if twice := [value for place, value in enumerate(values) if value in values[:place]]:
        raise UsageError(f"{path} has {twice[0]!r} twice: say it once")
    return values


def _name(value: Any, path: str) -> str:
    """Check a name, from which the trial's flag is made."""
    name = checks.text(value, path).removeprefix("--")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{path} {value!r} is no name of a flag: letters, digits, _ and -, such as learning-rate")
    if arguments.names_output([f"--{name}"]):
        raise UsageError(f"{path} {value!r} is where a trial's output goes, which is told to each trial: tune something else")
    return name


def _some(value: Any, path: str) -> int:
    count = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < len(str(10 * MOST_TRIALS)) else value
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_TRIALS:
        raise UsageError(f"{path} must be a whole number from 1 to {MOST_TRIALS}, not {value!r}")
    return count


_PARAMETER: Mapping[str, Check] = {
    "parameterName": _name,
    "type": checks.one_of(tuple(ParameterType)),
    "minValue": number,
    "maxValue": number,
    "categoricalValues": _words,
    "discreteValues": _numbers,
    "scaleType": checks.one_of(tuple(ScaleType)),
}


def _parameter(value: Any, path: str) -> dict[str, Any]:
    spec = check_mapping(value, _PARAMETER, path)
    for key in ("parameterName", "type"):
        if key not in spec:
            raise UsageError(f"{path}.{key} is missing: a hyperparameter has a parameterName and a type")
    kind = ParameterType(spec["type"])
    range_keys = _VALUES[kind]
    if missing := [key for key in range_keys if key not in spec]:
        raise UsageError(f"{path}.{missing[0]} is missing: one of type {kind} has {' and '.join(range_keys)}")
    if other := [key for keys in _VALUES.values() for key in keys if key in spec and key not in range_keys]:
        raise UsageError(f"{path}.{other[0]} goes with another type: one of type {kind} has {' and '.join(range_keys)}")
    if "minValue" in spec:
        _check_range(spec, kind, path)
    elif kind is ParameterType.CATEGORICAL and spec.get("scaleType", ScaleType.NONE) != ScaleType.NONE:
        raise UsageError(f"{path}.scaleType is {spec['scaleType']}, and words have no scale: take it out")
    return spec


def _check_range(given: Mapping[str, Any], kind: ParameterType, path: str) -> None:
    low, high, scale = given["minValue"], given["maxValue"], given.get("scaleType")
    if kind is ParameterType.INTEGER and (broken := [each for each in (low, high) if not float(each).is_integer()]):
        raise UsageError(f"{path} is of type INTEGER, and {broken[0]} is no whole number; DOUBLE has such")
    if kind is ParameterType.INTEGER and max(abs(low), abs(high)) > _LARGEST_INTEGER:
        raise UsageError(f"{path} has a number above {_LARGEST_INTEGER}, which no trial could be told exactly: scale it")
    if low >= high:
        raise UsageError(f"{path}.minValue {low} is not below maxValue {high}: turn them round, or take the parameter out")
    if scale in _LOGS and low <= 0:
        raise UsageError(f"{path}.minValue {low} has no logarithm, and scaleType is {scale}: take one above 0")


def _parameters(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{path} must be a list of hyperparameters, each with parameterName, type and values, not {value!r}")
    specs = [_parameter(item, f"{path}[{place}]") for place, item in enumerate(value)]
    _once([each["parameterName"].replace("_", "-") for each in specs], f"{path}: parameterName")
    return specs


def _tag(value: Any, path: str) -> str:
    tag = checks.text(value, path)
    if not tag.strip() or not tag.isprintable():
        raise UsageError(f"{path} {tag!r} is no name of a metric, such as accuracy")
    return tag


_KEYS: Mapping[str, Check] = {
    "goal": checks.one_of(_GOALS),
    "params": _parameters,
    "hyperparameterMetricTag": _tag,
    "maxTrials": _some,
    "maxParallelTrials": _some,
    "maxFailedTrials": checks.count,
    "algorithm": checks.one_of(tuple(Algorithm)),
    "enableTrialEarlyStopping": checks.truth,
    "resumePreviousJobId": checks.text,
}


def hyperparameters(value: Any, path: str) -> dict[str, Any]:
    """Check each key of `trainingInput.hyperparameters`, and that none contradicts another."""
    spec = check_mapping(value, _KEYS, path)
    if "params" not in spec:
        raise UsageError(f"{path}.params is missing: say which hyperparameters are to be tuned")
    if spec.get("algorithm") == Algorithm.GRID_SEARCH:
        for place, parameter in enumerate(spec["params"]):
            if parameter["type"] == ParameterType.DOUBLE:
                raise UsageError(
                    f"{path}.params[{place}] {parameter['parameterName']} is of type DOUBLE, of which there is no grid: "
                    "name its values as DISCRETE, or take another algorithm"
                )
    failed, trials = spec.get("maxFailedTrials", 0), spec.get("maxTrials", 1)
    if failed > trials:
        raise UsageError(f"{path}.maxFailedTrials {failed} is more than there are trials, maxTrials {trials}")
    return spec


def build_study(given: Mapping[str, Any], args: Sequence[str], job_dir: str, job_dir_flag: str | None) -> Study:
    """Build the study of a job with these checked hyperparameters, with a seed of its own.

    `job_dir` is the folder in which each trial has its own.

    Raises:
        UsageError: if trials would overwrite one another.
    """
    if arguments.names_output(args):
        raise UsageError(
            f"the arguments name an output, and each trial needs its own: leave that out, JOB_DIR is {job_dir}/1 of trial 1, "
            "and --job-dir, with a trainer whose code knows it"
        )
    goal = given.get("goal", Goal.MAXIMIZE)
    trials = given.get("maxTrials", 1)
    return Study(
        params=[
            Parameter(
                parameterName=each["parameterName"],
                type=ParameterType(each["type"]),
                minValue=each.get("minValue"),
                maxValue=each.get("maxValue"),
                categoricalValues=each.get("categoricalValues", []),
                discreteValues=each.get("discreteValues", []),
                scaleType=ScaleType(each.get("scaleType", ScaleType.NONE)),
            )
            for each in given["params"]
        ],
        goal=Goal.MAXIMIZE if goal not in list(Goal) else Goal(goal),
        hyperparameterMetricTag=given.get("hyperparameterMetricTag", METRIC_TAG),
        maxTrials=trials,
        maxParallelTrials=given.get("maxParallelTrials", 1),
        maxFailedTrials=given.get("maxFailedTrials") or min(trials, max(_FAILED_LEAST, trials // _FAILED_SHARE)),
        algorithm=Algorithm(given.get("algorithm", Algorithm.ALGORITHM_UNSPECIFIED)),
        enableTrialEarlyStopping=given.get("enableTrialEarlyStopping", False),
        resumePreviousJobId=given.get("resumePreviousJobId", ""),
        jobDir=job_dir.rstrip("/"),
        jobDirFlag=job_dir_flag or "",
        seed=random.randrange(2**31),  # noqa: S311  no secret
    )


def hosts(given: Mapping[str, Any], inventory: Inventory) -> dict[Role, int]:
    """Return the part of a cluster that runs N trials at once, one on a host: the master and workers."""
    most = min(given.get("maxParallelTrials", 1), given.get("maxTrials", 1), 1 + len(inventory.of_role(Role.WORKER)))
    return {Role.MASTER: 1, **({Role.WORKER: most - 1} if most > 1 else {})}


def fewer(given: Mapping[str, Any], inventory: Inventory) -> str:
    """Return the note for a cluster that runs fewer trials at once than requested, else an empty string."""
    limit = min(given.get("maxParallelTrials", 1), given.get("maxTrials", 1))
    there = sum(hosts(given, inventory).values())
    if limit <= there:
        return ""
    hosts_of_it = f"stack {inventory.stack} has {plural(there, 'host')} for trials"
    return f"maxParallelTrials is {limit}, and {hosts_of_it}: so many run at once"


def resumed(study: Study, before: Study | None, trials: Sequence[Trial]) -> Study:
    """Return the study with the results of the one `before` and its trials, and of earlier ones.

    Raises:
        UsageError: if the job had no study, or tuned something else.
    """
    job_id = study.resumePreviousJobId
    if before is None:
        raise UsageError(f"resumePreviousJobId {job_id} tuned no hyperparameters: take it out")
    if before.params != study.params:
        names = [{each.parameterName for each in params} for params in (before.params, study.params)]
        lacks, has = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        differs = [each.parameterName for each in study.params if each not in before.params and each.parameterName in names[0]]
        differences = [(lacks, "which lacks here"), (has, "which it did not tune"), (differs, "whose values were others")]
        what = (
            "; ".join(f"{', '.join(parameters)}, {how}" for parameters, how in differences if parameters) or "in another order"
        )
        raise UsageError(f"resumePreviousJobId {job_id} tuned other hyperparameters: {what}")
    for key in ("goal", "hyperparameterMetricTag"):
        if (then := getattr(before, key)) != getattr(study, key):
            raise UsageError(
                f"resumePreviousJobId {job_id} had {key} {then}, and this one {getattr(study, key)}: make them the same"
            )
    prior_trials = [PriorTrial(each.hyperparameters, each.finalMetric.objectiveValue) for each in trials if each.finalMetric]
    if not prior_trials:
        raise UsageError(f"resumePreviousJobId {job_id} has no trial that SUCCEEDED, of which one could learn: take it out")
    result = replace(study, earlier=[*before.earlier, *prior_trials])
    if not result.trials:
        raise UsageError(f"every point of the grid was tried by {job_id}: nothing is left to do")
    return result
