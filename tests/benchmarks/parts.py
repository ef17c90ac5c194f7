"""Jobs that take a part of a cluster: how soon a script runs, and the time of five jobs in parallel."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import in_parallel
from benchmarks.measure import Lines, MeasureError, first_byte, must, running
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import DATA, ROOT, BenchStack, job_id, say, unpacked
from infra.scale_tiers import ScaleTier
from jobs.paths import PYTHON

_HELLO = "print('hello', flush=True)\n"
_JOBS = 5
# A short training.
_TRAINING = "--model mlp --max-steps 5000 --seed 1"
_SECONDS = 120.0


@benchmark(
    "script-first-line",
    what="seconds of `fab train --scale-tier BASIC --script` to the first line that the script prints, median of 7",
    against="ssh master-0 python script.py, the file there already, to its first byte; it keeps no record, log or output",
    bar=3.0,
    aim=1.5,
)
def script_first_line(stack: BenchStack) -> Figure:
    """Run a plain script on one host."""
    stack.require(ScaleTier.STANDARD_1)
    stack.on("master-0", "cat >/tmp/hello.py", _HELLO.encode())
    peer = stack.ssh("master-0", f"{PYTHON} /tmp/hello.py")
    with TemporaryDirectory() as folder:
        script = Path(folder, "hello.py")
        script.write_text(_HELLO)

        def ours() -> float:
            command = ["fab", "train", job_id("script"), "--scale-tier", "BASIC", "--script", str(script)]
            began = time.monotonic()
            with running(command, stack.env, ROOT, subprocess.DEVNULL) as process:
                if not any(line.endswith(" hello") for _, line in Lines(process).until(began + _SECONDS)):
                    raise MeasureError("the script never printed hello")
                seconds = time.monotonic() - began
                process.wait(_SECONDS)
            return seconds

        def theirs() -> float:
            return first_byte(peer, stack.env, ROOT)

        ours(), theirs()
        return in_turn(7, ours, theirs)


@benchmark(
    "side-by-side",
    what="seconds of five one-host trainings at once (the mlp, 5,000 steps; `fab train --scale-tier BASIC`, `fab wait`)",
    against="the same five one after another by ssh on master-0, which may use all processors, too, and keep no record, log or "
    "output; medians of 3",
    bar=1.05,
    aim=0.9,
)
def side_by_side(stack: BenchStack) -> Figure:
    """Compare the same work plus the start of jobs: all hosts share the processors of this machine."""
    stack.require(ScaleTier.STANDARD_1)
    train = ["fab", "train", "--scale-tier", "BASIC"]
    arguments = ["--", *_TRAINING.split()]
    first = job_id("first")
    must(stack.run(*train, "--job", first, *arguments), "the first training")  # it brings the package and the data
    peer = (
        f"{unpacked(first)} && rm -rf /tmp/peer && SCALETIER_DATA=/bucket/{DATA} "
        f"{PYTHON} -m trainer.task --job-dir /tmp/peer {_TRAINING}"
    )

    def ours() -> float:
        say("five jobs at once")
        jobs = [f"{job_id('side')}_{number}" for number in range(_JOBS)]
        began = time.monotonic()
        in_parallel(stack, ([*train, "--no-follow", "--job", job, *arguments] for job in jobs))
        in_parallel(stack, (["fab", "wait", job] for job in jobs))
        return time.monotonic() - began

    def theirs() -> float:
        say("five runs one after another")
        began = time.monotonic()
        for _ in range(_JOBS):
            stack.on("master-0", peer)
        return time.monotonic() - began

    return in_turn(3, ours, theirs)
