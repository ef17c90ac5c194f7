"""Read the kernel's counters of a control group, of version 2 or 1: processors, memory, OOM kills."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jobs.lease import Clock
from jobs.records import Usage

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# A group of version 1 without a limit has this or more.
_NO_LIMIT = 1 << 60
_REPLICA, _TRAINER = "scaletier.service", "scaletier-trainer.service"


def groups(own: Path = OWN) -> dict[str, str]:
    """Return the groups of a process by controller, version 2 by the empty name; empty if unknown."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    except (OSError, ValueError):
        return {}


def available_cpus(root: Path = ROOT) -> float:
    """Return the CPUs that this process may use, by its affinity and the quota of its container, of version 2 or 1."""
    cpus = float(len(os.sched_getaffinity(0)))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # it is of the other version, or without a quota, which is `max`
            microseconds, period = map(int, " ".join((root / name).read_text() for name in names).split())
            if microseconds > 0:  # version 1 has -1 without a quota
                cpus = min(cpus, microseconds / period)
    return cpus


def cpu_seconds(paths: dict[str, str], root: Path = ROOT) -> float | None:
    """Return the processor time since the group was made, if it is known; version 2 may also be mounted beside version 1."""
    for top in (".", "unified"):
        with suppress(OSError):
            text = Path(f"{root}/{top}{paths.get('')}/cpu.stat").read_text()
            if match := re.search(r"^usage_usec (\d+)$", text, re.MULTILINE):
                return int(match[1]) / 1e6
    with suppress(OSError, ValueError):
        return int(Path(f"{root}/cpuacct{paths.get('cpuacct')}/cpuacct.usage").read_text()) / 1e9
    return None


def memory_bytes(paths: dict[str, str], root: Path = ROOT) -> int | None:
    """Return the bytes that a group uses: without page cache, but with shared memory (tmpfs); None if unknown."""
    names = (("memory.current", "file", "shmem"), ("memory.usage_in_bytes", "total_cache", "total_shmem"))
    for (_, folder), (file, cache, shared) in zip(_memory_folders(paths, root), names, strict=False):
        with suppress(OSError, ValueError, KeyError):
            total = int((folder / file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(total - int(stat[cache]) + int(stat[shared]), 0)
    return None


def memory_limit(own: Path = OWN, root: Path = ROOT) -> int | None:
    """Return the memory limit of this process's group in bytes; None if there is none or it is unknown."""
    with suppress(OSError, ValueError):
        for (_, folder), name in zip(_memory_folders(groups(own), root), ("memory.max", "memory.limit_in_bytes"), strict=False):
            if (folder / name).exists():
                limit = int((folder / name).read_text())
                return limit if limit < _NO_LIMIT else None
    return None


def oom_kills(own: Path = OWN, root: Path = ROOT) -> int:
    """Return the number of OOM kills in this process's group; 0 if it is unknown."""
    own_groups = [folder for folder, _ in _memory_folders(groups(own), root)]
    counts = memory_events(own, root)
    return next((counts[group]["oom_kill"] for group in own_groups if "oom_kill" in counts.get(group, {})), 0)


def memory_events(own: Path = OWN, root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return what the kernel has counted of exhausted memory, by group: this process's, and its parent."""
    events: dict[str, dict[str, int]] = {}
    for (group, _), name in zip(_memory_folders(groups(own), root), ("memory.events", "memory.oom_control"), strict=False):
        for each in (group, str(Path(group).parent)):
            with suppress(OSError):
                text = Path(f"{root}{each}", name).read_text()
                events[each] = {key: int(count) for key, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    return events


def _memory_folders(paths: dict[str, str], root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the group for memory and its folder, of version 2 and of version 1; none if unknown."""
    if paths:
        for group in (paths.get("", "/"), f"/memory{paths.get('memory', '')}"):
            yield group, Path(f"{root}{group}")


class Meter:
    """Reads the usage of this process's control group, and of the trainer's if that has its own.

    Between two readings it computes the number of busy processors. The processor time of a trainer that has ended still counts.
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
        """Return the CPU time of all trainers; `seconds` is that of the present one, None if none runs."""
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
