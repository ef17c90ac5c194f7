"""The trainer's flags: those of every job, and its own. An invalid flag ends the program with one line and exit code 2."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

import scaletier
from scaletier.flags import at_least, fraction, number, positive

MODELS = ("cnn", "mlp")
PRECISIONS = ("float32", "bfloat16", "float16")
_angle = number(lambda value: 0 <= value <= 180, "from 0 to 180")


def widths(text: str) -> tuple[int, ...]:
    """Parse widths such as `128,32`; a type for argparse."""
    return tuple(at_least(1)(part) for part in text.split(","))


def _paths(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of the flags, with defaults from SCALETIER_DATA and JOB_DIR in `environ`."""
    data = environ.get("SCALETIER_DATA", "").rstrip("/")
    flags = scaletier.parser(
        environ,
        prog="python -m trainer.task",
        description="Trains an MNIST model on this process, or as this task of the cluster in TF_CONFIG.",
    )
    add = flags.add_argument
    add(
        "--train-data",
        "--train_data_paths",
        type=_paths,
        metavar="PATHS",
        default=f"{data}/train*.tfrecord*" if data else None,
        help="TFRecord files: a glob, a directory (its train*.tfrecord*), or several with commas; by default $SCALETIER_DATA",
    )
    add(
        "--eval-data",
        "--eval_data_paths",
        type=_paths,
        metavar="PATHS",
        default=f"{data}/test*.tfrecord*" if data else None,
        help="TFRecord files to evaluate on; by default test*.tfrecord* in $SCALETIER_DATA",
    )
    add("--model", choices=MODELS, default="cnn", help="what to train")
    add("--hidden-units", type=widths, default="128,32", metavar="N,N,…", help="widths of the mlp's hidden layers")
    add("--precision", choices=PRECISIONS, default="float32", help="of the computation; the 16-bit ones are for GPUs")
    add("--batch-size", type=at_least(1), default=100, metavar="N", help="images per step")
    add(
        "--learning-rate",
        type=positive,
        default=0.1,
        metavar="X",
        help="peak learning rate of SGD for one replica; for N replicas multiplied by N, at most by 8",
    )
    add(
        "--warmup-steps",
        type=at_least(1),
        default=30,
        metavar="N",
        help="global steps in which the learning rate rises",
    )
    add("--momentum", type=fraction, default=0.9, metavar="X", help="Nesterov momentum, 0 for none")
    add(
        "--batch-norm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="normalize the outputs of the cnn's convolutions",
    )
    add(
        "--average",
        type=fraction,
        metavar="X",
        help="evaluate and export moving averages of the weights, with at most this decay per step of a replica; "
        "0 for none, by default 0.98 for the cnn and 0 for the mlp",
    )
    add(
        "--label-smoothing", type=fraction, default=0.0, metavar="X", help="share of each label that is spread over all classes"
    )
    add("--shift", type=at_least(0), default=0, metavar="N", help="move each training image by up to N pixels")
    add("--rotation", type=_angle, default=0.0, metavar="DEGREES", help="rotate each training image by up to this angle")
    add("--skip-corrupt-records", action="store_true", help="skip corrupt records instead of ending with an error")
    return flags


def parse(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line (sys.argv by default).

    If a flag is invalid, print one line to stderr and exit with code 2.
    """
    flags = parser(os.environ if environ is None else environ)
    parsed = flags.parse_args(arguments)
    for name, spelling in (("train_data", "--train-data"), ("eval_data", "--eval-data")):
        if not getattr(parsed, name):
            flags.error(f"{spelling} is missing: pass a glob, a directory or files of TFRecords, or set SCALETIER_DATA")
    return parsed
