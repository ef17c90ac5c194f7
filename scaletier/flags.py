"""Define the training library's flags. An invalid flag prints one line and ends with exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

STRATEGIES = ("async", "sync", "model-parallel")
COMMUNICATION = ("auto", "ring", "nccl")
# NumPy's and Keras's generators take 32 bits.
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Flags:
    """The settings of a job's training and output; intervals are in seconds. `parser` describes each."""

    job_dir: str
    strategy: str
    max_steps: int
    eval_interval: float
    eval_steps: int | None
    checkpoint_steps: int
    checkpoint_seconds: float
    keep_checkpoints: int
    sync_period: int | None
    communication: str
    microbatches: int
    seed: int
    log_interval: float
    allow_cpu: bool


def at_least(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too low; it must be at least {minimum}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"{value} is too high; it must be at most {maximum}")
        return value

    return parse


def number(is_valid: Callable[[float], bool], requirement: str) -> Callable[[str], float]:
    """Return an argparse type for valid numbers; `requirement` ends the error `TEXT must be …`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} must be {requirement}")
        return value

    return parse


positive = number(lambda value: 0 < value < math.inf, "above 0")
fraction = number(lambda value: 0 <= value < 1, "from 0 to below 1")


class _Default(int):
    """Mark a default, to distinguish it from the same number set by a flag."""


class Parser(argparse.ArgumentParser):
    """Report a wrong call in one line, with exit code 2."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments; for an unknown flag, suggest a similar one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            valid = [option for action in self._actions for option in action.option_strings]
            similar = difflib.get_close_matches(unknown[0].partition("=")[0], valid, 1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; did you mean {flag}?" for flag in similar))
        return parsed

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"error: {message}; see --help\n")


def parser(environ: Mapping[str, str] | None = None, **settings: str) -> argparse.ArgumentParser:
    """Return a parser of the library's flags, to which a program adds its own.

    A wrong call ends the program with one line on stderr and exit code 2.

    Args:
        environ: the environment that has JOB_DIR, the default of --job-dir. Default: `os.environ`.
        settings: arguments of `argparse.ArgumentParser`, such as `description`.

    Returns:
        The parser. Its namespace is valid as `arguments` of `fit`, `run`, `main` and `export`.
    """
    environ = os.environ if environ is None else environ
    flags = Parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **settings)  # type: ignore[arg-type]
    add = flags.add_argument
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
        help="async: parameter servers, every replica at its own speed; sync: all replicas take --sync-period steps, "
        "then average; model-parallel: the layers on several hosts",
    )
    add("--max-steps", type=at_least(1), default=_Default(2000), metavar="N", help="batches to train on, over all replicas")
    add(
        "--eval-interval",
        type=positive,
        default=1.0,
        metavar="SECONDS",
        help="time between evaluations; grows so that evaluations stay a small part of the time",
    )
    add(
        "--eval-steps",
        type=at_least(1),
        metavar="N",
        help="evaluate after every N steps of all replicas instead, while the other replicas pause",
    )
    add("--checkpoint-steps", type=at_least(1), default=500, metavar="N", help="steps between checkpoints")
    add(
        "--checkpoint-seconds",
        type=positive,
        default=60.0,
        metavar="SECONDS",
        help="also checkpoint when this time has passed since the last one",
    )
    add("--keep-checkpoints", type=at_least(1), default=5, metavar="N", help="number of checkpoints to keep")
    add(
        "--sync-period",
        type=lambda text: None if text == "auto" else at_least(1)(text),
        default="auto",
        metavar="K",
        help="local steps between two exchanges; auto: measured (async) or 4 (sync)",
    )
    add("--communication", choices=COMMUNICATION, default="auto", help="sync: how replicas exchange their parameters")
    add("--microbatches", type=at_least(1), default=4, metavar="N", help="model-parallel: parts into which a batch is split")
    add(
        "--seed",
        type=at_least(0, _MAX_SEED),
        default=0,
        metavar="N",
        help="seed of initial values, order of the data and dropout",
    )
    add("--log-interval", type=positive, default=1.0, metavar="SECONDS", help="time between two Train lines of a replica")
    add("--allow-cpu", action="store_true", help="train on the CPU if TensorFlow cannot use the host's GPU")
    return flags


def flags_of(arguments: argparse.Namespace | Sequence[str] | None = None, **defaults: Any) -> Flags:
    """Return the library's flags; invalid arguments end the program with one line on stderr and exit code 2.

    Args:
        arguments: a namespace of `parser`, which may have further flags, or a list of arguments. Default: those of `sys.argv`.
        defaults: values of flags that are not set. A namespace tells only for --max-steps whether it was set, so
            `defaults` override all other flags of a namespace.
    """
    defaults = {name: value for name, value in defaults.items() if value is not None}
    if not isinstance(arguments, argparse.Namespace):
        flag_parser = parser()
        flag_parser.set_defaults(**defaults)
        if isinstance(arguments, str | bytes):
            flag_parser.error(f"arguments={arguments!r} is invalid. Valid: a list, such as {arguments.split()}")
        arguments, defaults = flag_parser.parse_args(None if arguments is None else list(map(str, arguments))), {}
    settings = {field.name: getattr(arguments, field.name) for field in fields(Flags)}
    if not isinstance(settings["max_steps"], _Default):
        defaults.pop("max_steps", None)
    return Flags(**{**settings, "job_dir": arguments.job_dir.rstrip("/") or "/", **defaults})
