"""How a plan grows with its hosts: what the Pulumi program costs for each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial

from benchmarks.measure import medians, must
from benchmarks.registry import Benchmark, Figure, add
from benchmarks.stack import BenchStack, say

# Many hosts, fewer to compare with, bar and aim: 8 hosts carry what every cluster costs once.
_SIZES = ((31, 8, 1.0, 0.7), (75, 31, 1.5, 1.1), (300, 31, 1.5, 1.1))
_REPETITIONS = 3
_MILLI = 1000


def measure(stack: BenchStack, many: int, few: int) -> Figure:
    """CPU milliseconds a host, of many hosts and of few in turn."""

    def each(count: int) -> float:
        say(f"the program with {count} hosts")
        ran = must(stack.run(sys.executable, "-m", "benchmarks.program_once", str(count)), "the program under mocks")
        return float(ran.out) / count * _MILLI

    return Figure(*medians(_REPETITIONS, lambda: each(many), lambda: each(few)))


def _rows() -> Iterable[Benchmark]:
    for many, few, bar, aim in _SIZES:
        what = f"CPU ms a host of the program for Google Cloud, {many} hosts, under Pulumi's mocks, median of {_REPETITIONS}"
        work = partial(measure, many=many, few=few)
        yield Benchmark(f"program-{many}", what, f"the same with {few} hosts", bar, aim, work, None, "ms")


for _row in _rows():
    add(_row)
