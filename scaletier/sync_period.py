"""Choose the sync period: how many local steps a replica takes between two exchanges.

`sync` has a fixed period, DEFAULT_SYNC_PERIOD or the user's. `async` measures its period, unless the user sets one. In
`model-parallel` a round always has one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEFAULT_SYNC_PERIOD = 4
"""The period of the strategy `sync` if the user sets none; it must equal `defaultSyncPeriod` of scaletier.yaml."""
# The first measured period, and the largest. A period is smaller than the first only if steps are slow.
_FIRST, _MAX = 4, 64
# Exchanges may take this share of the time of the steps.
_EXCHANGE_SHARE = 0.15
# A replica exchanges at least this often in a job, unless the first period is too long for that: the mean of parameters that
# have diverged too far is useless.
_MIN_EXCHANGES = 15
# The number of rounds over which a period is measured.
_WINDOW = 8
# Keep rounds short: SIGTERM is handled only between rounds, and a checkpoint must be saved within 10 s of it.
_ROUND_SECONDS = 3.0
# The seconds of a round if a replica trains alone: it can evaluate, save and log only between rounds.
_ALONE_SECONDS = 0.25


@dataclass
class SyncPeriod:
    """The sync period of a replica: fixed, or the smallest that keeps exchanges below 15 % of the time of the steps.

    Each replica measures its own rounds. A replica that is `alone` has no exchanges; its rounds are short.

    Attributes:
        steps: the steps of the next round.
        fixed: True if the period is not measured.
        limit: the maximum of the steps of a round.
        line: the log line about the last measured period; empty if there is none.
    """

    steps: int
    fixed: bool
    limit: int = _MAX
    alone: bool = False
    line: str = ""
    _rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, requested: int | None, replicas: int, max_steps: int) -> SyncPeriod:
        """Return the period of the strategy `async`: `requested` by the user, or measured if that is None."""
        if requested:
            return cls(requested, True)
        if replicas == 1:
            return cls(1, False, alone=True)
        return cls(_FIRST, False, max(_FIRST, min(_MAX, max_steps // (_MIN_EXCHANGES * replicas))))

    def observe(self, steps: int, seconds: float, compute: float) -> None:
        """Record a round: its steps, its seconds, and `compute`, the seconds of its steps without the exchange."""
        if self.fixed or not steps:
            return
        if self.alone:
            self.steps = self._within(_ALONE_SECONDS, compute / steps, self.limit)
            return
        self._rounds.append((steps, compute, seconds - compute))
        if len(self._rounds) < _WINDOW and compute <= _ROUND_SECONDS:
            return
        step_seconds = sum(compute for _, compute, _ in self._rounds) / sum(steps for steps, _, _ in self._rounds)
        exchange_seconds = sum(exchange for *_, exchange in self._rounds) / len(self._rounds)
        self._rounds.clear()
        before, needed = self.steps, max(_FIRST, math.ceil(exchange_seconds / (max(step_seconds, 1e-9) * _EXCHANGE_SHARE)))
        self.steps = self._within(_ROUND_SECONDS, step_seconds, min(self.limit, needed))
        if self.steps != before or not self.line:
            rates = f"{step_seconds * 1e3:.1f} ms a step, {exchange_seconds * 1e3:.1f} ms an exchange"
            self.line = f"Exchange every {self.steps} steps: {rates}"

    @staticmethod
    def _within(seconds: float, step_seconds: float, limit: int) -> int:
        """Return the number of steps that take at most `seconds`: 1 to `limit`."""
        return max(1, min(limit, int(seconds / max(step_seconds, 1e-9))))
