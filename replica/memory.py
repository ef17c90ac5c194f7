"""What the kernel tells a unit about the memory that it ran out of."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

# What version 1 says of a group that has none.
_NO_LIMIT = 1 << 60


def _groups(own: Path) -> tuple[str, str]:
    """This process's control group, of version 2 and of version 1's for memory; OSError or ValueError where nobody tells."""
    path = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines())
    return path.get("", "/"), f"/memory{path.get('memory', '')}"


def limit(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes of memory that this process's cgroup may have; None where it is not limited, or nobody tells."""
    with suppress(OSError, ValueError):
        newer, older = _groups(own)
        files = [f"{newer}/memory.max", f"{older}/memory.limit_in_bytes"]
        for file in (Path(f"{root}{name}") for name in files):
            if file.exists():
                found = int(file.read_text())
                return found if found < _NO_LIMIT else None
    return None


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this one's cgroup the kernel has killed for want of memory; 0 where neither v2 nor v1 tells."""
    with suppress(OSError):
        newer, older = _groups(own)
        files = [f"{newer}/memory.events", f"{older}/memory.oom_control"]
        for file in (Path(f"{root}{name}") for name in files):
            if file.exists() and (found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)):
                return int(found[1])
    return 0


def events(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> dict[str, dict[str, int]]:
    """All that the kernel has counted of memory that ran out, by control group: this process's, and the one that it is in."""
    found = {}
    with suppress(OSError):
        newer, older = _groups(own)
        groups = [(Path(newer), "memory.events"), (Path(older), "memory.oom_control")]
        for group, name in groups:
            for folder in (group, group.parent):
                with suppress(OSError):
                    text = Path(f"{root}{folder}", name).read_text()
                    found[str(folder)] = {key: int(count) for key, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    return found
