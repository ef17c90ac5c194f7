"""The trials of a job that tunes hyperparameters: for people, the best first, and as Cloud ML's `trainingOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.study import Study, Trial, TrialState, best, ranked, words
from jobs.times import now, seconds_between
from ops import terminal
from ops.errors import OpsError
from ops.train import tuning

_MOST_ROWS = 30
HYPERPARAMETERS = "hyperparameters"


def study_of(record: JobRecord) -> Study | None:
    """What a job tunes; None for any other job."""
    given = record.trainingInput.get(HYPERPARAMETERS)
    return tuning.study(given, (), "", None) if isinstance(given, dict) else None


def trials_of(ledger: Ledger, record: JobRecord) -> list[Trial]:
    """Its trials in the order of their numbers, none for any other job."""
    return ledger.trials(record.jobId) if HYPERPARAMETERS in record.trainingInput else []


def output(record: JobRecord, trials: Sequence[Trial]) -> dict[str, Any]:
    """As Cloud ML's TrainingOutput has it, the best trial first; empty for a job that tunes nothing."""
    if (study := study_of(record)) is None:
        return {}
    ended = sum(trial.final for trial in trials)
    listed = [{**_plain(trial), "state": state(record, trial)} for trial in ranked(study, trials)]
    told = {"isHyperparameterTuningJob": True, "hyperparameterMetricTag": study.hyperparameterMetricTag}
    return {"trainingOutput": {"completedTrialCount": ended, **told, "trials": listed}}


def _plain(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.to_dict().items() if key != "schema"}


def best_of(ledger: Ledger, record: JobRecord) -> Trial | None:
    """The best trial of a job that tunes, and which that is is said; None for any other job.

    OpsError where none has come to a value yet.
    """
    if (study := study_of(record)) is None:
        return None
    if (first := best(study, ledger.trials(record.jobId))) is None:
        raise OpsError(f"no trial of job {record.jobId} ({record.state}) has come to a value: fab describe {record.jobId}")
    tried = " ".join(words(first.hyperparameters))
    terminal.note(f"{record.jobId} tuned hyperparameters; trial {first.trialId} is the best: {tried}")
    return first


def state(record: JobRecord, trial: Trial) -> str:
    """That of the trial; one that was under way when its job ended has ended with it."""
    return str(JobState.CANCELLED) if record.final and not trial.final else str(trial.state)


def summary(record: JobRecord, trials: Sequence[Trial]) -> str:
    """`5 of 16 done, 1 FAILED; best is trial 3, accuracy 0.98`; empty for a job that tunes nothing."""
    if (study := study_of(record)) is None:
        return ""
    failed = sum(trial.state is TrialState.FAILED for trial in trials)
    told = f"{sum(trial.final for trial in trials)} of {study.trials} done" + (f", {failed} FAILED" if failed else "")
    first = best(study, trials)
    if first is None or first.finalMetric is None:
        return told
    value = f"{study.hyperparameterMetricTag} {first.finalMetric.objectiveValue:.6g}"
    return f"{told}; best is trial {first.trialId}, {value}: {' '.join(words(first.hyperparameters))}"


def show(record: JobRecord, trials: Sequence[Trial]) -> None:
    """The table of them; nothing for none."""
    if (study := study_of(record)) is None or not trials:
        return
    names = [each.parameterName for each in study.params]
    heads = ("TRIAL", "STATE", study.hyperparameterMetricTag.upper(), "STEP", *names, "TOOK", "RESTARTS", "REPLICA", "ERROR")
    terminal.out()
    terminal.table(heads, [_row(record, trial, names) for trial in ranked(study, trials)[:_MOST_ROWS]])
    if (more := len(trials) - _MOST_ROWS) > 0:
        terminal.note(f"{more} more trials: fab describe {record.jobId} --json has all")


def _row(record: JobRecord, trial: Trial, names: Sequence[str]) -> tuple[object, ...]:
    final = trial.finalMetric or (trial.allMetrics[-1] if trial.allMetrics else None)
    told = state(record, trial) + (" early" if trial.isTrialStoppedEarly else "")
    return (
        str(trial.trialId),
        told,
        f"{final.objectiveValue:.6g}" if final else None,
        str(final.trainingStep) if final else None,
        *(trial.hyperparameters.get(name) for name in names),
        terminal.duration(seconds_between(trial.startTime, trial.endTime or record.endTime or now())),
        str(trial.restarts) if trial.restarts else None,
        trial.replica,
        trial.errorMessage.partition(":")[0] or None,
    )
