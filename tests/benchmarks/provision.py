"""From nothing to hosts that answer: `pulumi up` against plain `lxc launch`, and the memory of an idle host."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.launch import launched
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import NAME, BenchStack, say
from infra.lxd.api import client
from infra.lxd.orphans import existing_names
from infra.scale_tiers import ScaleTier

_CGROUPS = Path("/sys/fs/cgroup")


@benchmark(
    "up",
    what="seconds of `pulumi up` of STANDARD_1 from nothing, bridge and all, to ssh on all 8, median of 3",
    against="8 parallel `lxc launch` of the same hosts, project, bridge and volume made before, to ssh on all 8",
    bar=1.6,
    aim=1.2,
)
def up(stack: BenchStack) -> Figure:
    """Begin both with no host on the machine."""

    def peer() -> float:
        stack.down()
        say("lxc launch of the same hosts")
        return launched(ScaleTier.STANDARD_1)

    return in_turn(3, lambda: stack.up(ScaleTier.STANDARD_1), peer)


@benchmark(
    "memory-host",
    what="MB of an idle host: memory of its cgroup without the page cache of files, the largest of 8",
    against=None,
    bar=60,
    unit="MB",
)
def memory_host(stack: BenchStack) -> Figure:
    """Read from outside, so that no login counts. In a whole run it follows `up`, before any job."""
    stack.require(ScaleTier.STANDARD_1)
    return Figure(max(used_memory(cgroup_of(host)) for host in stack.inventory.names) / 1e6)


def cgroup_of(host: str) -> Path:
    """Return the folder of a host's memory controller on this machine, of cgroup version 2 or 1."""
    init = client(existing_names(NAME)[0].project).instances.get(host).state().pid
    return cgroup_folder(Path(f"/proc/{init}/cgroup").read_text(), _CGROUPS)


def cgroup_folder(table: str, root: Path) -> Path:
    """Return the host's own cgroup by /proc/PID/cgroup, not one of its systemd below.

    Raises:
        ValueError: there is none.
    """
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in table.splitlines())}
    base, path = (root / "memory", groups["memory"]) if "memory" in groups else (root, groups[""])
    parts = Path(path).parts[1:]
    depth = next((place for place, part in enumerate(parts, 1) if part.startswith("lxc.payload")), None)
    if depth is None:
        raise ValueError(f"{path} is in no cgroup of an instance")
    return base.joinpath(*parts[:depth])


def used_memory(folder: Path) -> int:
    """Return the bytes of a cgroup without its page cache of files; memory files, which are in that cache too, count."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    if (folder / "memory.current").exists():
        return int((folder / "memory.current").read_text()) - int(stat["file"]) + int(stat["shmem"])
    return int((folder / "memory.usage_in_bytes").read_text()) - int(stat["total_cache"]) + int(stat["total_shmem"])


@benchmark(
    "up-premium",
    what="seconds per host of `pulumi up` of PREMIUM_1 (31 hosts) from nothing to ssh on all, once",
    against="the same of STANDARD_1 (8 hosts), median of the run",
    bar=1.2,
    aim=1.0,
    tier=ScaleTier.PREMIUM_1,
)
def up_premium(stack: BenchStack) -> Figure:
    """Compare the time of more hosts with that of fewer."""
    if ScaleTier.STANDARD_1 not in stack.seconds:
        stack.up(ScaleTier.STANDARD_1)
    peer = statistics.median(stack.seconds[ScaleTier.STANDARD_1]) / 8
    return Figure(stack.up(ScaleTier.PREMIUM_1) / 31, peer)
