"""The time and the network traffic to a test accuracy of 0.99, and the final accuracy.

In the rows `own-…` and `sync-to-accuracy` each host, also the peer's, has a fixed part of a core, so that more hosts can help.
In the others the hosts share this machine's processors, as does their peer.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.measure import MeasureError
from benchmarks.registry import Figure, TargetCrossing, benchmark
from benchmarks.stack import BenchStack, say
from benchmarks.trained import Trained, alone, curve, fetched, step_with, together
from infra.scale_tiers import ScaleTier

_CURVE = (
    "--model cnn --label-smoothing 0.1 --checkpoint-seconds 100000 --keep-checkpoints 100 "
    "--eval-interval 100000 --log-interval 0.2"
)
# Each training has as many: with `sync` all replicas wait for a checkpoint, so it costs five replicas five times as much.
_CHECKPOINTS = 6
TARGET = 0.99
_SECONDS = f"seconds from the first step to {TARGET} of test accuracy, cnn"
# For one and five: the fastest settings of `python -m benchmarks.schedules` with which each seed reaches the target.
_ONE_STEPS, _TWO_STEPS, _FIVE_STEPS, _TEN_STEPS, _MWMS_STEPS = 600, 800, 1000, 2000, 1500


def _length_flags(steps: int) -> str:
    """Return the flags of a training's length and checkpoints."""
    return f"--max-steps {steps} --checkpoint-steps {steps // _CHECKPOINTS}"


_PEERS, _TWO, _OURS, _TEN = (f"{_CURVE} {_length_flags(steps)}" for steps in (_ONE_STEPS, _TWO_STEPS, _FIVE_STEPS, _TEN_STEPS))
# As ours: with five replicas the learning rate is five times that of one, and the warm-up is as long.
_MWMS = (
    f"--model cnn {_length_flags(_MWMS_STEPS)} --steps-per-execution 10 "
    "--momentum 0.9 --clip 1.0 --learning-rate 0.5 --warmup-steps 30"
)
_CLOUDML = f"--model cnn {_length_flags(2000)}"
_ACCURACY = (
    "--model cnn --label-smoothing 0.1 --shift 2 --rotation 12 --max-steps 10000 "
    "--eval-interval 100000 --checkpoint-steps 1000000 --checkpoint-seconds 100000"
)
_SHARE, _SMALL_SHARE = 0.2, 0.1
_SLOWED, _PART = "worker-0", 0.25
_KILL_SECONDS = 20.0
_KILL = "sudo -n sh -c 'kill -KILL $(pgrep -u trainer)'"
_WORKERS = tuple(f"worker-{index}" for index in range(4))
_SEEDS = (1, 2, 3)


class Reached(NamedTuple):
    """The cost of a training until the target: seconds from its first Train line, bytes that all hosts sent, and steps."""

    seconds: float
    sent: float
    crossing: TargetCrossing

    @classmethod
    def at(cls, trained: Trained, points: Sequence[tuple[int, float]]) -> Reached:
        """Return the cost of a training by its curve of (step, test accuracy).

        Raises:
            MeasureError: it does not reach the target.
        """
        step = step_with(TARGET, points)
        return cls(trained.time_of(step), trained.sent_until(step), TargetCrossing(step, points))


def _reached(
    stack: BenchStack,
    label: str,
    arguments: str,
    *options: str,
    tier: ScaleTier = ScaleTier.STANDARD_1,
    beside: Callable[[threading.Event], None] | None = None,
) -> Reached:
    return _reached_by(stack, together(stack, label, arguments, *options, tier=tier, beside=beside))


def _reached_by(stack: BenchStack, trained: Trained) -> Reached:
    with fetched(stack, trained.job) as folder:
        reached = Reached.at(trained, curve(Path(folder)))
    # The bucket has no space for the checkpoints of many jobs.
    stack.fab("delete", trained.job, "--yes")
    return reached


def _each_seed(
    stack: BenchStack, label: str, arguments: str, *options: str, tier: ScaleTier = ScaleTier.STANDARD_1
) -> list[Reached]:
    """Return the costs of three seeds: a curve crosses a line partly by chance."""
    return [_reached(stack, label, f"{arguments} --seed {seed}", *options, tier=tier) for seed in _SEEDS]


def _figure(
    ours: Sequence[Reached], peers: Sequence[Reached], cost: Callable[[Reached], float] = lambda each: each.seconds
) -> Figure:
    """Return the medians of a cost, with all crossings."""
    crossings = ([each.crossing for each in side] for side in (ours, peers))
    return Figure.of([*map(cost, ours)], [*map(cost, peers)], *crossings)


@cache
def _shared(stack: BenchStack, seed: int) -> Reached:
    """Return the cost of async on STANDARD_1, whose hosts share all processors."""
    return _reached(stack, "curve", f"{_OURS} --seed {seed}")


@cache
def _five(stack: BenchStack, strategy: str) -> list[Reached]:
    """Return the costs of STANDARD_1 while its hosts have shares of their own."""
    return _each_seed(stack, strategy, f"{_OURS} --strategy {strategy}")


