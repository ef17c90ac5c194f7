"""Processes of a trainer on this machine: started together, read line by line, and always ended."""

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
from typing import Any

from ops.cluster.inventory import ROOT
from ops.errors import UsageError

# The runtimes that local hosts mount, as `make image` builds them, one for each list of packages.
HOSTS_PYTHONS = ROOT / ".cache" / "hosts"
END_SECONDS = 20.0
"""The most seconds that a process may take to end after SIGTERM."""
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class ProcessStart:
    """The command of a process, `python -m ARGV`, with the name of its replica and its whole environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


class ProcessGroup:
    """Running processes: the first and its helpers; `failed` is the first with an exit code other than 0."""

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
        # Its output arrives at once; a child that still holds its stdout is not waited for.
        reader.join(_DRAIN_SECONDS)
        self._lines.put((index, None))

    def _read(self, index: int) -> None:
        stdout = self._processes[index].stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put((index, line.decode("utf-8", "replace").rstrip("\n")))

    def lines(self, until: Callable[[], float]) -> Iterator[str]:
        """Yield all output until the first ends, any fails, or it is `until()`; `last` has each last line."""
        while (seconds := until() - time.monotonic()) > 0:
            try:
                index, line = self._lines.get(timeout=seconds)
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
def start_processes(starts: Sequence[ProcessStart], folder: Path, grace: float = END_SECONDS) -> Iterator[ProcessGroup]:
    """Start processes in `folder`, and end their groups: SIGTERM, and SIGKILL `grace` seconds later."""
    python, processes = python_here(), list[subprocess.Popen[bytes]]()
    try:
        for start in starts:
            argv, env = [python, "-m", *start.argv], {**start.env, "PYTHONUNBUFFERED": "1"}
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(argv, cwd=folder, env=env, start_new_session=True, **streams))
        yield ProcessGroup([start.name for start in starts], processes)
    finally:
        _end(processes, grace)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Send SIGTERM to the process groups, which then may save, and SIGKILL after `grace` seconds."""
    try:
        _signal(processes, signal.SIGTERM, grace)
    finally:
        _signal(processes, signal.SIGKILL, END_SECONDS)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int, seconds: float) -> None:
    """Send a signal to the process groups, and wait until they end, for a limited time."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    until = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def python_here() -> str:
    """Return the Python with TensorFlow: this one, or the hosts' if it was made here."""
    if find_spec("tensorflow"):
        return sys.executable
    runtimes = [python for python in HOSTS_PYTHONS.glob("runtime-*/bin/python") if python.exists()]
    if runtimes:
        return str(max(runtimes, key=lambda python: python.lstat().st_mtime))
    raise UsageError("there is no TensorFlow here to run the job with: run make tensorflow")
