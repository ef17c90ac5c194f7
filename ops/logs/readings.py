"""What a line of any trainer tells of how far it is: for people's eyes, so a guess is good enough; nothing is decided by it.

The lines of `jobs.progress` are understood exactly; besides them `step 348`, `step = 348`, `step 348/2000`, `Epoch 3/10`, and
`loss` and `accuracy` with a number behind them, as Keras, Estimators and most scripts print them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from jobs.progress import valid_report

LONGEST = 1000
"""Characters of a line that are looked at."""

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\b"
_STEP = re.compile(r"\b(?:global[_ ])?step(?: |\s*[=:]\s*)(\d{1,15})(?:\s*/\s*(\d{1,15}))?\b", re.IGNORECASE)
_EPOCH = re.compile(r"\bEpoch(?: |\s*[=:]\s*)(\d{1,9})\s*/\s*(\d{1,9})\b", re.IGNORECASE)
_LOSS = re.compile(rf"(?<![\w-])loss\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_ACCURACY = re.compile(
    rf"(?<![\w-])(?:sparse_categorical_|categorical_|binary_)?acc(?:uracy)?\s*[:=]\s*{_NUMBER}", re.IGNORECASE
)
_LOCAL_RATE = re.compile(r"\b(\d+\.?\d*) local steps/s")
_EVAL = re.compile(r"\bEval\b|\bFinal metrics after (\d{1,15}) steps")
_HINTS = ("step", "Step", "STEP", "poch", "oss", "OSS", "cc")


class Unit(StrEnum):
    """What is counted."""

    STEP = "step"
    EPOCH = "epoch"


@dataclass(frozen=True)
class Reading:
    """What one line tells: a count and its maximum, loss and accuracy as printed, the printing replica's own steps/s.

    `learned` is True for figures of an evaluation, which are not those of training. None for what is not told.
    """

    count: int | None = None
    maximum: int | None = None
    unit: Unit = Unit.STEP
    loss: str | None = None
    accuracy: str | None = None
    local_rate: float | None = None
    learned: bool = False


def read(line: str) -> Reading | None:
    """What a line tells, None where it tells nothing."""
    if not any(hint in line for hint in _HINTS):
        return None
    if report := valid_report(line):
        figures = {"loss": report.loss, "accuracy": report.metrics.get("accuracy")}
        loss, accuracy = (None if value is None else f"{value:.4g}" for value in figures.values())
        return Reading(report.step, report.totalSteps, loss=loss, accuracy=accuracy)
    line = line[:LONGEST]
    count, maximum, unit = _count(line)
    loss, accuracy, rate = (found[1] if (found := kind.search(line)) else None for kind in (_LOSS, _ACCURACY, _LOCAL_RATE))
    if count is None and loss is None and accuracy is None:
        return None
    learned = _EVAL.search(line)
    if learned and learned[1]:
        count = int(learned[1])
    return Reading(count, maximum, unit, loss, accuracy, float(rate) if rate else None, learned is not None)


def _count(line: str) -> tuple[int | None, int | None, Unit]:
    if found := _STEP.search(line):
        return int(found[1]), int(found[2]) if found[2] else None, Unit.STEP
    if found := _EPOCH.search(line):
        return int(found[1]), int(found[2]), Unit.EPOCH
    return None, None, Unit.STEP
