"""How fast the cluster trains, and what it takes for it, against one process and against what a user would have otherwise.

STANDARD_1's eight hosts share this machine's processors with the one process that they are compared to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.registry import Figure, benchmark
from benchmarks.stack import BenchStack, say
from benchmarks.trained import BATCH, Trained, alone, process, seconds_a_step, together
from infra.spec import ScaleTier

# Neither evaluations nor checkpoints while speed is measured.
_STEADY = "--eval-interval 100000 --checkpoint-steps 1000000 --checkpoint-seconds 100000"
_CNN = f"--model cnn --max-steps 900 --log-interval 0.2 {_STEADY}"
_MLP = f"--model mlp --max-steps 5000 --log-interval 0.2 {_STEADY}"
_SEEDS_STEPS, _MWMS_STEPS = 2000, 900
_SEEDS = (1, 2)
# A model of 9,610 by 9,610 and a little more, and one of next to nothing, in the same program.
_LARGE_MB, _LARGE, _SMALL = 400, "9610,9610", "8,8"
_FEW = f"--model mlp --batch-size 10 --max-steps 60 --log-interval 0.2 {_STEADY}"
_ROOM = "10GiB"
_LARGE_HOSTS = ("master-0", "worker-0", "ps-0")
_LOOK_SECONDS = 0.5
_WATCHED, _SAMPLE_SECONDS = ("ps-0", "worker-0"), 4.0
_PAIRS, _STEPS, _TRACED = 3, 400, 100


@cache
def _alone(arguments: str) -> Trained:
    """One process, its output dropped; run once, whoever asks."""
    with tempfile.TemporaryDirectory() as folder:
        return alone(arguments, Path(folder))


@cache
def _together(stack: BenchStack, label: str, arguments: str) -> Trained:
    return together(stack, label, arguments, watched=_WATCHED, every=_SAMPLE_SECONDS)


def _repeated(arguments: str) -> list[str]:
    """The same training twice, of another seed."""
    return [f"{arguments} --seed {seed}" for seed in _SEEDS]


def _medians(pairs: Sequence[tuple[float, float]]) -> Figure:
    """Ours and the peer's, as they were measured in turn."""
    return Figure.of(*zip(*pairs, strict=True))


@cache
def _seeds_design(stack: BenchStack) -> Trained:
    package = "examples/cloudml"
    options = ("--package", package, "--config", f"{package}/config.yaml")
    arguments = f"--model cnn --max-steps {_SEEDS_STEPS}"
    return together(stack, "seeds", arguments, *options, watched=_WATCHED, every=_SAMPLE_SECONDS)


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
    "job-step",
    what=f"seconds of a step of the cnn by scaletier.Job on one process, after the first {_TRACED}, median of {_PAIRS}",
    against="Keras's model.fit of the same compiled model, data and optimizer, on one process",
    bar=1.05,
    aim=0.95,
    tier=None,
    unequal="ours writes summaries for TensorBoard each second, the peer none; both print a line each second",
)
def job_step(stack: BenchStack) -> Figure:
    """In turn, each in a process of its own."""
    del stack
    return _medians([(_step("job"), _step("fit")) for _ in range(_PAIRS)])


def _step(way: str, steps: int = _STEPS, after: int = _TRACED) -> float:
    say(f"{steps} steps by {way}")
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--max-steps {steps} {_STEADY}".split()
        return seconds_a_step(process(["benchmarks.step_once", way, *flags], Path(folder)), after)


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


@cache
def _large(stack: BenchStack) -> Mapping[str, float]:
    """How many times a large model each host's trainer holds."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.limited("memory", _ROOM):
        large, small = (_peaks(stack, f"{_FEW} --hidden-units {units}") for units in (_LARGE, _SMALL))
    return times(large, small, _LARGE_MB)


def _peaks(stack: BenchStack, arguments: str) -> Mapping[str, float]:
    options = ("--replicas", "worker=1,ps=1")
    trained = together(stack, "memory", arguments, *options, watched=_LARGE_HOSTS, every=_LOOK_SECONDS)
    stack.fab("delete", trained.job, "--yes")
    return trained.memory or {}


def times(large: Mapping[str, float], small: Mapping[str, float], size: float) -> dict[str, float]:
    """What hosts hold more of with a large model than with a small one, as a multiple of its size; all in MB."""
    return {host: (large[host] - small[host]) / size for host in large}


_OF_LARGE = f"mlp with one matrix that is most of its {_LARGE_MB} MB, async, master, 1 worker and 1 ps"


@benchmark(
    "memory-chief-400",
    what=f"times the model that the master's trainer holds at its peak, beyond what it does with next to no model: {_OF_LARGE}",
    against=None,
    bar=3.0,
    unit="times",
)
def memory_chief_400(stack: BenchStack) -> Figure:
    """VmHWM, which the kernel keeps, looked at twice a second until the end."""
    return Figure(_large(stack)["master-0"])


@benchmark(
    "memory-worker-400",
    what=f"times the model that a worker's trainer holds at its peak, beyond what it does with next to no model: {_OF_LARGE}",
    against=None,
    bar=3.0,
    unit="times",
)
def memory_worker_400(stack: BenchStack) -> Figure:
    """As memory-chief-400."""
    return Figure(_large(stack)["worker-0"])


@benchmark(
    "memory-ps-400",
    what=f"times the model that the ps's trainer holds at its peak, beyond what it does with next to no model: {_OF_LARGE}",
    against=None,
    bar=1.0,
    unit="times",
)
def memory_ps_400(stack: BenchStack) -> Figure:
    """As memory-chief-400."""
    return Figure(_large(stack)["ps-0"])
