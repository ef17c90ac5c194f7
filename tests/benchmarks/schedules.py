"""`python -m benchmarks.schedules WAY [SETTINGS …] [--seeds N …]`: the steps to the target by a trainer's settings.

It finds the best schedule of one host, the peer of `own-…`, and the best learning rate of MultiWorkerMirroredStrategy. All
processes run on this machine, which is no matter for steps; seconds compare only if nothing else runs. Each line is JSON: the
settings with the steps and seconds of each seed and the test accuracy by step; null if a training does not reach the target.
`mwms` needs tf-keras beside TensorFlow: `pip install -r examples/mwms/requirements.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.learning import TARGET, Reached
from benchmarks.measure import MeasureError
from benchmarks.stack import BIN, MNIST, ROOT, say
from benchmarks.trained import Trained, curve, parse
from ops.plan.profile import start_processes
from ops.plan.runs import RunSetup, replica_commands
from ops.plan.time_to_target import MetricTarget

_LIMIT_SECONDS = 3600.0
_GRID_STEPS = 50


@dataclass(frozen=True)
class TrainingWay:
    """A way to train: a module, its folder, and how many replicas run it, with or without parameter servers.

    `flags` are of all trainings, `settings` those that are tried by default.
    """

    module: str
    flags: str
    settings: Sequence[str]
    folder: Path = ROOT
    replicas: int = 1
    servers: bool = False
    seeded: bool = True


_OURS = (
    f"--model cnn --label-smoothing 0.1 --checkpoint-steps {_GRID_STEPS} --checkpoint-seconds 100000 --keep-checkpoints 1000 "
    "--eval-interval 100000 --log-interval 0.2"
)
_MWMS = f"--model cnn --checkpoint-steps {_GRID_STEPS} --steps-per-execution 10 --momentum 0.9 --clip 1.0"
WAYS = {
    "one": TrainingWay(
        "trainer.task",
        _OURS,
        [
            f"--max-steps {steps} --learning-rate {rate} --batch-size {size}"
            for steps, rate, size in product((450, 600, 800), (0.05, 0.1, 0.2), (50, 100))
        ],
    ),
    "async": TrainingWay("trainer.task", _OURS, ["--max-steps 1000"], replicas=5, servers=True),
    "sync": TrainingWay("trainer.task", f"{_OURS} --strategy sync", ["--max-steps 1000"], replicas=5),
    "mwms": TrainingWay(
        "mwms.task",
        _MWMS,
        [
            f"--max-steps {steps} --learning-rate {rate} --warmup-steps {warmup}"
            for steps, rate, warmup in product((1000, 1500), (0.3, 0.5, 0.8), (30, 100))
        ],
        ROOT / "examples",
        replicas=5,
        seeded=False,
    ),
}


def train(way: TrainingWay, arguments: str, folder: Path) -> Trained:
    """Train here, with the checkpoints in a folder.

    Raises:
        MeasureError: the training failed.
    """
    env = {"PATH": f"{BIN}:{os.defpath}", "HOME": str(folder), "SCALETIER_DATA": str(MNIST), "JOB_DIR": str(folder)}
    setup = RunSetup(MetricTarget("accuracy", TARGET), [way.module, *arguments.split()], env, way.servers, _LIMIT_SECONDS)
    lines, end = list[tuple[float, str]](), time.monotonic() + setup.seconds
    with start_processes(replica_commands(setup, way.replicas), way.folder) as processes:
        lines += [(time.time(), line) for line in processes.lines(lambda: end)]
        if processes.failed:
            name, code = processes.failed
            raise MeasureError(f"{name} of {way.module} ended with {code}: {processes.last_lines.get(name, '')}")
    return parse(lines)


def measure(way: TrainingWay, settings: str, seed: int) -> tuple[Reached | None, dict[str, float]]:
    """Return the cost of a training to the target, None if it missed that, and its test accuracy by step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = train(way, f"{way.flags} {settings}{f' --seed {seed}' if way.seeded else ''}", folder)
        accuracies = curve(folder)
    try:
        reached = Reached.at(trained, accuracies)
    except MeasureError as error:
        say(str(error))
        reached = None
    return reached, {str(step): round(value, 4) for step, value in accuracies}


def sweep(name: str, settings: Sequence[str], seeds: Sequence[int]) -> None:
    """Print a line for each of the settings, as soon as all seeds are measured."""
    for one in settings or WAYS[name].settings:
        say(f"{name} with {one}, {len(seeds)} seeds")
        results = [measure(WAYS[name], one, seed) for seed in seeds]
        line: dict[str, Any] = {
            "way": name,
            "settings": one,
            "seeds": list(seeds),
            "steps": [reached and reached.crossing.step for reached, _ in results],
            "seconds": [reached and round(reached.seconds, 2) for reached, _ in results],
            "curves": [accuracies for _, accuracies in results],
        }
        print(json.dumps(line), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=WAYS, help="one host, five replicas of a strategy, or five of examples/mwms")
    parser.add_argument("settings", nargs="*", help="flags of the trainer, such as '--max-steps 600'; by default a grid")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parsed = parser.parse_args(arguments)
    try:
        sweep(parsed.way, parsed.settings, parsed.seeds)
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
