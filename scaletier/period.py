"""How many steps a replica takes between two exchanges with the parameter servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Where there is nothing to exchange with: how often the master looks at what else is due.
ALONE = 8
_FIRST = 4
_MOST = 64
# Exchanges may take this part of the time that the steps take.
_EXCHANGE_SHARE = 0.15
# Replicas that meet too seldom walk apart, and their mean is worth less than each: so often they meet at least.
_MEETINGS = 15
_WINDOW = 8


@dataclass
class Period:
    """The number K: fixed, or as small as keeps the exchanges to a seventh of the steps' time, as measured in the last rounds.

    `most` bounds a K that is not fixed. Every replica has its own: on a faster host a step takes less.
    """

    steps: int
    fixed: bool
    most: int = _MOST
    told: str = ""
    _rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: int | None, replicas: int, max_steps: int) -> Period:
        """The K that a flag asks for, or None for one that is measured."""
        if asked or replicas == 1:
            return cls(asked or ALONE, True)
        return cls(_FIRST, False, max(_FIRST, min(_MOST, max_steps // (_MEETINGS * replicas))))

    def observe(self, steps: int, seconds: float, compute: float) -> None:
        """Takes note of a round: its steps, how long it took, and how long its steps took by themselves; both in seconds."""
        if self.fixed or not steps:
            return
        self._rounds.append((steps, compute, seconds - compute))
        if len(self._rounds) < _WINDOW:
            return
        a_step = sum(compute for _, compute, _ in self._rounds) / sum(steps for steps, _, _ in self._rounds)
        an_exchange = sum(exchange for *_, exchange in self._rounds) / len(self._rounds)
        self._rounds.clear()
        before = self.steps
        self.steps = min(self.most, max(_FIRST, math.ceil(an_exchange / (a_step * _EXCHANGE_SHARE))))
        if self.steps != before or not self.told:
            self.told = (
                f"Exchange every {self.steps} steps: {a_step * 1e3:.1f} ms a step, {an_exchange * 1e3:.1f} ms an exchange"
            )
