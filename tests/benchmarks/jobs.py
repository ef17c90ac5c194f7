"""What a user sees of a job: its first training step, its lines as they come, and what its replicas take of memory."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterable
from datetime import datetime

from benchmarks.measure import Lines, MeasureError, end, must, percentile, run, running
from benchmarks.measure import medians as in_turn
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import DATA, MNIST, ROOT, BenchStack, job_id, say
from infra.inventory import JOBS_UNIT, Inventory
from infra.spec import ScaleTier
from ops.package.push import PYTHON

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
    """From the command's start to the time that the log line itself bears."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    upload_data(inventory)
    imports = [stack.ssh(name, f"{PYTHON} -c 'import tensorflow'") for name in inventory.names]
    must(run(imports[0], stack.env, ROOT), "import tensorflow")  # from the disk into memory, for both alike

    def peer() -> float:
        say("import tensorflow on all hosts")
        return together(stack, imports)

    return Figure(*in_turn(2, lambda: _first_step(stack), peer))


def upload_data(inventory: Inventory) -> None:
    """Puts MNIST into the bucket, which `fab train` otherwise does for the first job of a cluster."""
    from ops.cluster.cluster import Cluster

    cluster = Cluster(inventory)
    bucket = cluster.bucket
    there = bucket.names(DATA)
    for path in sorted(MNIST.glob("*.tfrecord*")):
        if there.get(path.name) != path.stat().st_size:
            bucket.upload(f"{DATA}/{path.name}", path)
    cluster.fleet.close()


def together(stack: BenchStack, commands: Iterable[list[str]]) -> float:
    """Seconds until the last of these commands, all started at once, has ended; MeasureError where one fails."""
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
                raise MeasureError(f"{' '.join(command)} came to no step within {_STEP_SECONDS:.0f} s")
        return first_train_line(stack.fab("logs", "all", "--job", job, "--lines", "all", "--json").out) - began
    finally:
        stack.run("fab", "cancel", job)


def first_train_line(log: str) -> float:
    """The Unix time of the first training step in a log as `fab logs --json` prints it; MeasureError where there is none."""
    lines = [json.loads(line) for line in log.splitlines()]
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in lines if line["message"].startswith("Train [")]
    if not times:
        raise MeasureError("the log has no training step")
    return min(times)


@benchmark(
    "memory-replica",
    what="MB of resident memory (RSS) of the replica process of a running job, the largest of 8",
    against=None,
    bar=40,
    unit="MB",
)
def memory_replica(stack: BenchStack) -> Figure:
    """The unit's main process, after 5 s of a job that prints; its trainer is not part of it."""
    inventory = stack.require(ScaleTier.STANDARD_1)
    read = f"sudo -n sh -c 'cat /proc/$(systemctl show -P MainPID {JOBS_UNIT})/status'"
    with stack.tiny_job("memory", "--seconds 60 --rate 5"):
        time.sleep(5)
        answers = [must(run(stack.ssh(name, read), stack.env, ROOT), f"reading {name}") for name in inventory.names]
    return Figure(max(resident(answer.out) for answer in answers))


def resident(status: str) -> float:
    """MB of VmRSS in the text of /proc/PID/status; MeasureError for a process that is none of `replica`."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    if not found or not re.search(r"^Name:\s+(python|replica)", status):
        raise MeasureError(f"no replica runs: {status[:80]!r}")
    return int(found[1]) * 1024 / 1e6


@benchmark(
    "follow-latency",
    what="seconds from a line's print in the trainer to `fab logs all --follow`, 8 hosts, 5 lines/s each, 20 s: p95",
    against=None,
    bar=0.5,
    aim=0.2,
)
def follow_latency(stack: BenchStack) -> Figure:
    """One machine and one clock: each line says when it was printed."""
    stack.require(ScaleTier.STANDARD_1)
    with stack.tiny_job("follow", "--seconds 120 --rate 5") as job:
        command = ["fab", "logs", "all", "--job", job, "--follow", "--lines", "0"]
        say("fab logs all --follow")
        with running(command, stack.env, ROOT, subprocess.DEVNULL) as process:
            shown = list(Lines(process).until(time.monotonic() + _FOLLOW_SECONDS))
    return Figure(percentile(latencies(shown), 95))


def latencies(shown: Iterable[tuple[float, str]]) -> list[float]:
    """Seconds between print and show of each line that was printed when others were already shown."""
    pairs = [(came, float(found[1])) for came, line in shown if (found := _AT.search(line))]
    if not pairs:
        raise MeasureError("no line of the trainer was shown")
    first = pairs[0][0]
    return [came - printed for came, printed in pairs if printed >= first]
