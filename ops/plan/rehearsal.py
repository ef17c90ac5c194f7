"""A job as one process on this machine, for a while: what a step costs, and how large the model is."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import OpsError, UsageError
from ops.logs import progress
from ops.logs.progress import Mark

# What local hosts mount, as `make image` leaves it; by its list, so there may be some.
HOSTS_PYTHONS = ROOT / ".cache" / "hosts"
# The first lines tell of tracing and of caches that fill.
_WARM_UP_LINES = 2
_NEEDED_LINES = _WARM_UP_LINES + 2
_END_SECONDS = 20.0
_COUNT_SECONDS = 120.0
# float32 without what an optimizer keeps of each variable, which does not travel.
_COUNT = """
import re, sys, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
types = reader.get_variable_to_dtype_map()
kept = re.compile("optimizer|/(Adam|Momentum|RMSProp|Adagrad|Ftrl)", re.IGNORECASE)
shapes = reader.get_variable_to_shape_map().items()
travel = [shape for name, shape in shapes if types[name] == tf.float32 and not kept.search(name)]
print(sum(4 * tf.TensorShape(shape).num_elements() for shape in travel))
"""


def marks(lines: Iterable[str]) -> list[Mark]:
    """The Train lines of one replica after its last start, without those of its warm-up."""
    found: list[Mark] = []
    for line in lines:
        if mark := progress.mark(line):
            found = [*found, mark] if not found or mark.seconds >= found[-1].seconds else [mark]
    return found[_WARM_UP_LINES:]


def step_seconds(found: Sequence[Mark]) -> float | None:
    """Seconds a step between two lines, the median: evaluations and checkpoints fall into few of them; None for too few."""
    rates = [(b.step - a.step) / (b.seconds - a.seconds) for a, b in pairwise(found) if b.seconds > a.seconds]
    return 1 / median(rates) if rates and median(rates) > 0 else None


def mean_rate(found: Sequence[Mark]) -> float | None:
    """Steps/s from the first to the last line, all that happened in between included; None for too few."""
    if len(found) < 2 or found[-1].seconds <= found[0].seconds:
        return None
    return (found[-1].step - found[0].step) / (found[-1].seconds - found[0].seconds)


def rehearse(argv: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float) -> list[str]:
    """Run the trainer's module in `folder` for so long; its lines.

    OpsError where it fails, UsageError where it says too little.
    """
    process = subprocess.Popen(
        [_python(), "-m", *argv],
        cwd=folder,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: list[str] = []
    began = time.monotonic()
    try:
        with terminal.Step(f"{argv[0]} as one process here", always=True) as step:
            for line in _read(process, began + seconds):
                lines.append(line)
                if mark := progress.mark(line):
                    step.count = f"{mark.step} steps"
        ended = process.poll()
    finally:
        _end(process)
    if ended:
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        raise OpsError(f"{argv[0]} ended with {ended} after {terminal.duration(time.monotonic() - began)} here: {last.strip()}")
    if len(marks(lines)) < 2:
        printed = sum(1 for line in lines if progress.mark(line))
        fix = "give it more steps" if ended == 0 else "give --seconds more"
        what = f"{printed} lines of the form {progress.TRAIN_LINE!r}, {_NEEDED_LINES} are needed"
        raise UsageError(f"{argv[0]} printed {what} in {terminal.duration(time.monotonic() - began)}: {fix}")
    return lines


def parameter_bytes(folder: Path) -> int:
    """Bytes of the float32 variables in the newest checkpoint below a folder; UsageError where there is none."""
    found = sorted(folder.rglob("*.index"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError("the trainer left no checkpoint below its --job-dir to count its parameters in: give --parameters-mb")
    command = [_python(), "-c", _COUNT, str(found[-1].with_suffix(""))]
    with terminal.Step("counting the parameters"):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["?"])[-1]
        raise OpsError(f"the trainer's checkpoint cannot be read ({last}): give --parameters-mb")
    return int(ran.stdout)


def _python() -> str:
    """The Python that has TensorFlow: this one, or the hosts' where it was made here; UsageError where neither has."""
    if find_spec("tensorflow"):
        return sys.executable
    there = [python for python in HOSTS_PYTHONS.glob("runtime-*/bin/python") if python.exists()]
    if there:
        return str(max(there, key=lambda python: python.lstat().st_mtime))
    raise UsageError("there is no TensorFlow here to run the job with: run make tensorflow")


def _read(process: subprocess.Popen[bytes], until: float) -> Iterator[str]:
    """Lines until the process has ended, or until this time of the monotonic clock."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.decode("utf-8", "replace").rstrip("\n"))
        process.wait()
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, upon which a trainer may save a checkpoint, and SIGKILL for what is left of its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
