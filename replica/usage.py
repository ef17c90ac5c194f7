"""What the units of this host's job use of processors and memory, the trainer's and the replica's own, as the kernel counts it.

A few small files of the control group, a tenth of a millisecond to read: nothing looks at processes one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jobs.lease import Clock
from jobs.records import Usage
from replica.cgroup import OWN, ROOT, cpu_seconds, groups, memory_bytes

_REPLICA, _TRAINER = "scaletier.service", "scaletier-trainer.service"
Read = Callable[[], Usage | None]


def nothing() -> None:
    """Where nobody counts."""


class Meter:
    """Reads what the control group of this process uses, and that of the trainer beside it, where it has one of its own.

    Between two readings it knows how many processors were busy. A trainer's processor time is kept when it ends.
    """

    def __init__(self, clock: Clock, own: Path = OWN, root: Path = ROOT) -> None:
        self._clock, self._own, self._root = clock, own, root
        self._before: tuple[float, float] | None = None
        self._trainers, self._ended = 0.0, 0.0

    def read(self) -> Usage | None:
        """What is used now; None where the kernel tells nothing of it."""
        own = groups(self._own)
        seconds, memory = cpu_seconds(own, self._root), memory_bytes(own, self._root)
        if seconds is None and memory is None:
            return None
        trainer = {name: str(Path(path).with_name(_TRAINER)) for name, path in own.items() if Path(path).name == _REPLICA}
        if seconds is not None:
            seconds += self._of_trainers(cpu_seconds(trainer, self._root) if trainer else None)
        if memory is not None:
            memory += (memory_bytes(trainer, self._root) if trainer else None) or 0
        return Usage(seconds, self._cpus(seconds), memory)

    def _of_trainers(self, seconds: float | None) -> float:
        """Processor time of all trainers, of which this one has had so much; None where none runs."""
        if (seconds or 0.0) < self._trainers:
            self._ended += self._trainers
        self._trainers = seconds or 0.0
        return self._ended + self._trainers

    def _cpus(self, seconds: float | None) -> float | None:
        """Processors that were busy on average since the last reading."""
        before, at = self._before, self._clock()
        self._before = None if seconds is None else (at, seconds)
        if before is None or seconds is None or at <= before[0]:
            return None
        return round(max(seconds - before[1], 0.0) / (at - before[0]), 3)
