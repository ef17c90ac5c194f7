"""The trials of a tuning job, by its log: how many are done, the best, and which replica runs which."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from jobs.study import Goal
from ops import terminal
from ops.screen.picture import Row, Span, bar
from ops.screen.series import Series, StepRate, sparkline

_BEGUN = re.compile(r"Trial (\d{1,4}) of ([1-9]\d{0,3})(?:, again \(.*?\))?: (.*)")
_DONE = re.compile(r"Trial (\d{1,4}) SUCCEEDED: (\S.*) (\S+) at step (\d+)")
_FAILED = re.compile(r"error: trial (\d{1,4}) FAILED")
_SPARK = 32


class TrialScreen:
    """The trials of a job with these `hyperparameters:`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._goal = Goal.MINIMIZE if given.get("goal") == Goal.MINIMIZE else Goal.MAXIMIZE
        self._total: int | None = None
        self._words: dict[int, str] = {}
        self._ended: dict[int, float | None] = {}
        self._of: dict[str, int] = {}
        self._metric = ""
        self._best: int | None = None
        self._values, self._pace = Series(), StepRate()

    def line(self, message: str, replica: str, moment: float, now: float) -> None:
        """Apply a line of a replica's log, which may belong to its trial."""
        if start := _BEGUN.fullmatch(message):
            number, self._total = int(start[1]), int(start[2])
            self._words[number], self._of[replica] = start[3], number
            if self._pace.count is None:
                self._pace.mark(moment, 0, now)
        elif success := _DONE.match(message):
            self._metric = success[2]
            self._of.pop(replica, None)
            self._end(int(success[1]), _number(success[3]), moment, now)
        elif failed := _FAILED.match(message):
            self._of.pop(replica, None)
            self._end(int(failed[1]), None, moment, now)

    def of(self, replica: str) -> int | None:
        """Return the trial that a replica runs, or None between two."""
        return self._of.get(replica)

    def rows(self, final: bool, now: float) -> list[Row]:
        """Return rows with the progress and the best trial so far."""
        if self._total is None:
            return []
        total = max(self._total, len(self._ended))  # a trainer may print such lines, too
        share = len(self._ended) / total
        spans = [f"{'trials':<8} {len(self._ended)} of {total}  {bar(share, _SPARK)} {share:.0%}"]
        seconds = None if final else self._pace.seconds_to(total, now)
        if seconds:
            spans.append(f"  {terminal.duration(seconds)} to go")
        rows = [Row.of(*spans)]
        if self._best is not None:
            shape = Span(sparkline(self._values.values, _SPARK), "cyan")
            rows.append(Row.of(f"{self._metric:<8} ", shape))
            best = f"{'best':<8} {self._ended[self._best]:.6g}, trial {self._best}: {self._words.get(self._best, '')}"
            rows.append(Row.of(Span(best, "bold")))
        return rows

    def _end(self, number: int, value: float | None, moment: float, now: float) -> None:
        self._ended[number] = value
        self._pace.mark(moment, len(self._ended), now)
        if value is None:
            return
        self._values.add(value)
        best = self._ended[self._best] if self._best is not None else None
        if best is None or self._goal.better(value, best):
            self._best = number


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
