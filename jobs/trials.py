"""The trials of a job for repeated reads: numbers from 1 on; an ended trial is read once."""

from __future__ import annotations

from jobs.checked import RecordError
from jobs.ledger import Ledger
from jobs.study import Trial


class Trials:
    """The trials of one job.

    `bad` maps each trial with an unreadable record to its error; its number counts as used.
    """

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self._ledger, self._job_id = ledger, job_id
        self._known: dict[int, Trial] = {}
        self.bad: dict[int, str] = {}

    def read(self) -> list[Trial]:
        """Return all readable trials, in the order of their numbers.

        Raises:
            StoreError: the bucket fails.
        """
        open_ones = [number for number, trial in self._known.items() if not trial.final]
        ahead = 1
        while True:
            first = self.next_number
            trials = self._ledger.trials_numbered(self._job_id, [*open_ones, *range(first, first + ahead)])
            for number, stored in trials.items():
                if isinstance(stored, RecordError):
                    self._known.pop(number, None)
                    self.bad[number] = str(stored)
                else:
                    self._known[number] = stored.record
            if not any(number >= first for number in trials):
                return [self._known[number] for number in sorted(self._known)]
            open_ones, ahead = [], 2 * ahead

    @property
    def next_number(self) -> int:
        """Return the first unused number."""
        return max((*self._known, *self.bad), default=0) + 1
