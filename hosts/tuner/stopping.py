"""Early stopping of trials."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from jobs.study import Measurement, Study, Trial, TrialState

ENOUGH = 5
"""So many trials must have run to their end before another is held against them."""


def lags(study: Study, measured: Sequence[Measurement], trials: Sequence[Trial]) -> bool:
    """Return True if a trial's best value is worse than the median of the others' averages so far.

    The averages are up to the same step, and the others are those that have ended. Source: the median stopping rule of Golovin
    et al., Google Vizier (2017).
    """
    if not measured:
        return False
    step = max(each.trainingStep for each in measured)
    ended = [trial for trial in trials if trial.state is TrialState.SUCCEEDED and not trial.isTrialStoppedEarly]
    histories = [[each.objectiveValue for each in trial.allMetrics if each.trainingStep <= step] for trial in ended]
    try:
        averages = [fmean(values) for values in histories if values]
    except OverflowError:  # numbers so large have no average
        return False
    if len(averages) < ENOUGH:
        return False
    return study.goal.better(median(averages), study.goal.best(each.objectiveValue for each in measured))
