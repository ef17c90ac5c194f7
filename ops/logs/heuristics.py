"""Heuristics that read progress from a line of any trainer, for display only.

No decision depends on them. The lines of `jobs.progress` are parsed exactly. The other formats are those of Keras, Estimators
and most scripts: `step 348`, `step = 348`, `step 348/2000`, `Epoch 3/10`, and `loss` and `accuracy`, each before a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from jobs.progress import valid_report

MAX_LENGTH = 1000
"""The number of characters of a line that are searched."""

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


class UnitOfProgress(StrEnum):
    """The unit in which a trainer counts its progress."""

    STEP = "step"
    EPOCH = "epoch"


@dataclass(frozen=True)
class LineMetrics:
    """The metrics of one line: a count and its maximum, loss and accuracy, the replica's own steps/s; None if unknown.

    `evaluation` is True for metrics of an evaluation, False for those of training.
    """

    count: int | None = None
    maximum: int | None = None
    unit: UnitOfProgress = UnitOfProgress.STEP
    loss: str | None = None
    accuracy: str | None = None
    local_rate: float | None = None
    evaluation: bool = False


def parse_metrics(line: str) -> LineMetrics | None:
    """Return the metrics of a line, or None if it has none."""
    if not any(hint in line for hint in _HINTS):
        return None
    if report := valid_report(line):
        metrics = {"loss": report.loss, "accuracy": report.metrics.get("accuracy")}
        loss, accuracy = (None if value is None else f"{value:.4g}" for value in metrics.values())
        return LineMetrics(report.step, report.totalSteps, loss=loss, accuracy=accuracy)
    line = line[:MAX_LENGTH]
    count, maximum, unit = _count(line)
    loss, accuracy, rate = (
        match[1] if (match := pattern.search(line)) else None for pattern in (_LOSS, _ACCURACY, _LOCAL_RATE)
    )
    if count is None and loss is None and accuracy is None:
        return None
    evaluation = _EVAL.search(line)
    if evaluation and evaluation[1]:
        count = int(evaluation[1])
    return LineMetrics(count, maximum, unit, loss, accuracy, float(rate) if rate else None, evaluation is not None)


def _count(line: str) -> tuple[int | None, int | None, UnitOfProgress]:
    if count := _STEP.search(line):
        return int(count[1]), int(count[2]) if count[2] else None, UnitOfProgress.STEP
    if count := _EPOCH.search(line):
        return int(count[1]), int(count[2]), UnitOfProgress.EPOCH
    return None, None, UnitOfProgress.STEP
