"""Run a job as processes of this machine, to measure the cost of a step and the size of the model."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from infra.scale_tiers import Role
from jobs import progress, variables
from jobs.progress import TrainPoint
from ops import terminal
from ops.cluster.inventory import ROOT
from ops.errors import OpsError, UsageError
from ops.submit.environment import DEFAULTS

# The Python environments of hosts: `make image` builds one for each list of packages, and local hosts mount it.
HOST_RUNTIMES = ROOT / ".cache" / "hosts"
END_SECONDS = 20.0
"""The most seconds that a process may take to end after SIGTERM."""
_DRAIN_SECONDS = 1.0
# The first lines include tracing and cold caches.
_WARM_UP_LINES = 2
_NEEDED_LINES = _WARM_UP_LINES + 2
APART_SECONDS = 0.1
"""The least seconds between two lines that measure a step, as lines print thousandths of a second."""
_COUNT_SECONDS = 120.0
# Allowed until the first log line `Train [NAME], step N: …`, for the import of TensorFlow, reading data, and tracing.
_START_SECONDS = 120.0
# It counts float32 variables without the optimizer's state, which is not transferred.
_COUNT_PARAMETERS = """
import re, sys, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
types = reader.get_variable_to_dtype_map()
optimizer_state = re.compile("optimizer|/(Adam|Momentum|RMSProp|Adagrad|Ftrl)", re.IGNORECASE)
shapes = reader.get_variable_to_shape_map().items()
transferred = [shape for name, shape in shapes if types[name] == tf.float32 and not optimizer_state.search(name)]
print(sum(4 * tf.TensorShape(shape).num_elements() for shape in transferred))
"""


@dataclass(frozen=True)
class ProcessStart:
    """The command of a process, `python -m ARGV`, with the name of its replica and its whole environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]

    @classmethod
    def of_replica(
        cls, role: Role, index: int, argv: Sequence[str], env: Mapping[str, str], job_variables: Collection[str] = ()
    ) -> Self:
        """Return the command and the environment that a replica has in a job.

        Placeholders such as `${JOB_DIR}` are replaced in `argv`, and in the variables of `env` that the job sets.
        """
        values = {**DEFAULTS, **env, "TYPE": str(role), "INDEX": str(index)}
        job_environment = variables.expand_environment({name: values[name] for name in job_variables}, values)
        return cls(f"{role}/{index}", variables.expand_command(argv, values), values | job_environment)


class ProcessGroup:
    """Running processes, the main one first; `failed` has the first with an exit code other than 0, and the code."""

    def __init__(self, names: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.failed: tuple[str, int] | None = None
        self.last_lines: dict[str, str] = {}
        self._names, self._processes = names, processes
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        for index in range(len(processes)):
            threading.Thread(target=self._follow, args=(index,), daemon=True).start()

    def _follow(self, index: int) -> None:
        reader = threading.Thread(target=self._read, args=(index,), daemon=True)
        reader.start()
        self._processes[index].wait()
        # The rest of its output arrives at once; do not wait for a child that keeps its stdout open.
        reader.join(_DRAIN_SECONDS)
        self._lines.put((index, None))

    def _read(self, index: int) -> None:
        stdout = self._processes[index].stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put((index, line.decode("utf-8", "replace").rstrip("\n")))

    def lines(self, until: Callable[[], float]) -> Iterator[str]:
        """Yield all output until the main process ends, any fails, or the time `until()`; `last_lines` has the last of each."""
        while (seconds := until() - time.monotonic()) > 0:
            try:
                index, line = self._lines.get(timeout=seconds)
            except queue.Empty:
                return
            name = self._names[index]
            if line is not None:
                if line.strip():
                    self.last_lines[name] = line.strip()
                yield line
                continue
            if code := self._processes[index].returncode:
                self.failed = name, code
            if index == 0 or code:
                return


@contextmanager
def start_processes(starts: Sequence[ProcessStart], folder: Path, grace: float = END_SECONDS) -> Iterator[ProcessGroup]:
    """Start processes in `folder`; after the block end their groups: SIGTERM, and SIGKILL `grace` seconds later."""
    python, processes = tensorflow_python(), list[subprocess.Popen[bytes]]()
    try:
        for start in starts:
            argv, env = [python, "-m", *start.argv], {**start.env, "PYTHONUNBUFFERED": "1"}
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(argv, cwd=folder, env=env, start_new_session=True, **streams))
        yield ProcessGroup([start.name for start in starts], processes)
    finally:
        _end(processes, grace)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Send SIGTERM to the process groups, on which trainers save, and SIGKILL after `grace` seconds."""
    try:
        _signal(processes, signal.SIGTERM, grace)
    finally:
        _signal(processes, signal.SIGKILL, END_SECONDS)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int, seconds: float) -> None:
    """Send a signal to the process groups, and wait until they end, for a limited time."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    until = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def tensorflow_python() -> str:
    """Return a Python that has TensorFlow: this one, or the hosts' if it was built here."""
    if find_spec("tensorflow"):
        return sys.executable
    runtimes = [python for python in HOST_RUNTIMES.glob("runtime-*/bin/python") if python.exists()]
    if runtimes:
        return str(max(runtimes, key=lambda python: python.lstat().st_mtime))
    raise UsageError("there is no TensorFlow here to run the job with: run make tensorflow")


