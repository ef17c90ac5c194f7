"""The processor time of the Pulumi program per host, by the number of hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial

from benchmarks.measure import must
from benchmarks.registry import Benchmark, Figure, add, in_turn
from benchmarks.stack import BenchStack, say

# Many hosts, few hosts as the peer, bar and aim. With 8 hosts the fixed cost of a cluster shows.
_SIZES = ((31, 8, 1.0, 0.7), (75, 31, 1.5, 1.1), (300, 31, 1.5, 1.1))
_REPETITIONS = 3
_MILLI = 1000


def measure(stack: BenchStack, many: int, few: int) -> Figure:
    """Return CPU milliseconds per host, of many hosts and of few in turn."""

    def each(count: int) -> float:
        say(f"the program with {count} hosts")
        ran = must(stack.run(sys.executable, "-m", "benchmarks.program_once", str(count)), "the program under mocks")
        return float(ran.out) / count * _MILLI

    return in_turn(_REPETITIONS, lambda: each(many), lambda: each(few))


def _rows() -> Iterable[Benchmark]:
    for many, few, bar, aim in _SIZES:
        what = f"CPU ms per host of the program for Google Cloud, {many} hosts, under Pulumi's mocks, median of {_REPETITIONS}"
        work = partial(measure, many=many, few=few)
        yield Benchmark(f"program-{many}", what, f"the same with {few} hosts", bar, aim, work, None, "ms")


for _row in _rows():
    add(_row)
