"""The lines by which a trainer tells how far it is: the words of Cloud ML's samples, and all that anybody reads of a log.

    Train [master/0], step 348: … (1.037 sec) …               global step, and seconds since this replica began to train
    Exchange every 8 steps: …                                 from here on, local steps between two exchanges
    Final metrics after 5006 steps, loss: 0.228, NAME: NUMBER, …

Anything may stand where … does. docs/trainers.md has them as part of the contract with a trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRAIN_LINE = "Train [master/0], step 348: … (1.037 sec) …"
_TRAIN = re.compile(r"Train \[\w+/\d+\], step (\d+): .*\((\d+\.\d+) sec\)")
_PERIOD = re.compile(r"Exchange every (\d+) steps")
_FINAL = re.compile(r"Final metrics after (\d+) steps, (.*)")
_METRIC = re.compile(r"(\w[\w ]*): (\S+?)(?:,|$)")


@dataclass(frozen=True)
class Mark:
    """A Train line: the global step, and the seconds since training began."""

    step: int
    seconds: float


def mark(line: str) -> Mark | None:
    """What a line tells, None where it is no Train line."""
    match = _TRAIN.search(line)
    return Mark(int(match[1]), float(match[2])) if match else None


def period(lines: Iterable[str]) -> int | None:
    """Local steps between two exchanges as the trainer said last, where it does."""
    told = [int(match[1]) for line in lines if (match := _PERIOD.search(line))]
    return told[-1] if told else None


def final_metrics(lines: Iterable[str]) -> dict[str, str]:
    """Of the last `Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935`: each number as it was printed."""
    found = [match for line in lines if (match := _FINAL.search(line))]
    return {"steps": found[-1][1], **dict(_METRIC.findall(found[-1][2]))} if found else {}
