"""Screens: how often the cluster is seen anew, what that takes of a processor, and what usage costs those who tell it."""

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

from benchmarks.measure import MeasureError, must, running
from benchmarks.pty import Watched, watch
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import ROOT, BenchStack, say
from infra.spec import ScaleTier, preset
from jobs.records import Plan
from ops.package.push import CODE_DIR, PYTHON

_SECONDS = 30.0
_STACK = "bench-top"
_NOT_EQUAL = "31 hosts' records in a folder of this machine, renewed every 5 s by a process beside it: records, and no machines"
_READS = 2000
# Of the replica's own code, on a host; the group is that of who asks, which has the same files.
_METER = f"""
import sys, time
sys.path.insert(0, {CODE_DIR!r})
from hosts.agent.cgroup import Meter
read = Meter(time.monotonic).read
read()
began = time.process_time()
for _ in range({_READS}):
    read()
print((time.process_time() - began) / {_READS})
"""


@contextmanager
def _cluster(stack: BenchStack) -> Iterator[dict[str, str]]:
    """The environment in which `fab` sees 31 hosts that are nothing but records."""
    folder = ROOT / ".scaletier" / _STACK
    with tempfile.TemporaryDirectory() as bucket:
        hosts = [
            {
                "name": replica.name,
                "role": replica.role,
                "index": replica.index,
                "address": f"10.0.0.{place}",
                "machineType": "n1-highcpu-16",
                "cpus": 2,
                "memoryBytes": 2_000_000_000,
                "accelerator": None,
                "hourlyCost": None,
                "createTime": None,
            }
            for place, replica in enumerate(preset(ScaleTier.PREMIUM_1).replicas, 2)
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
        seen = watch(["fab", "top"], env, ROOT, _SECONDS)
    if len(seen.pictures) < _SECONDS / 5:
        raise MeasureError(f"fab top drew {len(seen.pictures)} pictures")
    return seen


@benchmark(
    "top-refresh",
    what=f"seconds from a picture of `fab top` to the next, median of {_SECONDS:g} s; {_NOT_EQUAL}",
    against=None,
    bar=1.0,
    aim=0.5,
    tier=None,
)
def top_refresh(stack: BenchStack) -> Figure:
    """On a terminal of 50 lines."""
    return Figure(median(later - before for before, later in pairwise(_top(stack).pictures)))


@benchmark(
    "top-cpu",
    what="percent of a processor that this fab top takes, its start and its end too",
    against=None,
    bar=25,
    aim=10,
    tier=None,
    unit="%",
)
def top_cpu(stack: BenchStack) -> Figure:
    """As top-refresh."""
    return Figure(_top(stack).share)


@benchmark(
    "screen-cpu",
    what=f"percent of a processor that the screen of a followed job takes beyond --plain, 8 hosts, 5 lines/s each, on a "
    f"terminal for {_SECONDS:g} s, start and end too",
    against=None,
    bar=15,
    unit="%",
)
def screen_cpu(stack: BenchStack) -> Figure:
    """As `fab train` shows a job, but of one that runs, so that both follow the same one."""
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
    what=f"percent of a processor that a replica takes to see what its unit uses, twice a heartbeat; mean of {_READS} readings",
    against=None,
    bar=1,
    aim=0.1,
    unit="%",
)
def usage_cpu(stack: BenchStack) -> Figure:
    """That three numbers more are written with each heartbeat is not in it: no write is added."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.tiny_job("usage", "--seconds 60"):
        ran = must(stack.run(*stack.ssh("master-0", f"{PYTHON} -"), stdin=_METER.encode()), "reading usage")
    return Figure(100 * float(ran.out) / (Plan.heartbeatSeconds / 2))
