"""Run long commands, and show how far they are in one updating line per part of set-up.

`progress.py PART --log FILE [--match PATTERN --total N] -- COMMAND …` runs one command: its output goes to the log, and if it
fails, its last lines also go to stderr. With a pattern, the lines that match it are counted, and the last of them, or its
group, is shown. A terminal shows one line that is redrawn; elsewhere there is a line a minute. If $SETUP_LINE_SECONDS is set,
there is a line each time so many seconds have passed, also on a terminal.

`progress.py --board -- COMMAND …` runs a command whose parts run side by side and write lines such as `part: text`: a terminal
shows the last line of each part. It needs nothing but Python, and the exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_DRAW_SECONDS, _BOARD_SECONDS, _LINE_SECONDS = 0.2, 0.5, 60.0
# The wait for the rest of the output: a background process of the command may keep the pipe open.
_REST_SECONDS = 1.0
_MISSING, _STOPPED = 127, 130
_TAIL = 25
_PR_SET_PDEATHSIG = 1
_ended = threading.Event()
"""Set by SIGTERM, which may come while a command starts."""
_WIDE = 60
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as `9 s` or `2 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class CommandProgress:
    """The progress of a command."""

    def __init__(self, part: str, pattern: str | None, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._part, self._pattern, self._total, self.clock = part, re.compile(pattern) if pattern else None, total, clock
        self._done, self._now = 0, ""
        self._began = clock()

    def take(self, line: str) -> None:
        """Take a line of the command's output."""
        if self._pattern and (match := self._pattern.search(line)):
            self._done += 1
            self._now = match[match.lastindex or 0].strip()[:_WIDE]

    def __str__(self) -> str:
        count = f"{min(self._done, self._total)} of {self._total}, " if self._total else ""
        now = f"{self._now}, " if self._now else ""
        return f"{self._part}: {count}{now}{format_seconds(self.clock() - self._began)}"


class Display:
    """Shows a command's progress.

    Args:
        seconds: The time between lines that stay, or None for one line of a terminal that is redrawn and cleared at the end.
    """

    def __init__(self, progress: CommandProgress, out: TextIO, seconds: float | None) -> None:
        self._progress, self._out, self._seconds = progress, out, seconds
        self._due = progress.clock() + (seconds or 0)

    def show(self) -> None:
        """Redraw the line, or write one if it is due."""
        if self._seconds is None:
            self._out.write(f"\r{str(self._progress)[: columns()]}{_CLEAR_LINE}")
        elif self._progress.clock() >= self._due:
            self._out.write(f"{self._progress}\n")
            self._due = self._progress.clock() + self._seconds
        self._out.flush()

    def close(self) -> None:
        """Clear the line that is redrawn."""
        if self._seconds is None:
            self._out.write(f"\r{_CLEAR_LINE}")
            self._out.flush()


class Board:
    """The last line of each part, on a terminal; lines of no part stay above."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._parts: dict[str, str] = {}
        self._drawn = 0

    def take(self, line: str, error: bool = False) -> None:
        """Take a line of the command's output; errors stay."""
        if match := not error and re.match(r"([a-z-]+): ", line):
            self._parts[match[1]] = line.rstrip()
        else:
            self._clear()
            self._out.write(f"{line.rstrip()}\n")

    def draw(self) -> None:
        """Draw all parts again."""
        self._clear()
        width = columns()
        for line in self._parts.values():
            self._out.write(f"{line[:width]}\n")
        self._drawn = len(self._parts)
        self._out.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._out.write(f"{_UP.format(self._drawn)}{_CLEAR_BELOW}")
        self._drawn = 0


def columns() -> int:
    """Return how many characters fit into a line of the terminal without a line break."""
    return shutil.get_terminal_size().columns - 1


def choose_seconds(out: TextIO) -> float | None:
    """Return the seconds between lines, or None on a terminal that can redraw one."""
    if seconds := os.environ.get("SETUP_LINE_SECONDS"):
        return float(seconds)
    return None if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" else _LINE_SECONDS


def run(command: list[str], progress: CommandProgress, log: Path) -> int:
    """Run one command; return its exit code, or 127 if it cannot be run."""
    tail: deque[str] = deque(maxlen=_TAIL)
    log_errors: list[OSError] = []
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
            with log.open("w", buffering=1) as file:
                for line in output:
                    take(line)
                    file.write(line)
        except OSError as error:
            log_errors.append(error)
            for line in output:  # or the command would wait for a reader
                take(line)

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    display = Display(progress, sys.stdout, choose_seconds(sys.stdout))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_DRAW_SECONDS)
                break
            if _ended.is_set():
                raise KeyboardInterrupt
            display.show()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        display.close()
    reader.join(_REST_SECONDS)
    if code:
        sys.stderr.writelines(list(tail))
        sys.stderr.write(f"{progress}: failed{'' if log_errors else f', see {log}'}\n")
    if log_errors:
        sys.stderr.write(f"{progress}: the log {log} cannot be written: {log_errors[0].strerror}\n")
    return code


def run_board(command: list[str]) -> int:
    """Run a command whose parts write lines; return its exit code."""
    environment = {**os.environ, "SETUP_LINE_SECONDS": str(_BOARD_SECONDS)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", bufsize=1
    )
    lines: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def read(output: TextIO, error: bool) -> None:
        for line in output:
            lines.put((line, error))
        lines.put(("", error))

    for output, error in ((process.stdout, False), (process.stderr, True)):
        threading.Thread(target=read, args=(output, error), daemon=True).start()
    board = Board(sys.stdout)
    open_pipes = 2
    stopped = False
    while open_pipes:
        if _ended.is_set() and not stopped:
            stopped = True
            process.terminate()
        try:
            line, error = lines.get(timeout=_REST_SECONDS)
        except queue.Empty:
            if process.poll() is not None:  # a daemon that a part started may hold the pipes
                break
            continue
        except KeyboardInterrupt:
            stopped = True
            process.terminate()
            continue
        if not line:
            open_pipes -= 1
        elif not stopped:  # make names each part that it ends
            board.take(line, error)
        if lines.empty():
            board.draw()
    code = process.wait()
    return _STOPPED if stopped else code


def end_with_parent() -> None:
    """Treat SIGTERM, SIGHUP, and on Linux the end of the parent process, as Ctrl-C: otherwise the command would continue."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as set by nohup
            signal.signal(number, lambda *_: _ended.set())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--board", action="store_true")
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--match")
    parser.add_argument("--total", type=int, default=0)
    split = sys.argv.index("--")
    flags, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    end_with_parent()
    try:
        return (
            run_board(command)
            if flags.board
            else run(command, CommandProgress(flags.part, flags.match, flags.total), flags.log)
        )
    except KeyboardInterrupt:
        return _STOPPED


if __name__ == "__main__":
    sys.exit(main())
