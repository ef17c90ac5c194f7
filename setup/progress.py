"""Run what takes long, and say how far it is: `progress.py LABEL --log FILE [--match PATTERN --total N] -- COMMAND …`.

The command's output goes to the log, and its end to stderr where it fails; the exit code is its own. With a pattern, lines that
match it are counted, and the last of them, or its group, is what goes on. On a terminal it is a bar, where rich is installed;
elsewhere, and where SETUP_LINES says so, a line after 2 s and then each 10 s. It needs nothing but Python: what it shows first
is how rich gets installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

_FIRST_SECONDS, _AGAIN_SECONDS = 2.0, 10.0
_DRAW_SECONDS = 0.2
# What the command has left behind may hold its output for as long as it likes.
_REST_SECONDS = 1.0
_MISSING = 127
_TAIL = 25
_WIDE = 60


class Progress:
    """How far a command is."""

    def __init__(self, label: str, pattern: str | None, total: int) -> None:
        self._label, self._pattern, self.total = label, re.compile(pattern) if pattern else None, total
        self.done, self.now = 0, ""
        self._began = time.monotonic()

    def take(self, line: str) -> None:
        """A line of the command's output."""
        if self._pattern and (found := self._pattern.search(line)):
            self.done += 1
            self.now = (found[found.lastindex or 0]).strip()[:_WIDE]

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        far = f"{min(self.done, self.total)} of {self.total}, " if self.total else ""
        return f"{self._label}: {far}{f'{self.now}, ' if self.now else ''}{seconds:.0f} s"


@contextlib.contextmanager
def lines(progress: Progress) -> Iterator[Callable[[], None]]:
    """Says it in lines that stay; for nothing that is done in a moment."""
    due = time.monotonic() + _FIRST_SECONDS

    def show() -> None:
        nonlocal due
        if time.monotonic() >= due:
            sys.stdout.write(f"{progress}\n")
            sys.stdout.flush()
            due = time.monotonic() + _AGAIN_SECONDS

    yield show


@contextlib.contextmanager
def bar(progress: Progress) -> Iterator[Callable[[], None]]:
    """Says it on a line of the terminal that is drawn again and again, and goes at the end."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    with Bar(*columns, *([BarColumn(30)] if progress.total else []), transient=True) as drawn:
        task = drawn.add_task(str(progress), total=progress.total or None)
        yield lambda: drawn.update(task, completed=min(progress.done, progress.total), description=str(progress))


def shown(progress: Progress) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """A bar where there can be one."""
    try:
        import rich.progress  # noqa: F401  is it there?
    except ImportError:
        return lines(progress)
    return bar(progress) if sys.stdout.isatty() and not os.environ.get("SETUP_LINES") else lines(progress)


def run(command: list[str], progress: Progress, log: Path) -> int:
    """The command's exit code, 127 where it cannot be run."""
    tail: deque[str] = deque(maxlen=_TAIL)
    unwritten: list[OSError] = []
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        sys.stderr.write(f"{progress}: cannot run {command[0]}: {error.strerror}\n")
        return _MISSING
    assert process.stdout is not None

    def take(line: str) -> None:
        tail.append(line)
        progress.take(line)

    def read(output: Iterator[str]) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w", buffering=1) as kept:
                for line in output:
                    take(line)
                    kept.write(line)
        except OSError as error:
            unwritten.append(error)
            for line in output:  # or the command would wait for somebody to read it
                take(line)

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        with shown(progress) as show:
            while reader.is_alive() and process.poll() is None:
                reader.join(_DRAW_SECONDS)
                show()
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    reader.join(_REST_SECONDS)
    if code:
        sys.stderr.writelines(list(tail))
        sys.stderr.write(f"{progress}: failed{'' if unwritten else f', see {log}'}\n")
    if unwritten:
        sys.stderr.write(f"{progress}: the log {log} cannot be written: {unwritten[0].strerror}\n")
    return code


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--match")
    parser.add_argument("--total", type=int, default=0)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    try:
        return run(given.command, Progress(given.label, given.match, given.total), given.log)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
