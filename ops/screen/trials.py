"""The trials of a tuning job, by its log: how many are done, the best, and which replica runs which."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from jobs.study import Goal
from ops.screen.series import CountRate, Series, progress_line, sparkline

_STARTED = re.compile(r"Trial (\d{1,4}) of ([1-9]\d{0,3})(?:, again \(.*?\))?: (.*)")
_SUCCEEDED = re.compile(r"Trial (\d{1,4}) SUCCEEDED: (\S.*) (\S+) at step (\d+)")
_FAILED = re.compile(r"error: trial (\d{1,4}) FAILED")


class TrialScreen:
    """The state of the trials of a job; `hyperparameters` is that key of its trainingInput."""

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        self._goal = Goal.MINIMIZE if hyperparameters.get("goal") == Goal.MINIMIZE else Goal.MAXIMIZE
        self._total: int | None = None
        self._parameters: dict[int, str] = {}
        self._results: dict[int, float | None] = {}
        self._running: dict[str, int] = {}
        self._metric = ""
        self._best: int | None = None
        self._values, self._trial_rate = Series(), CountRate()

    def add_line(self, message: str, replica: str, moment: float, now: float) -> None:
        """Apply a line of a replica's log, if it is about a trial."""
        if started := _STARTED.fullmatch(message):
            number, self._total = int(started[1]), int(started[2])
            self._parameters[number], self._running[replica] = started[3], number
            if self._trial_rate.count is None:
                self._trial_rate.add_point(moment, 0, now)
        elif succeeded := _SUCCEEDED.match(message):
            self._metric = succeeded[2]
            self._running.pop(replica, None)
            self._end(int(succeeded[1]), _number(succeeded[3]), moment, now)
        elif failed := _FAILED.match(message):
            self._running.pop(replica, None)
            self._end(int(failed[1]), None, moment, now)

    def trial_of(self, replica: str) -> int | None:
        """Return the trial that a replica runs, None between two trials."""
        return self._running.get(replica)

    def rows(self, final: bool, now: float) -> list[Text]:
        """Return lines with the progress and the best trial so far."""
        if self._total is None:
            return []
        total = max(self._total, len(self._results))  # or more, as a trainer may print such lines, too
        rows = [progress_line("trials", self._trial_rate, total, final, now)]
        if self._best is not None:
            rows.append(Text.assemble(f"{self._metric:<8} ", (sparkline(self._values.values), "cyan")))
            best = f"{'best':<8} {self._results[self._best]:.6g}, trial {self._best}: {self._parameters.get(self._best, '')}"
            rows.append(Text(best, "bold"))
        return rows

    def _end(self, number: int, value: float | None, moment: float, now: float) -> None:
        self._results[number] = value
        self._trial_rate.add_point(moment, len(self._results), now)
        if value is None:
            return
        self._values.add(value)
        best = self._results[self._best] if self._best is not None else None
        if best is None or self._goal.better(value, best):
            self._best = number


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
