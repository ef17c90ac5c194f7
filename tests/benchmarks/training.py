"""The training speed of the cluster and its cost, against one process and against TensorFlow's own ways to distribute.

STANDARD_1's eight hosts share this machine's processors; the one process has all of them, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import BenchStack, say
from benchmarks.trained import BATCH, Trained, alone, process, seconds_a_step, together
from infra.scale_tiers import ScaleTier

# Neither evaluations nor checkpoints while speed is measured.
_STEADY = "--eval-interval 100000 --checkpoint-steps 1000000 --checkpoint-seconds 100000"
# The network of the peers.
_CNN = f"--model cnn --no-batch-norm --average 0 --max-steps 900 --log-interval 0.2 {_STEADY}"
_MLP = f"--model mlp --max-steps 5000 --log-interval 0.2 {_STEADY}"
_TF1_STEPS, _MWMS_STEPS = 2000, 900
_SEEDS = (1, 2, 3)
# A model of 9,610 by 9,610 and a little more, and one of next to nothing, in the same program.
_LARGE_MB, _LARGE, _SMALL = 400, "9610,9610", "8,8"
_FEW = f"--model mlp --batch-size 10 --max-steps 60 --log-interval 0.2 {_STEADY}"
_ROOM = "10GiB"
_LARGE_HOSTS = ("master-0", "worker-0", "ps-0")
_LOOK_SECONDS = 0.5
_WATCHED, _SAMPLE_SECONDS = ("ps-0", "worker-0"), 4.0
_PAIRS, _STEPS, _TRACED = len(_SEEDS), 400, 100


class Turn(NamedTuple):
    """The cluster, one process and TensorFlow 1's design, consecutively, as the machine's speed varies."""

    ours: Trained
    alone: Trained
    tf1: Trained


@cache
def _turns(stack: BenchStack) -> list[Turn]:
    """Return the trainings of the cnn by seed, run once for all rows."""
    return [Turn(_together(stack, "async", cnn), _alone(cnn), _tf1_design(stack)) for cnn in _repeated(_CNN)]


@cache
def _mlps(stack: BenchStack) -> list[tuple[Trained, Trained]]:
    """Return the trainings of the mlp on the cluster and as one process by seed, run once for all rows."""
    return [(_together(stack, "mlp", mlp), _alone(mlp)) for mlp in _repeated(_MLP)]


def _alone(arguments: str) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return alone(arguments, Path(folder))


def _together(stack: BenchStack, label: str, arguments: str, *options: str) -> Trained:
    return together(stack, label, arguments, *options, watched=_WATCHED, every=_SAMPLE_SECONDS)


def _tf1_design(stack: BenchStack) -> Trained:
    package = "examples/cloudml"
    arguments = f"--model cnn --max-steps {_TF1_STEPS}"
    return _together(stack, "tf1", arguments, "--package", package, "--config", f"{package}/config.yaml")


def _repeated(arguments: str) -> list[str]:
    return [f"{arguments} --seed {seed}" for seed in _SEEDS]


def _medians(pairs: Iterable[tuple[float, float]]) -> Figure:
    """Return the medians of ours and the peer's."""
    return Figure.of(*zip(*pairs, strict=True))


@benchmark(
    "async-rate",
    what="examples/s of STANDARD_1, cnn, strategy async, once all replicas train, median of 3",
    against="one process on the same cores",
    bar=0.95,
    aim=1.0,
    unit="examples/s",
    at_least=True,
)
def async_rate(stack: BenchStack) -> Figure:
    """Train without evaluations and checkpoints."""
    return _medians((turn.ours.examples_per_second, turn.alone.examples_per_second) for turn in _turns(stack))


@benchmark(
    "async-rate-seeds",
    what="examples/s of STANDARD_1, cnn, strategy async, once all replicas train, median of 3",
    against="examples/cloudml, between-graph replication of TensorFlow 1, on the same hosts",
    bar=1.3,
    aim=1.5,
    unit="examples/s",
    at_least=True,
)
def async_rate_seeds(stack: BenchStack) -> Figure:
    """Count the time after the last start: the peer's workers start half a minute after its master."""
    return _medians((turn.ours.examples_per_second, turn.tf1.examples_per_second) for turn in _turns(stack))


@benchmark(
    "async-bytes",
    what="bytes that all hosts send per example, cnn, strategy async, a whole job, median of 3",
    against="examples/cloudml on the same hosts",
    bar=0.35,
    aim=0.15,
    unit="B",
)
def async_bytes(stack: BenchStack) -> Figure:
    """Read the counters of the hosts' network interfaces."""
    return _medians((_sent(turn.ours), _sent(turn.tf1)) for turn in _turns(stack))


def _sent(trained: Trained) -> float:
    return trained.sent / (trained.steps[-1][2] * BATCH)


@benchmark(
    "last-worker",
    what="seconds from the master's first Train line to the end of the last worker's first full round, cnn, async, median of 3",
    against=None,
    bar=3.0,
    aim=1.0,
)
def last_worker(stack: BenchStack) -> Figure:
    """Use the second line of each worker: the first is of a single step."""
    return Figure.of([turn.ours.last_joined for turn in _turns(stack)])


