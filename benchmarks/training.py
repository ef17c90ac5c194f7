"""What the cluster is for: how fast and how well it trains, against one process and against what a user would have otherwise.

All on the same processors: STANDARD_1's eight hosts share this machine with the one process that they are compared to.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.registry import Figure, benchmark
from benchmarks.stack import BenchStack
from benchmarks.trained import BATCH, Trained, alone, fetched, first_step_with, together

# Neither evaluations nor checkpoints while speed is measured.
_STEADY = "--eval-interval 100000 --checkpoint-steps 1000000"
_CNN = f"--model cnn --max-steps 900 {_STEADY}"
_MLP = f"--model mlp --max-steps 5000 --log-interval 0.2 {_STEADY}"
_CURVE = "--model cnn --max-steps 1500 --eval-interval 100000 --checkpoint-steps 20 --keep-checkpoints 100 --log-interval 0.2"
_TARGET = 0.97
_SEEDS_STEPS, _MWMS_STEPS = 2000, 900
_SEEDS = (1, 2, 3)


@cache
def _alone(arguments: str) -> Trained:
    """One process, its output dropped; run once, whoever asks."""
    with tempfile.TemporaryDirectory() as folder:
        return alone(arguments, Path(folder))


@cache
def _together(stack: BenchStack, label: str, arguments: str) -> Trained:
    return together(stack, label, arguments)


def _repeated(arguments: str) -> list[str]:
    """The same training twice, of another seed."""
    return [f"{arguments} --seed {seed}" for seed in _SEEDS[:2]]


def _medians(pairs: Sequence[tuple[float, float]]) -> Figure:
    """Ours and the peer's, as they were measured in turn."""
    return Figure(*(statistics.median(values) for values in zip(*pairs, strict=True)))


@cache
def _seeds_design(stack: BenchStack) -> Trained:
    package = "examples/cloudml"
    options = ("--package", package, "--config", f"{package}/config.yaml")
    return together(stack, "seeds", f"--model cnn --max-steps {_SEEDS_STEPS}", *options)


@benchmark(
    "async-rate",
    what="examples/s of STANDARD_1, cnn, strategy async, once all replicas train, median of 2",
    against="one process on the same cores",
    bar=0.9,
    aim=1.0,
    unit="examples/s",
    at_least=True,
)
def async_rate(stack: BenchStack) -> Figure:
    """In turn, as the machine is not equally fast all the time."""
    pairs = [
        (_together(stack, "async", arguments).examples_per_second, _alone(arguments).examples_per_second)
        for arguments in _repeated(_CNN)
    ]
    return _medians(pairs)


@benchmark(
    "async-to-accuracy",
    what=f"seconds from the first step to {_TARGET} of test accuracy, cnn, async, a checkpoint every 20 steps, median of 3",
    against="one process on the same cores",
    bar=1.25,
    aim=1.0,
)
def async_to_accuracy(stack: BenchStack) -> Figure:
    """Three seeds each: when a curve crosses a line is partly chance."""
    ours, peers = [], []
    for seed in _SEEDS:
        arguments = f"{_CURVE} --seed {seed}"
        trained = together(stack, "curve", arguments)
        with fetched(stack, trained.job) as folder:
            ours.append(_seconds_to(trained, Path(folder)))
        with tempfile.TemporaryDirectory() as folder:
            peers.append(_seconds_to(alone(arguments, Path(folder)), Path(folder)))
    return Figure(statistics.median(ours), statistics.median(peers))


def _seconds_to(trained: Trained, folder: Path) -> float:
    return trained.time_of(first_step_with(_TARGET, folder))


@benchmark(
    "async-rate-seeds",
    what="examples/s of STANDARD_1, cnn, strategy async, once all replicas train",
    against="examples/cloudml, between-graph replication of TensorFlow 1, on the same hosts",
    bar=1.3,
    aim=1.5,
    unit="examples/s",
    at_least=True,
)
def async_rate_seeds(stack: BenchStack) -> Figure:
    """Its workers come half a minute after its master; only what follows counts."""
    return Figure(_together(stack, "async", _repeated(_CNN)[0]).examples_per_second, _seeds_design(stack).examples_per_second)


