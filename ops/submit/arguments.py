"""Find a trainer's flags for data, output and steps by their usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the module imports pydantic, which is slow
    from ops.package.trainer_config import DeclaredFlags

STRATEGY = "--strategy"
# `--data`, `--data-dir`, `--my_data_paths`, and `--train-files`, `--eval_dir` and the like.
_PLACE = r"(path|dir|file|glob|pattern)s?"
_DATA_FLAG = re.compile(
    rf"--((\w+[-_])?data(set)?([-_]{_PLACE})?|(train|training|eval|valid|validation|test)[-_]({_PLACE}|inputs?))"
)
# `--num_train_steps`, `--total-steps` and the like, of a trainer that declares no such flag.
_STEPS_FLAG = re.compile(r"--((max|num|total|train|training)[-_])?((train|training|global)[-_])?steps")
_JOB_DIR_FLAGS = {
    "--job-dir": re.compile(rb"[\"']--job-dir\b"),
    "--job_dir": re.compile(rb"[\"']--job_dir\b|DEFINE_\w+\(\s*[\"']job_dir\b"),
}
_OUTPUT_FLAGS = tuple(f"--{name}" for name in ("job-dir", "job_dir", "output_path", "output-path", "output-dir", "output_dir"))


def data_paths(args: Sequence[str]) -> list[str]:
    """Return the paths of the data flags, such as `--data-dir=a,b`; empty if there are none."""
    return [path for flag, value in flags(args) if _DATA_FLAG.fullmatch(flag) for path in value.split(",") if path]


def last_step(args: Sequence[str], declared_flags: DeclaredFlags) -> int | None:
    """Return the global step at which a trainer ends, from its arguments or its declaration, or None."""
    values = [
        value
        for flag, value in flags(args)
        if (flag == declared_flags.steps if declared_flags.steps else _STEPS_FLAG.fullmatch(flag))
    ]
    if not values:
        return declared_flags.defaultSteps
    return whole_number(values[-1])


def whole_number(text: str) -> int | None:
    """Parse a whole number of at most 15 digits; None for any other text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 16 else None


def job_dir_flag(files: Mapping[str, bytes]) -> str | None:
    """Return the flag for the output folder that a package's own code knows, or None.

    Cloud ML passed `--job-dir` to every trainer; one that does not know it would end with an error.
    """
    code = [content for path, content in files.items() if path.endswith(".py")]
    return next((flag for flag, pattern in _JOB_DIR_FLAGS.items() if any(pattern.search(content) for content in code)), None)


def has_output_flag(args: Sequence[str]) -> bool:
    """Return True if the arguments name the output folder."""
    return any(arg.partition("=")[0] in _OUTPUT_FLAGS for arg in args)


def flags(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags that have a value: `--a=b`, or `--a b`."""
    for index, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and (equals or args[index + 1 : index + 2]):
            yield flag, value if equals else args[index + 1]


def redirect_output(args: Sequence[str], folder: str) -> list[str]:
    """Return the arguments with every output folder replaced: another run must not resume in it."""
    result: list[str] = []
    for previous, arg in zip(("", *args), args, strict=False):
        flag, equals, _ = arg.partition("=")
        inline = f"{flag}={folder}" if equals and flag in _OUTPUT_FLAGS else arg
        result.append(folder if previous in _OUTPUT_FLAGS else inline)
    return result


def drop_flags_and_paths(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without the flags `names` and those that name paths of data or output."""
    data = (flag for flag, _ in flags(args) if _DATA_FLAG.fullmatch(flag))
    return drop_flags(args, (*names, *_OUTPUT_FLAGS, *data))


def drop_flags(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without those flags and their values."""
    pairs = zip(("", *args), args, strict=False)
    return [arg for previous, arg in pairs if arg.partition("=")[0] not in names and previous not in names]
