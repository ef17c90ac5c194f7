"""The lines by which a trainer tells how far it is: the words of Cloud ML's samples, and all that anybody reads of a log.

    Train [master/0], step 348: … (1.037 sec) …               global step, and seconds since this replica began to train
    Train [master/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s
    Eval, step 990: loss: 0.400, accuracy: 0.890              any names and numbers, in both
    Exchange every 8 steps: …                                 from here on, local steps between two exchanges
    Final metrics after 5006 steps, loss: 0.228, NAME: NUMBER, …

Anything may stand where … does. docs/trainers.md has them as part of the contract with a trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

TRAIN_LINE = "Train [master/0], step 348: … (1.037 sec) …"
_TRAIN = re.compile(r"Train \[\w+/\d+\], step (\d+): .*\((\d+\.\d+) sec\)")
_TOLD = re.compile(r"Train \[\w+/\d+\], step (\d+): (.*)\(\d+\.\d+ sec\)(.*)")
_LOCAL = re.compile(r"(\d+(?:\.\d+)?) local steps/s")
_EVAL = re.compile(r"\bEval, step (\d+): (.*)")
_PERIOD = re.compile(r"Exchange every (\d+) steps")
_FINAL = re.compile(r"Final metrics after (\d+) steps, (.*)")
_METRIC = re.compile(r"\b(\w+(?:[ ./@-]\w+)*): (\S+?)(?:,|$)")


@dataclass(frozen=True)
class Mark:
    """A Train line: the global step, and the seconds since training began."""

    step: int
    seconds: float


def mark(line: str) -> Mark | None:
    """What a line tells, None where it is no Train line."""
    match = _TRAIN.search(line)
    return Mark(int(match[1]), float(match[2])) if match else None


@dataclass(frozen=True)
class Told:
    """What a line tells of a step: numbers by their names, and the steps/s of this replica alone where the line has them."""

    step: int
    values: dict[str, float]
    rate: float | None = None


def trained(line: str) -> Told | None:
    """What a Train line tells besides its mark, None where it is none."""
    if not (match := _TOLD.search(line)):
        return None
    local = _LOCAL.search(match[3])
    return Told(int(match[1]), _numbers(match[2].strip()), float(local[1]) if local else None)


def evaluated(line: str) -> Told | None:
    """What an Eval line tells, or the line of the final metrics; None where it is neither."""
    match = _EVAL.search(line) or _FINAL.search(line)
    return Told(int(match[1]), _numbers(match[2])) if match else None


def _numbers(text: str) -> dict[str, float]:
    """Of `loss: 0.729, accuracy: 0.834`; what is no finite number is left out."""
    found = {}
    for name, told in _METRIC.findall(text):
        try:
            value = float(told)
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = value
    return found


def tells(line: str) -> bool:
    """Whether a line tells any of this."""
    return any(kind.search(line) for kind in (_TRAIN, _TOLD, _EVAL, _FINAL, _PERIOD))


def period(lines: Iterable[str]) -> int | None:
    """Local steps between two exchanges as the trainer said last, where it does."""
    told = [int(match[1]) for line in lines if (match := _PERIOD.search(line))]
    return told[-1] if told else None


def final_metrics(lines: Iterable[str]) -> dict[str, str]:
    """Of the last `Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935`: each number as it was printed."""
    found = [match for line in lines if (match := _FINAL.search(line))]
    return {"steps": found[-1][1], **dict(_METRIC.findall(found[-1][2]))} if found else {}
