"""How many processors a trainer has here: a library that counts those of the machine starts far too many threads."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def count(quota: Path = _QUOTA) -> int:
    """Those that this process may run on, or fewer by the quota of its control group (cgroup v2), and 1 at least."""
    there = len(os.sched_getaffinity(0))
    try:
        microseconds, period = quota.read_text().split()
        there = min(there, math.ceil(int(microseconds) / int(period)))
    except (OSError, ValueError):  # no cgroup v2, or `max`, which is no quota
        pass
    return max(1, there)


def threads(processors: int) -> dict[str, str]:
    """The variables that size the pools of OpenMP and TensorFlow; as one operation may wait for another host, two at least."""
    return {
        "OMP_NUM_THREADS": str(processors),
        "TF_NUM_INTRAOP_THREADS": str(processors),
        "TF_NUM_INTEROP_THREADS": str(max(2, processors)),
    }
