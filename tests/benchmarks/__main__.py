"""`python -m benchmarks [NAME …]`: measure all figures, or those named.

It prints a table on stdout and writes results.json beside it. Exit codes: 0 everything was measured, whether a bar was met or
missed; 1 something could not be measured; 2 an unknown name.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from benchmarks import results
from benchmarks.measure import MeasureError
from benchmarks.registry import REGISTRY, Benchmark, UnknownError, chosen
from benchmarks.stack import BenchStack, say

# Modules that register benchmarks; within a tier the rows run in this order.
SUITE = (
    "program",
    "provision",
    "push",
    "commands",
    "jobs",
    "logs",
    "parts",
    "reaction_time",
    "serving",
    "batch",
    "requests",
    "screen",
    "tuning",
    "training",
    "learning",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for module in SUITE:
        importlib.import_module(f"benchmarks.{module}")
    try:
        rows = chosen(sys.argv[1:] if arguments is None else arguments)
    except UnknownError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ.pop("PULUMI_BACKEND_URL", None)  # a team's state is no place for the stack of a measurement
    for number in _SIGNALS:
        # Ctrl-C too: a shell's background processes ignore it, and so would the commands that they start.
        signal.signal(number, _interrupt)
    measured: list[tuple[Benchmark, results.Entry]] = []
    failed: list[str] = []
    code = 0
    try:
        with BenchStack() as stack:
            try:
                _measure(rows, stack, measured, failed)
            finally:
                # The stack must be destroyed, however often Ctrl-C is pressed.
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        code = 130
    except MeasureError as error:
        failed.append(str(error))
    if measured:
        results.show(measured)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return code or (1 if failed else 0)


def _measure(
    rows: Sequence[Benchmark], stack: BenchStack, measured: list[tuple[Benchmark, results.Entry]], failed: list[str]
) -> None:
    for place, row in enumerate(rows, 1):
        say(f"[{place}/{len(rows)}] {row.name}")
        try:
            entry = results.entry(row, row.measure(stack))
        except Exception as error:  # noqa: BLE001  the others are still worth measuring
            failed.append(f"{row.name} was not measured: {' '.join(str(error).split()) or type(error).__name__}")
            say(failed[-1])
            continue
        if dropped := results.write(entry, REGISTRY):
            say(f"dropped from {results.PATH.name}, measured by other code or of no known commit: {', '.join(dropped)}")
        measured.append((row, entry))


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
