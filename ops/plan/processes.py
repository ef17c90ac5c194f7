"""Processes of a trainer on this machine: started together, read line by line, and all ended in the end, whatever happens."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ops.cluster.inventory import ROOT
from ops.errors import UsageError

# What local hosts mount, as `make image` leaves it; by its list, so there may be some.
HOSTS_PYTHONS = ROOT / ".cache" / "hosts"
END_SECONDS = 20.0
"""So long a process may take to end once it has SIGTERM."""
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Start:
    """A process to be started, `python -m ARGV`, by the name of its replica; `env` is all of its environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


class Running:
    """Processes that run; of the first one the others are helpers. `failed` is the first to end with a code that is not 0."""

    def __init__(self, names: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.failed: tuple[str, int] | None = None
        self.last: dict[str, str] = {}
        self._names, self._processes = names, processes
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        for index in range(len(processes)):
            threading.Thread(target=self._follow, args=(index,), daemon=True).start()

    def _follow(self, index: int) -> None:
        reader = threading.Thread(target=self._read, args=(index,), daemon=True)
        reader.start()
        self._processes[index].wait()
        # What it has printed comes at once; who still holds its stdout is a child that it left, and not waited for.
        reader.join(_DRAIN_SECONDS)
        self._lines.put((index, None))

    def _read(self, index: int) -> None:
        stdout = self._processes[index].stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put((index, line.decode("utf-8", "replace").rstrip("\n")))

    def lines(self, until: Callable[[], float]) -> Iterator[str]:
        """Yield what all of them print until the first has ended, any has failed, or the monotonic clock is at `until()`.

        `last` has what each printed last, by its name.
        """
        while (left := until() - time.monotonic()) > 0:
            try:
                index, line = self._lines.get(timeout=left)
            except queue.Empty:
                return
            name = self._names[index]
            if line is not None:
                if line.strip():
                    self.last[name] = line.strip()
                yield line
                continue
            if code := self._processes[index].returncode:
                self.failed = name, code
            if index == 0 or code:
                return


@contextmanager
def running(starts: Sequence[Start], folder: Path, grace: float = END_SECONDS) -> Iterator[Running]:
    """Start them in `folder`, and end them with all that they started: SIGTERM, and SIGKILL `grace` seconds later.

    UsageError where no Python here has TensorFlow.
    """
    python, processes = python_here(), list[subprocess.Popen[bytes]]()
    try:
        for start in starts:
            processes.append(
                subprocess.Popen(
                    [python, "-m", *start.argv],
                    cwd=folder,
                    env={**start.env, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        yield Running([start.name for start in starts], processes)
    finally:
        _end(processes, grace)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """SIGTERM, upon which a trainer may save a checkpoint, and SIGKILL for what is left of their process groups, also where
    the wait for them is interrupted.
    """
    try:
        _signal(processes, signal.SIGTERM)
        _wait(processes, grace)
    finally:
        _signal(processes, signal.SIGKILL)
        _wait(processes, END_SECONDS)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def python_here() -> str:
    """The Python that has TensorFlow: this one, or the hosts' where it was made here; UsageError where neither has."""
    if find_spec("tensorflow"):
        return sys.executable
    there = [python for python in HOSTS_PYTHONS.glob("runtime-*/bin/python") if python.exists()]
    if there:
        return str(max(there, key=lambda python: python.lstat().st_mtime))
    raise UsageError("there is no TensorFlow here to run the job with: run make tensorflow")