def train_points(lines: Iterable[str]) -> list[TrainPoint]:
    """Parse the log lines `Train [NAME], step N: …` of one replica since its last start, without its warm-up."""
    latest: list[TrainPoint] = []
    for line in lines:
        if point := progress.parse_train_point(line):
            if latest and point.seconds < latest[-1].seconds:
                latest = []
            latest.append(point)
    return latest[_WARM_UP_LINES:]


def step_seconds(points: Sequence[TrainPoint]) -> float | None:
    """Return the seconds of a step as a median, so that evaluations and checkpoints do not count; None for too few lines."""
    used = [*points[:1]]
    for point in points:
        if point.seconds - used[-1].seconds >= APART_SECONDS:
            used.append(point)
    rates = [(b.step - a.step) / (b.seconds - a.seconds) for a, b in pairwise(used)]
    return 1 / median(rates) if rates and median(rates) > 0 else None


def mean_rate(points: Sequence[TrainPoint]) -> float | None:
    """Return the steps/s from the first to the last line, with all pauses; None if steps or seconds did not increase."""
    if len(points) < 2:
        return None
    steps, seconds = points[-1].step - points[0].step, points[-1].seconds - points[0].seconds
    return steps / seconds if steps > 0 and seconds > 0 else None


def profile_job(argv: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float) -> list[str]:
    """Run the trainer's module in `folder` for some seconds from its first Train line on; return its lines."""
    lines: list[str] = []
    start_time = time.monotonic()
    until, trains = start_time + _START_SECONDS + seconds, False

    def deadline() -> float:
        return until

    with start_processes([ProcessStart("master/0", argv, env)], folder) as process:
        with terminal.ProgressLine(f"{argv[0]} as one process here", always=True) as progress_line:
            for line in process.lines(deadline):
                lines.append(line)
                if point := progress.parse_train_point(line):
                    progress_line.detail = terminal.plural(point.step, "step")
                    until, trains = (until if trains else time.monotonic() + seconds), True
        elapsed, ended = time.monotonic() - start_time, time.monotonic() < until
    if process.failed:
        raise OpsError(describe_failure(argv[0], process, elapsed))
    if len(train_points(lines)) < 2:
        printed = sum(1 for line in lines if progress.parse_train_point(line))
        fix = "give it more steps" if ended else "give --seconds more"
        what = f"{terminal.plural(printed, 'line')} of the form {progress.TRAIN_LINE!r}, {_NEEDED_LINES} are needed"
        raise UsageError(f"{argv[0]} printed {what} in {terminal.duration(elapsed)}: {fix}")
    return lines


def describe_failure(module: str, process: ProcessGroup, seconds: float) -> str:
    """Describe the failure of a trainer's process after `seconds`."""
    assert process.failed
    name, code = process.failed
    program = module if name == "master/0" else f"{module} as {name}"
    last = process.last_lines.get(name, "it printed nothing")
    return f"{program} ended with {code} after {terminal.duration(seconds)} here: {last}"


def parameter_bytes(folder: Path) -> int:
    """Return the bytes of the float32 variables in the newest checkpoint below a folder."""
    # Checkpoints are sorted after exported models, whose optimizer state has no names that _COUNT_PARAMETERS could exclude.
    checkpoints = sorted(folder.rglob("*.index"), key=lambda path: (not _exported(path), path.stat().st_mtime))
    if not checkpoints:
        raise UsageError("the trainer left no checkpoint below its --job-dir to count its parameters in: give --parameters-mb")
    command = [tensorflow_python(), "-c", _COUNT_PARAMETERS, str(checkpoints[-1].with_suffix(""))]
    with terminal.ProgressLine("counting the parameters"):
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            limit = terminal.duration(_COUNT_SECONDS)
            raise OpsError(f"the trainer's checkpoint was not read in {limit}: give --parameters-mb") from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["?"])[-1]
        raise OpsError(f"the trainer's checkpoint cannot be read ({last}): give --parameters-mb")
    return int(result.stdout)


def _exported(index: Path) -> bool:
    """Return whether a checkpoint is part of a SavedModel."""
    return (index.parent.parent / "saved_model.pb").exists()
