"""What the cluster is for: how fast and how well it trains, against one process and against what a user would have otherwise.

STANDARD_1's eight hosts share this machine's processors with the one process that they are compared to; in the rows `own-…`
each host, the one that they are compared to as well, has a fixed part of a core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.registry import Figure, benchmark
from benchmarks.stack import BenchStack
from benchmarks.trained import BATCH, Trained, alone, fetched, seconds_to, together
from infra.spec import ScaleTier

# Neither evaluations nor checkpoints while speed is measured.
_STEADY = "--eval-interval 100000 --checkpoint-steps 1000000 --checkpoint-seconds 100000"
_CNN = f"--model cnn --max-steps 900 --log-interval 0.2 {_STEADY}"
_MLP = f"--model mlp --max-steps 5000 --log-interval 0.2 {_STEADY}"
# The same grid for both, and enough steps that each comes to the target well before its rate is at nothing.
_CURVE = "--model cnn --eval-interval 100000 --checkpoint-seconds 100000 --keep-checkpoints 100 --log-interval 0.2"
_TARGET = 0.99
_OURS, _PEERS = f"{_CURVE} --max-steps 1500 --checkpoint-steps 50", f"{_CURVE} --max-steps 1000 --checkpoint-steps 50"
_SHARE = 0.2
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
    return Figure.of(*zip(*pairs, strict=True))


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


_STEPS_TOLD = "1,500 steps of all five against 1,000 of the one, as each needs; a checkpoint every 50 in both, on the master"


@benchmark(
    "async-to-accuracy",
    what=f"seconds from the first step to {_TARGET} of test accuracy, cnn, async, median of 3",
    against="one process on the same cores",
    bar=1.3,
    aim=1.0,
    unequal=_STEPS_TOLD,
)
def async_to_accuracy(stack: BenchStack) -> Figure:
    """Three seeds each: when a curve crosses a line is partly chance."""
    ours, peers = [], []
    for seed in _SEEDS:
        ours.append(_cluster_to_target(stack, f"{_OURS} --seed {seed}"))
        with tempfile.TemporaryDirectory() as folder:
            peers.append(seconds_to(_TARGET, alone(f"{_PEERS} --seed {seed}", Path(folder)), Path(folder)))
    return Figure.of(ours, peers)


def _cluster_to_target(stack: BenchStack, arguments: str, *options: str) -> float:
    trained = together(stack, "curve", arguments, *options)
    with fetched(stack, trained.job) as folder:
        return seconds_to(_TARGET, trained, Path(folder))


@cache
def _one_host_to_target(stack: BenchStack) -> list[float]:
    return [_cluster_to_target(stack, f"{_PEERS} --seed {seed}", "--scale-tier", "BASIC") for seed in _SEEDS]


def _on_own_cores(stack: BenchStack, strategy: str) -> Figure:
    """Each host has its own share of a core, the one host as well: only so can more hosts be seen to help."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.own_cores(_SHARE):
        ours = [_cluster_to_target(stack, f"{_OURS} --strategy {strategy} --seed {seed}") for seed in _SEEDS]
        return Figure.of(ours, _one_host_to_target(stack))


@benchmark(
    "own-async",
    what=f"seconds from the first step to {_TARGET} of test accuracy, cnn, async STANDARD_1, {_SHARE} core a host, median of 3",
    against=f"one such host, {_SHARE} core",
    bar=0.4,
    aim=0.25,
    unequal=_STEPS_TOLD,
)
def own_async(stack: BenchStack) -> Figure:
    """The parameter servers have such a share, too."""
    return _on_own_cores(stack, "async")


@benchmark(
    "own-sync",
    what=f"seconds from the first step to {_TARGET} of test accuracy, cnn, sync STANDARD_1, {_SHARE} core a host, median of 3",
    against=f"one such host, {_SHARE} core",
    bar=0.4,
    aim=0.25,
    unequal=_STEPS_TOLD,
)
def own_sync(stack: BenchStack) -> Figure:
    """As own-async; the parameter servers stand idle."""
    return _on_own_cores(stack, "sync")


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
    sent, peers = (trained.sent / (trained.steps[-1][2] * BATCH) for trained in (ours, peer))
    return Figure(sent, peers)


@benchmark(
    "last-worker",
    what="seconds from the master's first Train line to the end of the last worker's first full round, cnn, strategy async",
    against=None,
    bar=3.0,
    aim=1.0,
)
def last_worker(stack: BenchStack) -> Figure:
    """By the second line of each: its first is of a single step."""
    return Figure(_together(stack, "async", _repeated(_CNN)[0]).last_joined)


@benchmark(
    "sync-rate",
    what="examples/s of the master and 4 workers, cnn, strategy sync",
    against="examples/mwms, tf-keras and MultiWorkerMirroredStrategy, on the same hosts",
    bar=1.5,
    aim=1.9,
    unit="examples/s",
    at_least=True,
    unequal="ours meets every 4 steps, and the peer, whose optimizer is Adam, at each",
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
