"""Commands that a user waits for: `fab --list`, the first line of a log, and the memory of `fab`."""

from __future__ import annotations

import sys

from benchmarks.measure import first_byte, must, peak_memory
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import ROOT, TINY, BenchStack, job_id, say
from infra.scale_tiers import ScaleTier


@benchmark(
    "fab-list", what="seconds of `fab --list`, median of 9", against="python -c 'import fabric'", bar=1.5, aim=1.2, tier=None
)
def fab_list(stack: BenchStack) -> Figure:
    """Measure the start of the command itself."""

    def ours() -> float:
        return must(stack.run("fab", "--list"), "fab --list").seconds

    def peer() -> float:
        return must(stack.run(sys.executable, "-c", "import fabric"), "import fabric").seconds

    ours(), peer()
    return in_turn(9, ours, peer)


@benchmark(
    "logs-first-line",
    what="seconds of `fab logs master-0 --lines 10` to its first byte on stdout, median of 9",
    against="ssh master-0 journalctl -u scaletier -n 10",
    bar=2.5,
    aim=1.5,
)
def logs_first_line(stack: BenchStack) -> Figure:
    """Read the log of a job that has ended from its host."""
    stack.require(ScaleTier.STANDARD_1)
    stack.fab("train", "--job", job_id("first_line"), "--package", TINY, "--args", "--seconds 2")
    ours = ("fab", "logs", "master-0", "--lines", "10")
    peer = stack.ssh("master-0", "sudo -n journalctl -u scaletier -n 10")

    def one(command: tuple[str, ...] | list[str]) -> float:
        return first_byte(command, stack.env, ROOT)

    one(ours), one(peer)
    return in_turn(9, lambda: one(ours), lambda: one(peer))


@benchmark(
    "memory-fab",
    what="MB of resident memory of `fab` at its peak, 31 hosts: the larger of `fab train` (10 s of log) and `fab hosts`",
    against=None,
    bar=150,
    tier=ScaleTier.PREMIUM_1,
    unit="MB",
)
def memory_fab(stack: BenchStack) -> Figure:
    """Hold one connection and one channel a host, and read all their lines."""
    stack.require(ScaleTier.PREMIUM_1)
    job = job_id("memory")
    say("fab train with 31 hosts")
    train = ["fab", "train", "--job", job, "--package", TINY, "--args", "--seconds 10 --rate 5"]
    try:
        return Figure(max(peak_memory(command, stack.env, ROOT) for command in (train, ["fab", "hosts"])))
    finally:
        stack.run("fab", "cancel", job)
