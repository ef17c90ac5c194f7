"""Check `hyperparameters:` of config.yaml, as Cloud ML had it, and build the study of a job from it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infra.inventory import Inventory
from infra.scale_tiers import Role
from jobs.study import Algorithm, EarlierTrial, Goal, Parameter, ParameterType, ScaleType, Study, Trial
from ops.errors import UsageError
from ops.submit import arguments
from ops.terminal import plural

HYPERPARAMETERS = "hyperparameters"
"""The key of a job's trainingInput."""
# By default one of 4 trials may fail, or 3 if that is more.
_MIN_FAILED, _TRIALS_PER_FAILED = 3, 4
# The keys that a Study has as they are given.
_COPIED_KEYS = ("hyperparameterMetricTag", "maxTrials", "maxParallelTrials", "enableTrialEarlyStopping", "resumePreviousJobId")


def check_hyperparameters(value: Any, path: str) -> dict[str, Any]:
    """Check `trainingInput.hyperparameters`."""
    from ops.config_values import validate  # imports pydantic, which is slow
    from ops.submit.schema import Hyperparameters

    return validate(Hyperparameters, value, path).given()


def build_study(options: Mapping[str, Any], args: Sequence[str], job_dir: str, job_dir_flag: str | None) -> Study:
    """Build the study of a job with these checked hyperparameters; UsageError if trials would overwrite one another.

    It has a seed of its own. `job_dir` is the folder in which each trial has its own.
    """
    if arguments.has_output_flag(args):
        raise UsageError(
            f"the arguments name an output, and each trial needs its own: remove it. Trial 1 gets JOB_DIR={job_dir}/1, and the "
            "same as --job-dir if the trainer's code knows that flag"
        )
    goal, trials = options.get("goal", Goal.MAXIMIZE), options.get("maxTrials", Study.maxTrials)
    return Study(
        params=[
            replace(each, type=ParameterType(each.type), scaleType=ScaleType(each.scaleType))  # JSON has no enums
            for each in (Parameter(**values) for values in options["params"])
        ],
        goal=Goal.MAXIMIZE if goal not in list(Goal) else Goal(goal),
        maxFailedTrials=options.get("maxFailedTrials") or min(trials, max(_MIN_FAILED, trials // _TRIALS_PER_FAILED)),
        algorithm=Algorithm(options.get("algorithm", Study.algorithm)),
        jobDir=job_dir.rstrip("/"),
        jobDirFlag=job_dir_flag or "",
        seed=random.randrange(2**31),  # noqa: S311  no secret
        **{key: options[key] for key in _COPIED_KEYS if key in options},
    )


def required_counts(options: Mapping[str, Any], inventory: Inventory) -> dict[Role, int]:
    """Return the counts of master and workers that run trials at once, one on each host."""
    most = min(options.get("maxParallelTrials", 1), options.get("maxTrials", 1), 1 + len(inventory.of_role(Role.WORKER)))
    return {Role.MASTER: 1, **({Role.WORKER: most - 1} if most > 1 else {})}


def limit_note(options: Mapping[str, Any], inventory: Inventory) -> str:
    """Return the note for a cluster that runs fewer trials at once than requested, else an empty string."""
    limit = min(options.get("maxParallelTrials", 1), options.get("maxTrials", 1))
    available = sum(required_counts(options, inventory).values())
    if limit <= available:
        return ""
    hosts = f"stack {inventory.stack} has {plural(available, 'host')} for trials"
    return f"maxParallelTrials is {limit}, and {hosts}: that many run at once"


def add_earlier_results(study: Study, original: Study | None, trials: Sequence[Trial]) -> Study:
    """Return the study with the resumed job's results: its `trials`, and the earlier ones of its study `original`.

    UsageError if the job had no study, or tuned something else.
    """
    job_id = study.resumePreviousJobId
    if original is None:
        raise UsageError(f"resumePreviousJobId {job_id} tuned no hyperparameters: take it out")
    original_params = [  # of a version that did not sort values
        replace(each, discreteValues=sorted(each.discreteValues)) if each.discreteValues else each for each in original.params
    ]
    if original_params != study.params:
        names = [{each.parameterName for each in params} for params in (original_params, study.params)]
        missing, has = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        differs = [
            each.parameterName for each in study.params if each not in original_params and each.parameterName in names[0]
        ]
        differences = [
            (missing, "which this job does not tune"),
            (has, "which it did not tune"),
            (differs, "whose values were others"),
        ]
        what = (
            "; ".join(f"{', '.join(parameters)}, {how}" for parameters, how in differences if parameters) or "in another order"
        )
        raise UsageError(f"resumePreviousJobId {job_id} tuned other hyperparameters: {what}")
    for key in ("goal", "hyperparameterMetricTag"):
        if (before := getattr(original, key)) != getattr(study, key):
            raise UsageError(
                f"resumePreviousJobId {job_id} had {key} {before}, and this one {getattr(study, key)}: make them the same"
            )
    earlier_trials = [
        EarlierTrial(each.hyperparameters, each.finalMetric.objectiveValue) for each in trials if each.finalMetric
    ]
    if not earlier_trials:
        raise UsageError(f"resumePreviousJobId {job_id} has no trial that SUCCEEDED, of which one could learn: take it out")
    result = replace(study, earlier=[*original.earlier, *earlier_trials])
    if not result.trial_count:
        raise UsageError(f"every point of the grid was tried by {job_id}: nothing is left to do")
    return result
