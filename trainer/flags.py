"""The trainer's flags. What is wrong with them is one line and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MODELS = ("cnn", "mlp")
STRATEGIES = ("async", "sync", "model-parallel")
COMMUNICATION = ("auto", "ring", "nccl")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Flags:
    """What one job trains on. Data paths are globs, directories or files, local or `gs://`; intervals are in seconds."""

    train_data: tuple[str, ...]
    eval_data: tuple[str, ...]
    job_dir: str
    strategy: str
    model: str
    hidden_units: tuple[int, ...]
    precision: str
    batch_size: int
    max_steps: int
    learning_rate: float
    momentum: float
    eval_interval: float
    checkpoint_steps: int
    checkpoint_seconds: float | None
    keep_checkpoints: int
    sync_period: int | None
    communication: str
    microbatches: int
    seed: int
    log_interval: float
    skip_corrupt_records: bool


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too low; it must be at least {minimum}")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to below 1")
    return value


def _period(text: str) -> int | None:
    return None if text == "auto" else _at_least(1)(text)


def widths(text: str) -> tuple[int, ...]:
    return tuple(_at_least(1)(part) for part in text.split(","))


def _paths(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"error: {message}; see --help\n")


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of the flags; its defaults look at SCALETIER_DATA and JOB_DIR in `environ`."""
    data = environ.get("SCALETIER_DATA", "").rstrip("/")
    flags = _Parser(
        prog="python -m trainer.task",
        description="Trains an MNIST model on this process, or as this task of the cluster in TF_CONFIG.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = flags.add_argument
    add(
        "--train-data",
        "--train_data_paths",
        type=_paths,
        metavar="PATHS",
        default=f"{data}/train*.tfrecord*" if data else None,
        help="TFRecord files: glob, directory (its train*.tfrecord*) or comma list; by default $SCALETIER_DATA",
    )
    add(
        "--eval-data",
        "--eval_data_paths",
        type=_paths,
        metavar="PATHS",
        default=f"{data}/test*.tfrecord*" if data else None,
        help="TFRecord files to evaluate on; by default test*.tfrecord* in $SCALETIER_DATA",
    )
    add(
        "--job-dir",
        "--output_path",
        "--output-dir",
        metavar="DIR",
        default=environ.get("JOB_DIR") or "output",
        help="where checkpoints, summaries and the exported model go",
    )
    add(
        "--strategy",
        choices=STRATEGIES,
        default="async",
        help="async: parameter servers, every replica at its own speed; sync: all replicas step together; "
        "model-parallel: the layers on several hosts",
    )
    add("--model", choices=MODELS, default="cnn", help="what to train")
    add("--hidden-units", type=widths, default="128,32", metavar="N,N,…", help="widths of the mlp's hidden layers")
    add("--precision", choices=PRECISIONS, default="float32", help="of the training's arithmetic; bfloat16 is for GPUs")
    add("--batch-size", type=_at_least(1), default=100, metavar="N", help="images a step")
    add("--max-steps", type=_at_least(1), default=2000, metavar="N", help="batches to train on, over all replicas")
    add("--learning-rate", type=_positive, default=0.05, metavar="X", help="of stochastic gradient descent")
    add("--momentum", type=_share, default=0.9, metavar="X", help="Nesterov's, 0 for none")
    add(
        "--eval-interval",
        type=_positive,
        default=1.0,
        metavar="SECONDS",
        help="between evaluations; grows by itself so that they stay a small part of the time",
    )
    add("--checkpoint-steps", type=_at_least(1), default=500, metavar="N", help="steps between checkpoints")
    add("--checkpoint-seconds", type=_positive, metavar="SECONDS", help="also after this time; by default by steps alone")
    add("--keep-checkpoints", type=_at_least(1), default=5, metavar="N", help="how many checkpoints stay")
    add(
        "--sync-period",
        type=_period,
        default="auto",
        metavar="K",
        help="async: local steps between two exchanges with the parameter servers, auto as measured; "
        "sync: batches whose gradients are summed before an exchange, auto is 4",
    )
    add("--communication", choices=COMMUNICATION, default="auto", help="sync: how replicas exchange gradients")
    add("--microbatches", type=_at_least(1), default=4, metavar="N", help="model-parallel: parts of a batch on their way")
    add("--seed", type=_at_least(0), default=0, metavar="N", help="of initial values, order of the data and dropout")
    add("--log-interval", type=_positive, default=1.0, metavar="SECONDS", help="between two Train lines of a replica")
    add("--skip-corrupt-records", action="store_true", help="train on without them, instead of refusing them")
    return flags


def parse(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Flags:
    """Flags from the command line (sys.argv by default); exits with code 2 and one line on stderr if they are wrong."""
    environ = os.environ if environ is None else environ
    flags = parser(environ)
    parsed = flags.parse_args(arguments)
    for name, spelling in (("train_data", "--train-data"), ("eval_data", "--eval-data")):
        if not getattr(parsed, name):
            flags.error(f"{spelling} is missing: pass a glob, a directory or files of TFRecords, or set SCALETIER_DATA")
    return Flags(**{**vars(parsed), "job_dir": parsed.job_dir.rstrip("/") or "/"})