@cache
def _one(stack: BenchStack, tier: ScaleTier, share: float) -> list[Reached]:
    """Return the costs of one host of a cluster while each has this share of a core.

    The seeds run at once, each on a host, and so a share, of its own.
    """
    say(f"one host with {share} of a core, of each seed")

    def train(seed: int) -> Trained:
        return together(stack, f"one-{seed}", f"{_PEERS} --seed {seed}", "--scale-tier", "BASIC", tier=tier)

    with ThreadPoolExecutor() as threads:
        trained = list(threads.map(train, _SEEDS))
    return [_reached_by(stack, each) for each in trained]


def _unequal(replicas: str, steps: int) -> str:
    checkpoints = f"with {_CHECKPOINTS} checkpoints of the master in both"
    return f"{steps:,} steps of {replicas} against {_ONE_STEPS:,} of one, as each needs, {checkpoints}"


_FIVE_UNEQUAL = _unequal("all five", _FIVE_STEPS)
_ONES = "the peer's three seeds train at once, each on a host of its own"
_SERVERS = "each parameter server has such a share, too"
_UNDISTURBED = f"the same undisturbed, {_SHARE} core a host"
_NOT_IN_TURN = "only the order: the peer's runs are those of own-async"


@benchmark(
    "async-to-accuracy",
    what=f"{_SECONDS}, async, median of 3",
    against="one process on the same cores",
    bar=1.3,
    aim=1.0,
    unequal=_FIVE_UNEQUAL,
)
def async_to_accuracy(stack: BenchStack) -> Figure:
    """Measure in turn, as the machine's speed varies."""

    def peer(seed: int) -> Reached:
        with tempfile.TemporaryDirectory() as folder:
            return Reached.at(alone(f"{_PEERS} --seed {seed}", Path(folder)), curve(Path(folder)))

    pairs = [(_shared(stack, seed), peer(seed)) for seed in _SEEDS]
    return _figure([ours for ours, _ in pairs], [peers for _, peers in pairs])


@benchmark(
    "async-bytes-to-accuracy",
    what=f"bytes that all hosts send until {TARGET} of test accuracy, cnn, async STANDARD_1, median of 3",
    against="examples/cloudml, between-graph replication of TensorFlow 1 and Adam, on the same hosts",
    bar=0.1,
    aim=0.03,
    unit="B",
    unequal="ours normalizes batches, smooths labels and averages weights, has Nesterov's momentum, a rate that falls to the "
    f"last of {_FIVE_STEPS:,} steps, and the model sent to the master for each checkpoint; the peer has Adam at 0.001, 2,000 "
    "steps, and servers that write their checkpoints themselves",
)
def async_bytes_to_accuracy(stack: BenchStack) -> Figure:
    """Read the counters of the hosts' network interfaces."""
    package = "examples/cloudml"
    options = ("--package", package, "--config", f"{package}/config.yaml")
    peers = [_reached(stack, "cloudml", _CLOUDML, *options) for _ in _SEEDS]
    return _figure([_shared(stack, seed) for seed in _SEEDS], peers, lambda each: each.sent)


def _own(stack: BenchStack, strategy: str) -> Figure:
    return _on_own_cores(stack, lambda: _five(stack, strategy))


for _strategy, _bar, _aim, _besides in (("async", 0.333, 0.25, f"; {_SERVERS}"), ("sync", 0.357, 0.286, "")):
    benchmark(
        f"own-{_strategy}",
        what=f"{_SECONDS}, {_strategy} STANDARD_1, {_SHARE} core a host, median of 3",
        against=f"one such host, {_SHARE} core",
        bar=_bar,
        aim=_aim,
        unequal=f"{_FIVE_UNEQUAL}; {_ONES}{_besides}",
    )(partial(_own, strategy=_strategy))


@benchmark(
    "own-two",
    what=f"{_SECONDS}, async, master and 1 worker, {_SHARE} core a host, median of 3",
    against=f"one such host, {_SHARE} core",
    bar=0.7,
    aim=0.55,
    unequal=f"{_unequal('both', _TWO_STEPS)}; {_ONES}; {_SERVERS}",
)
def own_two(stack: BenchStack) -> Figure:
    """Use all three parameter servers, as the others do."""
    return _on_own_cores(stack, lambda: _each_seed(stack, "two", _TWO, "--replicas", "worker=1,ps=3"))


@benchmark(
    "own-ten",
    what=f"{_SECONDS}, async, master and 9 workers, {_SMALL_SHARE} core a host, median of 3",
    against=f"one such host, {_SMALL_SHARE} core",
    bar=0.25,
    aim=0.167,
    tier=ScaleTier.CUSTOM,
    unequal=f"{_unequal('all ten', _TEN_STEPS)}; {_ONES}; {_SERVERS}",
)
def own_ten(stack: BenchStack) -> Figure:
    """Give each host a tenth of a core: ten hosts of a fifth need more than this machine has."""
    tier = ScaleTier.CUSTOM
    return _on_own_cores(stack, lambda: _each_seed(stack, "ten", _TEN, tier=tier), tier, _SMALL_SHARE)


