"""The trials of a tuning job, as a table with the best first, and as Cloud ML's `trainingOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.ledger import Ledger, Trials
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.study import Algorithm, Parameter, ScaleType, Study, Trial, TrialState, best, flags, format_value, ranked
from jobs.times import now
from ops import terminal
from ops.errors import OpsError, UsageError
from ops.submit.tuning import HYPERPARAMETERS, build_study, check_hyperparameters

_MOST_ROWS, _MOST_CHARACTERS = 30, 120


@dataclass(frozen=True)
class TuningResult:
    """A job's study, and its trials, by number."""

    record: JobRecord
    study: Study
    trials: Sequence[Trial]

    @property
    def ranked(self) -> list[Trial]:
        """The trials, the best first."""
        return ranked(self.study, self.trials)

    @property
    def best(self) -> Trial | None:
        """The best trial; None if none has a value yet."""
        return best(self.study, self.trials)

    def state(self, trial: Trial) -> str:
        """Return the trial's state; CANCELLED if it still ran when its job ended."""
        return str(JobState.CANCELLED) if self.record.final and not trial.final else str(trial.state)

    def output(self) -> dict[str, Any]:
        """Return Cloud ML's TrainingOutput, the best trial first."""
        listed = [{**_to_dict(trial), "state": self.state(trial)} for trial in self.ranked]
        return {
            "completedTrialCount": sum(trial.state is TrialState.SUCCEEDED for trial in self.trials),
            "isHyperparameterTuningJob": True,
            "hyperparameterMetricTag": self.study.hyperparameterMetricTag,
            "trials": listed,
        }

    def summary(self) -> str:
        """Return `5 of 16 done, 1 FAILED; best is trial 3, accuracy 0.98: --units=32`."""
        failed = sum(trial.state is TrialState.FAILED for trial in self.trials)
        ended = sum(trial.final for trial in self.trials)
        text = f"{ended} of {self.study.trial_count} done" + (f", {failed} FAILED" if failed else "")
        if (first := self.best) is None or first.finalMetric is None:
            return text
        value = f"{self.study.hyperparameterMetricTag} {first.finalMetric.objectiveValue:.6g}"
        return f"{text}; best is trial {first.trialId}, {value}: {' '.join(flags(first.hyperparameters))}"

    def line(self) -> str:
        """Describe the study in one line.

        For example `MAXIMIZE accuracy over learning-rate from 0.001 to 0.1 (UNIT_LOG_SCALE), units of 16, 32; 5 at once`.
        """
        study = self.study
        more = [f"{study.maxParallelTrials} at once"] if study.maxParallelTrials > 1 else []
        more += [str(study.algorithm)] if study.algorithm is not Algorithm.ALGORITHM_UNSPECIFIED else []
        more += ["early stopping"] if study.enableTrialEarlyStopping else []
        more += [f"after {study.resumePreviousJobId}"] if study.resumePreviousJobId else []
        over = f"{study.goal} {study.hyperparameterMetricTag} over {', '.join(map(_range, study.params))}"
        return "; ".join([over, *more])

    def show(self) -> None:
        """Print the table of trials, if there are any."""
        if not self.trials:
            return
        names = [each.parameterName for each in self.study.params]
        metric = self.study.hyperparameterMetricTag.upper()
        heads = ("TRIAL", "STATE", metric, "STEP", *names, "TIME", "RESTARTS", "REPLICA", "ERROR")
        terminal.out()
        terminal.table(heads, [self._row(trial, names) for trial in self.ranked[:_MOST_ROWS]])
        if (more := len(self.trials) - _MOST_ROWS) > 0:
            terminal.note(f"{terminal.plural(more, 'more trial')}: fab describe {self.record.jobId} --json has all")

    def _row(self, trial: Trial, names: Sequence[str]) -> tuple[object, ...]:
        last = trial.last
        return (
            str(trial.trialId),
            self.state(trial) + (" early" if trial.isTrialStoppedEarly else ""),
            f"{last.objectiveValue:.6g}" if last else None,
            str(last.trainingStep) if last else None,
            *(trial.hyperparameters.get(name) for name in names),
            terminal.duration(trial.seconds(self.record.endTime or now())),
            str(trial.restarts) if trial.restarts else None,
            trial.replica,
            trial.errorMessage[:_MOST_CHARACTERS] or None,
        )


def read(ledger: Ledger, record: JobRecord) -> TuningResult | None:
    """Return the study of a job, as its plan has it, and its trials; None if it tunes nothing."""
    hyperparameter_input = record.trainingInput.get(HYPERPARAMETERS)
    if not isinstance(hyperparameter_input, dict):
        return None
    plan = ledger.plan(record.jobId)
    try:
        study = (plan.study if plan else None) or build_study(
            check_hyperparameters(hyperparameter_input, HYPERPARAMETERS), (), "", None
        )
    except UsageError as error:
        raise OpsError(f"what job {record.jobId} tunes cannot be read: {error}") from None
    trials = Trials(ledger, record.jobId)
    records = trials.read()
    for number, why in trials.bad.items():
        terminal.note(f"trial {number} is not shown: {why}")
    return TuningResult(record, study, records)


def best_trial(ledger: Ledger, record: JobRecord) -> Trial | None:
    """Return the best trial of a tuning job, None for any other job; OpsError if no trial has a value yet."""
    if (tuned := read(ledger, record)) is None:
        return None
    if (first := tuned.best) is None:
        raise OpsError(f"no trial of job {record.jobId} ({record.state}) has SUCCEEDED: fab describe {record.jobId}")
    return first


def note_best_trial(record: JobRecord, trial: Trial) -> None:
    """Note that the best trial's output is used as the job's."""
    tried = " ".join(flags(trial.hyperparameters))
    terminal.note(f"{record.jobId} tuned hyperparameters; trial {trial.trialId} is the best: {tried}")


def _range(parameter: Parameter) -> str:
    scale = f" ({parameter.scaleType})" if parameter.scaleType is not ScaleType.NONE else ""
    if parameter.minValue is not None and parameter.maxValue is not None:
        return f"{parameter.parameterName} from {format_value(parameter.minValue)} to {format_value(parameter.maxValue)}{scale}"
    return f"{parameter.parameterName} of {', '.join(map(str, parameter.choices or ()))}{scale}"


def _to_dict(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.to_dict().items() if key != "schema"}
