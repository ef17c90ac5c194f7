"""The reservation of steps by replicas, so that together they take no more than the job has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A round that takes so many times as long as the replica's last one, and at least these seconds, may never end.
_PATIENCE_TIMES = 4.0
_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.1


class StepBudget:
    """Steps that replicas, each a thread of the chief's process, claim before a round and settle after it.

    The chief starts every round, so that this costs no message. What a failed round claimed is free again. So is what a round
    claimed that does not end, as when its host is gone without a word; but only once nothing else is left to take: such a
    round may still end, and then the job goes past its last step by it. At a multiple of `every` steps all wait until
    the chief has evaluated the model.
    """

    def __init__(
        self, step: int, max_steps: int, replicas: int, clock: Callable[[], float] = time.monotonic, every: int | None = None
    ) -> None:
        self.global_step = step
        self._max_steps, self._replicas, self._clock, self._every = max_steps, replicas, clock, every or max_steps
        self._claimed: dict[str, tuple[int, float]] = {}
        self._step_seconds: dict[str, float] = {}
        self._changed = threading.Condition()
        self.release()

    def release(self) -> None:
        """Let all replicas continue to the next multiple of `every` steps."""
        with self._changed:
            self._until = min(self._max_steps, (self.global_step // self._every + 1) * self._every)
            self._changed.notify_all()

    def claim(self, name: str, steps: int, stopped: threading.Event, leads: bool = False) -> int:
        """Reserve this many steps for a replica, or fewer; 0 if the job is at its last step or stopped.

        Towards the end they are a replica's part of the remaining steps, so that all end at about the same time. If others
        have reserved all of them, this waits: one of them may fail. The chief, which `leads`, then
        takes single steps up to an evaluation.
        """
        with self._changed:
            while self.global_step < self._max_steps and not stopped.is_set():
                free = self._until - self.global_step - sum(claimed for claimed, _ in self._claimed.values())
                if leads and self._until < self._max_steps:
                    free = max(free, 1)
                if free > 0:
                    mine = min(steps, max(free // self._replicas, 1))
                    self._claimed[name] = mine, self._clock()
                    return mine
                if not self._give_up_late():
                    self._changed.wait(_LOOK_SECONDS)
        return 0

    def late(self) -> set[str]:
        """Return the replicas whose round is overdue: it may never end."""
        with self._changed:
            return self._late()

    def _late(self) -> set[str]:
        now = self._clock()
        usual = {name: steps * self._step_seconds.get(name, 0.0) for name, (steps, _) in self._claimed.items()}
        patience = {name: max(_PATIENCE_SECONDS, _PATIENCE_TIMES * seconds) for name, seconds in usual.items()}
        return {name for name, (_, since) in self._claimed.items() if now - since > patience[name]}

    def _give_up_late(self) -> bool:
        late = self._late()
        for name in late:
            del self._claimed[name]
        return bool(late)

    def settle(self, name: str, global_step: int | None) -> None:
        """End a replica's round, with the global step after it; None if the round failed."""
        with self._changed:
            steps, since = self._claimed.pop(name, (0, 0.0))
            if global_step is not None:
                if steps:
                    self._step_seconds[name] = (self._clock() - since) / steps
                # The servers know better than a sum of claims: a round may fail after they have counted its steps.
                self.global_step = max(self.global_step, global_step)
            self._changed.notify_all()