@benchmark(
    "sync-rate",
    what="examples/s of the master and 4 workers, cnn, strategy sync, median of 3",
    against="examples/mwms, tf-keras and MultiWorkerMirroredStrategy, on the same hosts",
    bar=1.5,
    aim=1.9,
    unit="examples/s",
    at_least=True,
    unequal="ours synchronizes every 4 steps, and the peer, whose optimizer is Adam, at each",
)
def sync_rate(stack: BenchStack) -> Figure:
    """Train in turn, each with a batch of 100 a replica."""
    mwms = f"--model cnn --max-steps {_MWMS_STEPS}"
    pairs = (
        (together(stack, "sync", f"--strategy sync {cnn}"), together(stack, "mwms", mwms, "--package", "examples/mwms"))
        for cnn in _repeated(_CNN)
    )
    return _medians((ours.examples_per_second, peer.examples_per_second) for ours, peer in pairs)


@benchmark(
    "mlp-seconds",
    what="seconds of 5,000 steps of the mlp on STANDARD_1, strategy async, first Train line to last, median of 3",
    against="one process on the same cores",
    bar=1.5,
    aim=1.0,
)
def mlp_seconds(stack: BenchStack) -> Figure:
    """Train a model of 105,000 parameters: a step takes a millisecond, so every other cost shows."""
    return _medians((ours.seconds, peer.seconds) for ours, peer in _mlps(stack))


@benchmark(
    "accuracy-mlp",
    what="test accuracy of the mlp after 5,000 steps on STANDARD_1, strategy async, median of 3",
    against=None,
    bar=0.96,
    aim=0.98,
    unit="",
    at_least=True,
)
def accuracy_mlp(stack: BenchStack) -> Figure:
    """Read the job's last line."""
    return Figure.of([ours.accuracy for ours, _ in _mlps(stack)])


@benchmark(
    "job-step",
    what=f"seconds of a step of the cnn by scaletier.Job on one process, after the first {_TRACED}, median of {_PAIRS}",
    against="Keras's model.fit of the same compiled model, data and optimizer, on one process",
    bar=1.02,
    aim=0.95,
    tier=None,
    unequal="ours writes summaries for TensorBoard each second, the peer none; both print a line each second",
)
def job_step(stack: BenchStack) -> Figure:
    """Measure in turn, each in a process of its own."""
    del stack
    return in_turn(_PAIRS, lambda: _step("job"), lambda: _step("fit"))


def _step(way: str, steps: int = _STEPS, after: int = _TRACED) -> float:
    say(f"{steps} steps by {way}")
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--max-steps {steps} {_STEADY}".split()
        return seconds_a_step(process(["benchmarks.step_once", way, *flags], Path(folder)), after)


def _memory(stack: BenchStack, host: str) -> Figure:
    return _medians(((turn.ours.memory or {})[host], (turn.tf1.memory or {})[host]) for turn in _turns(stack))


for _name, _host in (("ps", "ps-0"), ("worker", "worker-0")):
    # VmHWM, sampled every 4 s.
    benchmark(
        f"memory-{_name}",
        what=f"MB of the trainer's process at its peak on {_host}, cnn, strategy async, median of 3",
        against="examples/cloudml on the same host",
        bar=1.0,
        aim=0.7,
        unit="MB",
    )(partial(_memory, host=_host))


@cache
def _large(stack: BenchStack) -> list[Mapping[str, float]]:
    """Return each host's memory for a large model as a multiple of the model, by seed."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.limited("memory", _ROOM):
        return [
            times(_peaks(stack, f"{few} --hidden-units {_LARGE}"), _peaks(stack, f"{few} --hidden-units {_SMALL}"), _LARGE_MB)
            for few in _repeated(_FEW)
        ]


def _peaks(stack: BenchStack, arguments: str) -> Mapping[str, float]:
    options = ("--replicas", "worker=1,ps=1")
    trained = together(stack, "memory", arguments, *options, watched=_LARGE_HOSTS, every=_LOOK_SECONDS)
    stack.fab("delete", trained.job, "--yes")
    return trained.memory or {}


def times(large: Mapping[str, float], small: Mapping[str, float], size: float) -> dict[str, float]:
    """Return each host's memory with a large model beyond that with a small one, as a multiple of its size; all in MB."""
    return {host: (large[host] - small[host]) / size for host in large}


def _multiple(stack: BenchStack, host: str) -> Figure:
    return Figure.of([large[host] for large in _large(stack)])


for _name, _host, _bar, _aim in (("chief", "master-0", 5.0, 4.0), ("worker", "worker-0", 5.0, 3.5), ("ps", "ps-0", 2.0, 1.5)):
    # VmHWM, sampled twice a second until the end.
    benchmark(
        f"memory-{_name}-400",
        what=f"peak memory of the trainer on {_host}, as times the model, beyond that with a tiny model: mlp with one matrix "
        f"that is most of its {_LARGE_MB} MB, async, master, 1 worker and 1 ps; median of 3",
        against=None,
        bar=_bar,
        aim=_aim,
        unit="times",
    )(partial(_multiple, host=_host))