@benchmark(
    "async-bytes",
    what="bytes that all hosts send for each example, cnn, strategy async, a whole job",
    against="examples/cloudml on the same hosts",
    bar=0.35,
    aim=0.15,
    unit="B",
)
def async_bytes(stack: BenchStack) -> Figure:
    """By the counters of the hosts' network interfaces."""
    ours, peer = _together(stack, "async", _repeated(_CNN)[0]), _seeds_design(stack)
    return Figure(*(trained.sent / (trained.steps[-1][2] * BATCH) for trained in (ours, peer)))


@benchmark(
    "last-worker",
    what="seconds from the master's first Train line to the last worker's first, cnn, strategy async",
    against=None,
    bar=3.0,
    aim=1.0,
)
def last_worker(stack: BenchStack) -> Figure:
    """The workers wait for the master's warm start on purpose."""
    return Figure(_together(stack, "async", _repeated(_CNN)[0]).last_first)


@benchmark(
    "sync-rate",
    what="examples/s of the master and 4 workers, cnn, strategy sync",
    against="examples/mwms, tf-keras and MultiWorkerMirroredStrategy, on the same hosts",
    bar=1.5,
    aim=1.9,
    unit="examples/s",
    at_least=True,
)
def sync_rate(stack: BenchStack) -> Figure:
    """The same batch of 100 a replica."""
    ours = together(stack, "sync", f"--strategy sync {_CNN}")
    peer = together(stack, "mwms", f"--model cnn --max-steps {_MWMS_STEPS}", "--package", "examples/mwms")
    return Figure(ours.examples_per_second, peer.examples_per_second)


@benchmark(
    "mlp-seconds",
    what="seconds of 5,000 steps of the mlp on STANDARD_1, strategy async, first Train line to last, median of 2",
    against="one process on the same cores",
    bar=1.5,
    aim=1.0,
)
def mlp_seconds(stack: BenchStack) -> Figure:
    """A model of 105,000 parameters: a step takes a millisecond, and all else shows."""
    repeated = _repeated(_MLP)
    return _medians([(_together(stack, "mlp", arguments).seconds, _alone(arguments).seconds) for arguments in repeated])


@benchmark(
    "accuracy-mlp",
    what="test accuracy of the mlp after 5,000 steps on STANDARD_1, strategy async",
    against=None,
    bar=0.96,
    aim=0.98,
    unit="",
    at_least=True,
)
def accuracy_mlp(stack: BenchStack) -> Figure:
    """As the job's last line has it."""
    return Figure(_together(stack, "mlp", _repeated(_MLP)[0]).accuracy)


@benchmark(
    "accuracy-cnn",
    what="test accuracy of the cnn after 10,000 steps on STANDARD_1, strategy async",
    against=None,
    bar=0.9931,
    aim=0.995,
    unit="",
    at_least=True,
)
def accuracy_cnn(stack: BenchStack) -> Figure:
    """As the job's last line has it."""
    return Figure(together(stack, "accuracy", f"--model cnn --max-steps 10000 {_STEADY}").accuracy)


def _memory(stack: BenchStack, host: str) -> Figure:
    ours, peer = _together(stack, "async", _repeated(_CNN)[0]).memory or {}, _seeds_design(stack).memory or {}
    return Figure(ours[host], peer[host])


@benchmark(
    "memory-ps",
    what="MB of the trainer's process at its peak on ps-0, cnn, strategy async",
    against="examples/cloudml on the same host",
    bar=1.0,
    aim=0.7,
    unit="MB",
)
def memory_ps(stack: BenchStack) -> Figure:
    """VmHWM, looked at every 4 s."""
    return _memory(stack, "ps-0")


@benchmark(
    "memory-worker",
    what="MB of the trainer's process at its peak on worker-0, cnn, strategy async",
    against="examples/cloudml on the same host",
    bar=1.0,
    aim=0.7,
    unit="MB",
)
def memory_worker(stack: BenchStack) -> Figure:
    """VmHWM, looked at every 4 s."""
    return _memory(stack, "worker-0")
