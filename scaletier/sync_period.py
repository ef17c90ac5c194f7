"""The sync period: how many steps a replica takes by itself between two exchanges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SYNCHRONOUS = 4
"""The period of the strategy `sync` where the user sets none; `defaultSyncPeriod` of scaletier.yaml is the same."""
_FIRST, _MOST = 4, 64
# The share of the steps' time that exchanges may take.
_EXCHANGE_SHARE = 0.15
# The least exchanges of a replica in a job: parameters that diverge too far have a useless mean.
_EXCHANGES = 15
_WINDOW = 8
# The most seconds of a round's steps: SIGTERM is handled between two rounds, and leaves ten seconds to save a checkpoint.
_ROUND_SECONDS = 3.0
# Seconds of a round of a replica that trains alone: between two rounds it evaluates, saves and logs.
_ALONE_SECONDS = 0.25


@dataclass
class SyncPeriod:
    """The local steps between two exchanges: fixed, or the fewest that keep exchanges below 15 % of the steps' time.

    Each replica measures its last rounds. A replica that is `alone` has no exchanges; its rounds are short.

    Attributes:
        steps: the steps of the next round.
        most: the most steps of a round.
        line: a line about the last measured period, or "".
    """

    steps: int
    fixed: bool
    most: int = _MOST
    alone: bool = False
    line: str = ""
    _rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: int | None, replicas: int, max_steps: int) -> SyncPeriod:
        if asked:
            return cls(asked, True)
        if replicas == 1:
            return cls(1, False, alone=True)
        return cls(_FIRST, False, max(_FIRST, min(_MOST, max_steps // (_EXCHANGES * replicas))))

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
        if self.steps != before or not self.line:
            rates = f"{a_step * 1e3:.1f} ms a step, {an_exchange * 1e3:.1f} ms an exchange"
            self.line = f"Exchange every {self.steps} steps: {rates}"

    @staticmethod
    def _within(seconds: float, a_step: float, most: int) -> int:
        return max(1, min(most, int(seconds / max(a_step, 1e-9))))
