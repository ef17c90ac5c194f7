"""Screens: how often they are refreshed, their processor time, and the cost of reading usage on a host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from statistics import median

from benchmarks.measure import MeasureError, running
from benchmarks.pty import Watched, watch
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import ROOT, BenchStack, say
from infra.scale_tiers import ScaleTier, preset
from jobs.paths import CODE_DIR, PYTHON
from jobs.records import Plan

_SECONDS = 30.0
_STACK = "bench-top"
_HOSTS = "31 hosts that are only records in a folder of this machine, which another process renews every 5 s"
_READS = 2000
# The agent's own code, on a host; the cgroup is that of the login, which has the same files.
_METER = f"""
import sys, time
sys.path.insert(0, {CODE_DIR!r})
from jobs.cgroup import Meter
read = Meter(time.monotonic).read
read()
began = time.process_time()
for _ in range({_READS}):
    read()
print((time.process_time() - began) / {_READS})
"""


@contextmanager
def _cluster(stack: BenchStack) -> Iterator[dict[str, str]]:
    """Yield the environment in which `fab` reads the records of 31 hosts that do not exist."""
    folder = ROOT / ".scaletier" / _STACK
    with tempfile.TemporaryDirectory() as bucket:
        hosts = [
            {
                "name": host_id.name,
                "role": host_id.role,
                "index": host_id.index,
                "address": f"10.0.0.{place}",
                "machineType": "n1-highcpu-16",
                "cpus": 2,
                "memoryBytes": 2_000_000_000,
                "accelerator": None,
                "hourlyCost": None,
                "createTime": None,
            }
            for place, host_id in enumerate(preset(ScaleTier.PREMIUM_1).hosts, 2)
        ]
        whole = {"schema": 1, "stack": _STACK, "target": "lxd", "scaleTier": str(ScaleTier.PREMIUM_1), "hosts": hosts}
        place = {"bucket": bucket, "operatorBucket": bucket, "pollSeconds": 1.0, "sharedCpus": 2, "labels": {}}
        folder.mkdir(parents=True)
        try:
            (folder / "inventory.json").write_text(json.dumps(whole | place))
            with running([sys.executable, "-m", "benchmarks.beats", bucket], stack.env, ROOT, subprocess.DEVNULL):
                yield {**stack.env, "PULUMI_STACK": _STACK}
        finally:
            shutil.rmtree(folder)


@cache
def _top(stack: BenchStack) -> Watched:
    with _cluster(stack) as env:
        say(f"fab top for {_SECONDS:g} s")
        watched = watch(["fab", "top"], env, ROOT, _SECONDS)
    if len(watched.frames) < _SECONDS / 5:
        raise MeasureError(f"fab top drew {len(watched.frames)} frames")
    return watched


@benchmark(
    "top-refresh",
    what=f"seconds from a frame of `fab top` to the next, median of {_SECONDS:g} s; {_HOSTS}",
    against=None,
    bar=1.0,
    aim=0.5,
    tier=None,
)
def top_refresh(stack: BenchStack) -> Figure:
    """Watch a terminal of 50 lines."""
    return Figure(median(later - before for before, later in pairwise(_top(stack).frames)))


@benchmark(
    "top-cpu",
    what="percent of a processor of this fab top, with its start and end",
    against=None,
    bar=25,
    aim=10,
    tier=None,
    unit="%",
)
def top_cpu(stack: BenchStack) -> Figure:
    """Measure the same run as top-refresh."""
    return Figure(_top(stack).share)


@benchmark(
    "screen-cpu",
    what=f"percent of a processor of a followed job's screen beyond that of --plain, 8 hosts, 5 lines/s each, on a "
    f"terminal for {_SECONDS:g} s, with its start and end",
    against=None,
    bar=15,
    unit="%",
)
def screen_cpu(stack: BenchStack) -> Figure:
    """Follow one running job twice, as `fab train` shows a job."""
    stack.require(ScaleTier.STANDARD_1)
    follow = ["fab", "logs", "all", "--follow", "--lines", "0", "--job"]
    with stack.tiny_job("screen", "--seconds 300 --rate 5") as job:
        say("following on a screen, and in plain lines")
        screen = watch([*follow, job], stack.env, ROOT, _SECONDS)
        plain = watch([*follow, job, "--plain"], stack.env, ROOT, _SECONDS)
    say(f"screen {screen.share:.1f} %, plain {plain.share:.1f} %")
    return Figure(screen.share - plain.share)


@benchmark(
    "usage-cpu",
    what=f"percent of a processor that an agent takes to read its unit's usage twice per heartbeat; mean of {_READS} readings",
    against=None,
    bar=1,
    aim=0.1,
    unit="%",
)
def usage_cpu(stack: BenchStack) -> Figure:
    """Leave out the three numbers in each heartbeat: they add no write."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.tiny_job("usage", "--seconds 60"):
        seconds = float(stack.on("master-0", f"{PYTHON} -", _METER.encode()))
    return Figure(100 * seconds / (Plan.heartbeatSeconds / 2))
