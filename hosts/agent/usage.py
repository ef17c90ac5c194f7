"""Resource usage of the units of this host's job, by the kernel's counters: processors and memory.

The units are the trainer's and the replica's own. A few small files of the control group take a tenth of a millisecond to
read: no process is read one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hosts.agent.cgroup import OWN, ROOT, cpu_seconds, groups, memory_bytes
from jobs.lease import Clock
from jobs.records import Usage

_REPLICA, _TRAINER = "scaletier.service", "scaletier-trainer.service"
Read = Callable[[], Usage | None]


def nothing() -> None:
    """Return None, as there is no counter."""


class Meter:
    """Reads the usage of this process's control group, and of the trainer's if that has its own.

    Between two readings it computes the number of busy processors. A trainer's processor time is kept when it ends.
    """

    def __init__(self, clock: Clock, own: Path = OWN, root: Path = ROOT) -> None:
        self._clock, self._own, self._root = clock, own, root
        self._before: tuple[float, float] | None = None
        self._trainers, self._ended = 0.0, 0.0

    def read(self) -> Usage | None:
        """Return the present usage, or None if the kernel does not report it."""
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
        """Return the processor time of all trainers, `seconds` of it by the present one, None if none runs."""
        if (seconds or 0.0) < self._trainers:
            self._ended += self._trainers
        self._trainers = seconds or 0.0
        return self._ended + self._trainers

    def _cpus(self, seconds: float | None) -> float | None:
        """Return the average number of busy processors since the last reading."""
        before, at = self._before, self._clock()
        self._before = None if seconds is None else (at, seconds)
        if before is None or seconds is None or at <= before[0]:
            return None
        return round(max(seconds - before[1], 0.0) / (at - before[0]), 3)
