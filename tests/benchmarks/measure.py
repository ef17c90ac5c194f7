"""Commands and their times. Every command has its own process group and is ended with the measurement."""

from __future__ import annotations

import math
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from interrupts import HEARS_CTRL_C

LIMIT_SECONDS = 600.0
_END_SECONDS = 30.0


class MeasureError(RuntimeError):
    """A failed measurement; the message is one line."""


@dataclass(frozen=True)
class Ran:
    """A command that ended: exit code, both outputs, and seconds from its start to its end."""

    code: int
    out: str
    err: str
    seconds: float


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with a pipe as stdout; leaving the context ends its whole process group."""
    process = subprocess.Popen(
        [*HEARS_CTRL_C, *command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)
        if process.stdout:
            process.stdout.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Send Ctrl-C to the process group, then SIGKILL to the rest."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_SECONDS)


def run(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, stdin: bytes | None = None, limit: float = LIMIT_SECONDS
) -> Ran:
    """Run a command to its end.

    Raises:
        MeasureError: it takes longer than the limit.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [*HEARS_CTRL_C, *command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout=limit)
        seconds = time.monotonic() - began
    except subprocess.TimeoutExpired:
        raise MeasureError(f"{' '.join(command)} did not end within {limit:.0f} s") from None
    finally:
        end(process)
    return Ran(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), seconds)


def must(ran: Ran, what: str) -> Ran:
    """Return a command's result, which must be a success.

    Raises:
        MeasureError: it failed; the message has the end of its output.
    """
    if ran.code:
        tail = " ".join((ran.err.strip() or ran.out.strip()).split())[-600:]
        raise MeasureError(f"{what} ended with {ran.code}: {tail}")
    return ran


def first_byte(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> float:
    """Return the seconds from a command's start to its first byte on stdout.

    Raises:
        MeasureError: it prints none.
    """
    began = time.monotonic()
    with running(command, env, cwd, subprocess.DEVNULL) as process:
        assert process.stdout is not None
        byte = os.read(process.stdout.fileno(), 1)
        seconds = time.monotonic() - began
        if not byte:
            raise MeasureError(f"{' '.join(command)} printed nothing")
        return seconds


class Lines:
    """Lines of a running command's stdout, each with the Unix time of its arrival."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._queue: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):  # the pipe is closed once no more is read
            for line in self._process.stdout:
                self._queue.put((time.time(), line.decode("utf-8", "replace").rstrip("\n")))
        self._queue.put(None)

    def until(self, deadline: float) -> Iterator[tuple[float, str]]:
        """Yield the lines until they end, or until this time of the monotonic clock."""
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=remaining)
            except queue.Empty:
                return
            if item is None:
                return
            yield item


def peak_memory(command: Sequence[str], env: Mapping[str, str], cwd: Path, limit: float = LIMIT_SECONDS) -> float:
    """Return the peak resident MB of a command's process (VmHWM); it must succeed."""
    peak, deadline = 0.0, time.monotonic() + limit
    # The rusage of a child begins with the memory of its parent, so it is not used.
    with running(command, env, cwd, subprocess.DEVNULL) as process:
        Lines(process)
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                peak = max(peak, high_water(Path(f"/proc/{process.pid}/status").read_text()))
            time.sleep(0.02)
        if process.poll() != 0:
            raise MeasureError(f"{' '.join(command)} ended with {process.poll()}")
    return peak


def high_water(status: str) -> float:
    """Return the largest peak resident MB (VmHWM) in texts of /proc/PID/status; 0 if there is none."""
    return max((int(kb) * 1024 / 1e6 for kb in re.findall(r"VmHWM:\s+(\d+) kB", status)), default=0.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed (nearest rank).

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]