def _on_own_cores(
    stack: BenchStack,
    ours: Callable[[], Sequence[Reached]],
    tier: ScaleTier = ScaleTier.STANDARD_1,
    share: float = _SHARE,
) -> Figure:
    stack.require(tier)
    with stack.own_cores(share):
        return _figure(ours(), _one(stack, tier, share))


@benchmark(
    "own-slowed",
    what=f"{_SECONDS}, async STANDARD_1, {_SHARE} core a host, {_PART} of that for {_SLOWED}, median of 3",
    against=_UNDISTURBED,
    bar=1.1,
    aim=1.02,
    unequal=_NOT_IN_TURN,
)
def own_slowed(stack: BenchStack) -> Figure:
    """Slow a host like one whose neighbours use its processor."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.own_cores(_SHARE):
        peers = _five(stack, "async")
        with stack.slowed(_SLOWED, _PART):
            return _figure(_each_seed(stack, "slowed", _OURS), peers)


@benchmark(
    "own-killed",
    what=f"{_SECONDS}, async STANDARD_1, {_SHARE} core a host, a worker's trainer killed each {_KILL_SECONDS:g} s, median of 3",
    against=_UNDISTURBED,
    bar=1.1,
    aim=1.02,
    unequal=_NOT_IN_TURN,
)
def own_killed(stack: BenchStack) -> Figure:
    """Kill by SIGKILL; the seed of a training also chooses the workers."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.own_cores(_SHARE):
        return _figure([_killed(stack, seed) for seed in _SEEDS], _five(stack, "async"))


def _killed(stack: BenchStack, seed: int) -> Reached:
    killer = Killer(stack, victims(seed, _WORKERS))
    reached = _reached(stack, "killed", f"{_OURS} --seed {seed}", beside=killer.run)
    if not killer.kills:
        raise MeasureError("no worker was killed")
    return reached


def victims(seed: int, workers: Sequence[str]) -> Iterator[str]:
    """Yield without end the worker to kill next: each with the same chance, and equal for a seed."""
    chance = np.random.default_rng(seed)
    while True:
        yield workers[int(chance.integers(len(workers)))]


class Killer:
    """Kills a worker's trainer repeatedly; `kills` is the number of successful kills."""

    def __init__(self, stack: BenchStack, victims: Iterator[str], seconds: float = _KILL_SECONDS) -> None:
        self.kills = 0
        self._stack, self._victims, self._seconds = stack, victims, seconds

    def run(self, over: threading.Event) -> None:
        """Kill one each `seconds` until the training is over."""
        while not over.wait(self._seconds):
            worker = next(self._victims)
            code = self._stack.run(*self._stack.ssh(worker, _KILL)).code
            self.kills += not code
            say(f"{worker} has no trainer to kill" if code else f"the trainer of {worker} is killed")


@benchmark(
    "sync-to-accuracy",
    what=f"{_SECONDS}, sync on the master and 4 workers, {_SHARE} core a host, median of 3",
    against="examples/mwms, tf-keras and MultiWorkerMirroredStrategy with steps_per_execution, on the same hosts",
    bar=0.7,
    aim=0.5,
    unequal=f"ours normalizes batches, smooths labels and averages weights, and takes {_FIVE_STEPS:,} steps of all five, the "
    f"peer {_MWMS_STEPS:,}, as each needs; ours synchronizes every 4 steps, the peer at each; the peer's clock "
    "begins after its first 10 updates, in which it builds its graph, ours after its first; ours saves the optimizer's "
    "variables, too",
)
def sync_to_accuracy(stack: BenchStack) -> Figure:
    """Use the same optimizer, rates and batches in both, and as many checkpoints."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.own_cores(_SHARE):
        ours = _five(stack, "sync")
        return _figure(ours, [_reached(stack, "mwms", _MWMS, "--package", "examples/mwms") for _ in _SEEDS])


@benchmark(
    "accuracy-cnn",
    what="test accuracy of the cnn after 10,000 steps on STANDARD_1, async, varied images, label smoothing, mean of 3",
    against=None,
    bar=0.9950,
    aim=0.9960,
    unit="",
    at_least=True,
)
def accuracy_cnn(stack: BenchStack) -> Figure:
    """Read evaluation.json of the job's output."""
    runs = []
    for seed in _SEEDS:
        job = together(stack, "accuracy", f"{_ACCURACY} --seed {seed}").job
        with fetched(stack, job) as folder:
            runs.append(evaluated(Path(folder)))
    return Figure(round(fmean(runs), 4), None, tuple(runs))


def evaluated(folder: Path) -> float:
    """Return the test accuracy of the finished model in a job's output.

    Raises:
        MeasureError: there is none.
    """
    try:
        return float(json.loads((folder / "evaluation.json").read_text())["accuracy"])
    except (OSError, ValueError, KeyError) as error:
        raise MeasureError(f"the job's evaluation.json has no accuracy: {error}") from None
