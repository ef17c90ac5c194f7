"""A job as one process on this machine, for a while: what a step costs, and how large the model is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from jobs import progress
from jobs.progress import TrainPoint
from ops import terminal
from ops.errors import OpsError, UsageError
from ops.plan.processes import ProcessGroup, ProcessStart, python_here, start_processes

# The first lines include tracing and cold caches.
_WARM_UP_LINES = 2
_NEEDED_LINES = _WARM_UP_LINES + 2
_COUNT_SECONDS = 120.0
# Until the first Train line: TensorFlow is imported, data are read, the first step is traced.
_START_SECONDS = 120.0
# float32 without the optimizer's state of each variable, which is not transferred.
_COUNT = """
import re, sys, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
types = reader.get_variable_to_dtype_map()
kept = re.compile("optimizer|/(Adam|Momentum|RMSProp|Adagrad|Ftrl)", re.IGNORECASE)
shapes = reader.get_variable_to_shape_map().items()
travel = [shape for name, shape in shapes if types[name] == tf.float32 and not kept.search(name)]
print(sum(4 * tf.TensorShape(shape).num_elements() for shape in travel))
"""


def marks(lines: Iterable[str]) -> list[TrainPoint]:
    """Return the Train lines of one replica after its last start, without those of its warm-up."""
    latest: list[TrainPoint] = []
    for line in lines:
        if mark := progress.parse_train_point(line):
            latest = [*latest, mark] if not latest or mark.seconds >= latest[-1].seconds else [mark]
    return latest[_WARM_UP_LINES:]


def step_seconds(train_marks: Sequence[TrainPoint]) -> float | None:
    """Return the median seconds of a step, without evaluations and checkpoints; None for too few lines."""
    rates = [(b.step - a.step) / (b.seconds - a.seconds) for a, b in pairwise(train_marks) if b.seconds > a.seconds]
    return 1 / median(rates) if rates and median(rates) > 0 else None


def mean_rate(train_marks: Sequence[TrainPoint]) -> float | None:
    """Return the steps/s from the first to the last line, with all pauses between; None for too few."""
    if len(train_marks) < 2 or train_marks[-1].seconds <= train_marks[0].seconds:
        return None
    return (train_marks[-1].step - train_marks[0].step) / (train_marks[-1].seconds - train_marks[0].seconds)


def profile_job(argv: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float) -> list[str]:
    """Run the trainer's module in `folder` for some seconds from its first Train line on; its lines."""
    lines: list[str] = []
    began = time.monotonic()
    until, trains = began + _START_SECONDS + seconds, False

    def deadline() -> float:
        return until

    with start_processes([ProcessStart("master/0", argv, env)], folder) as process:
        with terminal.Step(f"{argv[0]} as one process here", always=True) as step:
            for line in process.lines(deadline):
                lines.append(line)
                if mark := progress.parse_train_point(line):
                    step.count = terminal.plural(mark.step, "step")
                    until, trains = (until if trains else time.monotonic() + seconds), True
        took, ended = time.monotonic() - began, time.monotonic() < until
    if process.failed:
        raise OpsError(failure(argv[0], process, took))
    if len(marks(lines)) < 2:
        printed = sum(1 for line in lines if progress.parse_train_point(line))
        fix = "give it more steps" if ended else "give --seconds more"
        what = f"{terminal.plural(printed, 'line')} of the form {progress.TRAIN_LINE!r}, {_NEEDED_LINES} are needed"
        raise UsageError(f"{argv[0]} printed {what} in {terminal.duration(took)}: {fix}")
    return lines


def failure(module: str, process: ProcessGroup, seconds: float) -> str:
    """Describe the failure of a trainer's process after `seconds`."""
    assert process.failed
    name, code = process.failed
    program = module if name == "master/0" else f"{module} as {name}"
    return (
        f"{program} ended with {code} after {terminal.duration(seconds)} here: {process.last.get(name, 'it printed nothing')}"
    )


def parameter_bytes(folder: Path) -> int:
    """Return the bytes of the float32 variables in the newest checkpoint below a folder."""
    # An exported model has more: its optimizer's state has no names there.
    checkpoints = sorted(folder.rglob("*.index"), key=lambda path: (not _exported(path), path.stat().st_mtime))
    if not checkpoints:
        raise UsageError("the trainer left no checkpoint below its --job-dir to count its parameters in: give --parameters-mb")
    command = [python_here(), "-c", _COUNT, str(checkpoints[-1].with_suffix(""))]
    with terminal.Step("counting the parameters"):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["?"])[-1]
        raise OpsError(f"the trainer's checkpoint cannot be read ({last}): give --parameters-mb")
    return int(ran.stdout)


def _exported(index: Path) -> bool:
    """Return whether variables are those of a SavedModel."""
    return (index.parent.parent / "saved_model.pb").exists()
