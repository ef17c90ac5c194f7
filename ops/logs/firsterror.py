"""Detects the line of a log that is the job's first error."""

from __future__ import annotations

from jobs.firsterror import LONGEST, ErrorFinder, FirstError
from ops.logs.lines import Line


class FirstOf:
    """Asked of each line in turn, whether it is the one; that is true once."""

    def __init__(self, known: tuple[str, FirstError] | None, live: bool = False) -> None:
        """Use the first error of the replicas' records.

        Args:
            known: the replica and the error by the records.
            live: if the records have none yet, use the first error that is read, but not the agent's own lines.
        """
        self._known, self._told = known, False
        self._finders: dict[str, ErrorFinder] | None = {} if live and known is None else None

    def __call__(self, line: Line) -> bool:
        if not self._told:
            self._told = self._is(line)
            return self._told
        return False

    def _is(self, line: Line) -> bool:
        if self._known:
            name, error = self._known
            return (line.replica, line.time, line.message[:LONGEST]) == (name, error.time, error.message)
        if self._finders is None or line.message.startswith(_OWN):
            return False
        finder = self._finders.setdefault(line.replica, ErrorFinder())
        return finder.see(line.time, line.severity, line.message, line.time)


# Of severity ERROR, by the leader and the supervisor.
_OWN = ("job FAILED", "trainer ended by ")
