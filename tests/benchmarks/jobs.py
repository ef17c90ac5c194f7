"""The delays of a job that a user notices: its first training step and its log lines; and its agents' memory."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable

from benchmarks.job_events import LoggedLine, log_of
from benchmarks.measure import Lines, MeasureError, end, percentile, running
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import DATA, MNIST, ROOT, BenchStack, job_id, say
from infra.inventory import JOBS_UNIT, Inventory
from infra.scale_tiers import ScaleTier
from jobs.paths import PYTHON

_STEP_SECONDS = 180.0
_FOLLOW_SECONDS = 20.0
_AT = re.compile(r"step \d+: at (\d+\.\d+)$")


@benchmark(
    "first-step",
    what="seconds of `fab train` (cnn, STANDARD_1, MNIST in the bucket) to the time of the first `Train [` line, median of 2",
    against="import tensorflow on the same 8 hosts at once, by ssh",
    bar=1.8,
    aim=1.3,
)
def first_step(stack: BenchStack) -> Figure:
    """Measure from the command's start to the time of the log line itself."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    upload_data(inventory)
    command = f"{PYTHON} -c 'import tensorflow'"
    imports = [stack.ssh(name, command) for name in inventory.names]
    stack.on(inventory.names[0], command)  # from the disk into memory, for both alike

    def peer() -> float:
        say("import tensorflow on all hosts")
        return in_parallel(stack, imports)

    return in_turn(2, lambda: _first_step(stack), peer)


def upload_data(inventory: Inventory) -> None:
    """Upload MNIST to the bucket, which `fab train` otherwise does for the first job of a cluster."""
    from ops.cluster.cluster import ClusterClient

    cluster = ClusterClient(inventory)
    bucket = cluster.bucket
    there = bucket.sizes(DATA)
    for path in sorted(MNIST.glob("*.tfrecord*")):
        if there.get(path.name) != path.stat().st_size:
            bucket.upload(f"{DATA}/{path.name}", path)
    cluster.fleet.close()


def in_parallel(stack: BenchStack, commands: Iterable[list[str]]) -> float:
    """Return seconds until the last of these commands, all started at once, has ended.

    Raises:
        MeasureError: one fails.
    """
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            command, env=stack.env, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for command in commands
    ]
    try:
        codes = [process.wait(timeout=_STEP_SECONDS) for process in processes]
        seconds = time.monotonic() - began
    finally:
        for process in processes:
            end(process)
    if any(codes):
        raise MeasureError(f"commands on hosts ended with {codes}")
    return seconds


def _first_step(stack: BenchStack) -> float:
    job = job_id("first_step")
    say("fab train to its first step")
    began = time.time()
    command = ["fab", "train", "--job", job, "--args", "--model cnn --max-steps 100000"]
    try:
        with running(command, stack.env, ROOT, subprocess.DEVNULL) as process:
            deadline = time.monotonic() + _STEP_SECONDS
            if not any("Train [" in line for _, line in Lines(process).until(deadline)):
                raise MeasureError(f"{' '.join(command)} reached no step within {_STEP_SECONDS:.0f} s")
        return first_train_line(log_of(stack, job)) - began
    finally:
        stack.run("fab", "cancel", job)


def first_train_line(log: Iterable[LoggedLine]) -> float:
    """Return the Unix time of the first training step in a log.

    Raises:
        MeasureError: there is none.
    """
    times = [line.at for line in log if line.message.startswith("Train [")]
    if not times:
        raise MeasureError("the log has no training step")
    return min(times)


@benchmark(
    "memory-replica",
    what="MB of resident memory (RSS) of the agent of a running job, the largest of 8",
    against=None,
    bar=40,
    unit="MB",
)
def memory_replica(stack: BenchStack) -> Figure:
    """Read the unit's main process, without its trainer, after 5 s of a job that prints."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    read = f"sudo -n sh -c 'cat /proc/$(systemctl show -P MainPID {JOBS_UNIT})/status'"
    with stack.tiny_job("memory", "--seconds 60 --rate 5"):
        time.sleep(5)
        return Figure(max(resident(stack.on(name, read)) for name in inventory.names))


def resident(status: str) -> float:
    """Return the MB of VmRSS in the text of /proc/PID/status.

    Raises:
        MeasureError: the process is no agent.
    """
    rss = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    if not rss or not re.search(r"^Name:\s+(python|replica)", status):
        raise MeasureError(f"no agent runs: {status[:80]!r}")
    return int(rss[1]) * 1024 / 1e6


@benchmark(
    "follow-latency",
    what="seconds from a line's print in the trainer to `fab logs all --follow`, 8 hosts, 5 lines/s each, 20 s: p95",
    against=None,
    bar=0.5,
    aim=0.2,
)
def follow_latency(stack: BenchStack) -> Figure:
    """Compare times of one clock: each line has the time of its print."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.tiny_job("follow", "--seconds 120 --rate 5") as job:
        command = ["fab", "logs", "all", "--job", job, "--follow", "--lines", "0"]
        say("fab logs all --follow")
        with running(command, stack.env, ROOT, subprocess.DEVNULL) as process:
            shown = list(Lines(process).until(time.monotonic() + _FOLLOW_SECONDS))
    return Figure(percentile(latencies(shown), 95))


def latencies(shown: Iterable[tuple[float, str]]) -> list[float]:
    """Return the seconds between print and display of each line that was printed when others were already shown."""
    pairs = [(arrived, float(printed[1])) for arrived, line in shown if (printed := _AT.search(line))]
    if not pairs:
        raise MeasureError("no line of the trainer was shown")
    first = pairs[0][0]
    return [arrived - printed for arrived, printed in pairs if printed >= first]
