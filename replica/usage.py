"""What the units of this host's job use of processors and memory, the trainer's and the replica's own, as the kernel counts it.

A few small files of the control group, a tenth of a millisecond to read: nothing looks at processes one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jobs.lease import Clock
from jobs.records import Usage

_OWN, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_REPLICA, _TRAINER = "scaletier.service", "scaletier-trainer.service"
Read = Callable[[], Usage | None]


def nothing() -> None:
    """Where nobody counts."""


class Meter:
    """Reads what the control group of this process uses, and that of the trainer beside it, where it has one of its own.

    Between two readings it knows how many processors were busy. A trainer's processor time is kept when it ends.
    """

    def __init__(self, clock: Clock, own: Path = _OWN, root: Path = _ROOT) -> None:
        self._clock, self._own, self._root = clock, own, root
        self._before: tuple[float, float] | None = None
        self._trainers, self._ended = 0.0, 0.0

    def read(self) -> Usage | None:
        """What is used now; None where the kernel tells nothing of it."""
        groups = _groups(self._own)
        seconds, memory = cpu_seconds(groups, self._root), memory_bytes(groups, self._root)
        if seconds is None and memory is None:
            return None
        trainer = {name: str(Path(path).with_name(_TRAINER)) for name, path in groups.items() if Path(path).name == _REPLICA}
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


def cpu_seconds(groups: dict[str, str], root: Path) -> float | None:
    """Processor time since the group was made, of version 2, also where that is beside version 1, or of version 1."""
    files = [f"{root}/{top}{groups.get('')}/cpu.stat" for top in (".", "unified")]
    for file in map(Path, files):
        with suppress(OSError):
            if found := re.search(r"^usage_usec (\d+)$", file.read_text(), re.MULTILINE):
                return int(found[1]) / 1e6
    with suppress(OSError, ValueError):
        return int(Path(f"{root}/cpuacct{groups.get('cpuacct')}/cpuacct.usage").read_text()) / 1e9
    return None


def memory_bytes(groups: dict[str, str], root: Path) -> int | None:
    """Bytes that the group holds, without its cache of files; memory files, which are in that cache too, count."""
    kinds = (
        (f"{root}{groups.get('')}", "memory.current", "file", "shmem"),
        (f"{root}/memory{groups.get('memory')}", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    )
    for folder, file, cache, shared in kinds:
        with suppress(OSError, ValueError, KeyError):
            held = int(Path(folder, file).read_text())
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            return max(held - int(stat[cache]) + int(stat[shared]), 0)
    return None


def _groups(own: Path) -> dict[str, str]:
    """By controller the group that this process is in, that of version 2 by the empty name."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    except (OSError, ValueError):
        return {}
