"""The figures: one row each, added by a decorator.

    @benchmark("fab-list", what="seconds of `fab --list`, median of 9", against="python -c 'import fabric'", bar=1.5, aim=1.2)
    def fab_list(stack: BenchStack) -> Figure:
        return in_turn(9, lambda: ..., lambda: ...)

Add the module to SUITE in tests/benchmarks/__main__.py: then the row is run, shown and written with the others.
"""

from __future__ import annotations

import hashlib
import inspect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from benchmarks.stack import BenchStack
from infra.scale_tiers import ScaleTier


class TargetCrossing(NamedTuple):
    """The global step at which a training reached its target, and its `curve` of (step, metric)."""

    step: int
    curve: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Figure:
    """A result in the unit of its row: ours, and the peer's of the same run; None without a peer.

    `runs` and `peers` are the results of each run if there were several; of trainings to a target, `crossings` and
    `peer_crossings` are their steps.
    """

    value: float
    peer: float | None = None
    runs: tuple[float, ...] = ()
    peers: tuple[float, ...] = ()
    crossings: tuple[TargetCrossing, ...] = ()
    peer_crossings: tuple[TargetCrossing, ...] = ()

    @classmethod
    def of(
        cls,
        runs: Sequence[float],
        peers: Sequence[float] = (),
        crossings: Sequence[TargetCrossing] = (),
        peer_crossings: Sequence[TargetCrossing] = (),
    ) -> Self:
        """Return the medians of several runs."""
        peer = statistics.median(peers) if peers else None
        return cls(statistics.median(runs), peer, tuple(runs), tuple(peers), tuple(crossings), tuple(peer_crossings))

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.value / self.peer


def in_turn(repetitions: int, ours: Callable[[], float], peer: Callable[[], float]) -> Figure:
    """Return the medians of ours and the peer's, measured in turn, A B A B."""
    pairs = [(ours(), peer()) for _ in range(repetitions)]
    return Figure.of([value for value, _ in pairs], [value for _, value in pairs])


@dataclass(frozen=True)
class Benchmark:
    """One row. Bar and aim are of the ratio, or the value without a peer; `at_least`: more is better.

    `tier` is the cluster that it runs on, None for none: rows of one tier run consecutively, so that it comes up once.
    `unequal` lists in a line what differs between ours and the peer besides the measured property.
    """

    name: str
    what: str
    against: str | None
    bar: float
    aim: float | None
    measure: Callable[[BenchStack], Figure]
    tier: ScaleTier | None = ScaleTier.STANDARD_1
    unit: str = "s"
    at_least: bool = False
    unequal: str = ""

    @property
    def code(self) -> str:
        """The hash of the module that measures: a figure that other code measured does not belong to this row."""
        module = inspect.getmodule(getattr(self.measure, "func", self.measure))  # the function of a partial
        return hashlib.sha256((inspect.getsource(module) if module else "").encode()).hexdigest()[:12]

    @property
    def command(self) -> str:
        return f"make bench ONLY={self.name}"


REGISTRY: dict[str, Benchmark] = {}
_TIERS = (None, *ScaleTier)


class UnknownError(ValueError):
    """A name that no row has; the message lists the valid names."""


def add(row: Benchmark) -> None:
    """Add a row to the registry.

    Raises:
        ValueError: its name is used.
    """
    if row.name in REGISTRY:
        raise ValueError(f"there are two benchmarks {row.name}")
    REGISTRY[row.name] = row


def benchmark(
    name: str,
    *,
    what: str,
    against: str | None,
    bar: float,
    aim: float | None = None,
    tier: ScaleTier | None = ScaleTier.STANDARD_1,
    unit: str = "s",
    at_least: bool = False,
    unequal: str = "",
) -> Callable[[Callable[[BenchStack], Figure]], Callable[[BenchStack], Figure]]:
    """Register the decorated function under a name; the other arguments are Benchmark's."""

    def register(measure: Callable[[BenchStack], Figure]) -> Callable[[BenchStack], Figure]:
        add(Benchmark(name, what, against, bar, aim, measure, tier, unit, at_least, unequal))
        return measure

    return register


def chosen(names: Iterable[str], rows: Mapping[str, Benchmark] = REGISTRY) -> list[Benchmark]:
    """Return the rows of these names, or all, in the order in which they run.

    Raises:
        UnknownError: a name is unknown.
    """
    requested = set(names)
    if unknown := sorted(requested - rows.keys()):
        raise UnknownError(f"there is no benchmark {', '.join(map(repr, unknown))}; valid are {', '.join(rows)}")
    picked = [row for name, row in rows.items() if not requested or name in requested]
    return sorted(picked, key=lambda row: _TIERS.index(row.tier))
