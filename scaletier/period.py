"""The number of steps that a replica takes between two synchronizations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_FIRST = 4
_MOST = 64
# Exchanges may take this part of the time that the steps take.
_EXCHANGE_SHARE = 0.15
# Replicas that meet too seldom walk apart, and their mean is worth less than each: so often they meet at least.
_MEETINGS = 15
_WINDOW = 8
# So many seconds of steps at most: who is told to end looks between two rounds, and has ten seconds to save what was learned.
_ROUND_SECONDS = 3.0
# Where there is nothing to exchange with, the master looks so often at what else is due.
_ALONE_SECONDS = 0.25


@dataclass
class SyncPeriod:
    """The number K: fixed, or the smallest that keeps synchronization to a seventh of the compute time.

    It is measured in the last rounds. Whatever an exchange takes, a round is short enough to end in time. `most` bounds a K
    that is not fixed. Every replica has its own: on a faster host a step takes less. A replica that is `alone` has no
    exchanges, and rounds of a fourth of a second.
    """

    steps: int
    fixed: bool
    most: int = _MOST
    alone: bool = False
    told: str = ""
    _rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: int | None, replicas: int, max_steps: int) -> SyncPeriod:
        """Return the K of a flag, or None for a measured one."""
        if asked:
            return cls(asked, True)
        if replicas == 1:
            return cls(1, False, alone=True)
        return cls(_FIRST, False, max(_FIRST, min(_MOST, max_steps // (_MEETINGS * replicas))))

    def observe(self, steps: int, seconds: float, compute: float) -> None:
        """Record a round: its steps, its seconds, and the seconds of its steps by themselves."""
        if self.fixed or not steps:
            return
        if self.alone:
            self.steps = self._within(_ALONE_SECONDS, compute / steps, self.most)
            return
        self._rounds.append((steps, compute, seconds - compute))
        if len(self._rounds) < _WINDOW and compute <= _ROUND_SECONDS:
            return
        a_step = sum(compute for _, compute, _ in self._rounds) / sum(steps for steps, _, _ in self._rounds)
        an_exchange = sum(exchange for *_, exchange in self._rounds) / len(self._rounds)
        self._rounds.clear()
        before, needed = self.steps, max(_FIRST, math.ceil(an_exchange / (max(a_step, 1e-9) * _EXCHANGE_SHARE)))
        self.steps = self._within(_ROUND_SECONDS, a_step, min(self.most, needed))
        if self.steps != before or not self.told:
            self.told = (
                f"Exchange every {self.steps} steps: {a_step * 1e3:.1f} ms a step, {an_exchange * 1e3:.1f} ms an exchange"
            )

    @staticmethod
    def _within(seconds: float, a_step: float, most: int) -> int:
        """Return the number of steps that take this long, at least one."""
        return max(1, min(most, int(seconds / max(a_step, 1e-9))))
