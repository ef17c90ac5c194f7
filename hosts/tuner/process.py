"""Run the process of a trial.

With a launcher, a trial runs in its own systemd unit. Otherwise it is in this process group, and at its end all others of the
group are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hosts.agent.cgroup import oom_kills
from hosts.agent.launcher_client import Launcher
from hosts.agent.process import FIRST_PROCESS_SHARE, ProcessRun
from jobs.records import Plan

METRIC_FILE = "CLOUD_ML_HP_METRIC_FILE"
_POLL_SECONDS = 0.1


class TrialChild:
    """A trial that runs; its output is this process's own."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; OSError if that fails."""
        self._oom_kills = oom_kills()
        self._process = subprocess.Popen(
            [argument.encode("utf-8", "surrogateescape") for argument in argv], env=environment, stdin=subprocess.DEVNULL
        )

    def wait(self, seconds: float) -> int | None:
        """Return the exit status once all its processes have ended, or None on timeout.

        The status is as in `hosts.agent.replica_rules`.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        _end_others()
        return status

    def stop(self, seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL after this many seconds."""
        for pid in _others():
            _signal(pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        _end_others()
        self._process.wait()

    def terminate(self, seconds: float) -> None:
        """Do nothing: it is of the process group that got the signal."""

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel killed one of its processes for want of memory."""
        return oom_kills() > self._oom_kills


class TrialUnit:
    """A trial in a unit of its own; its output is this process's."""

    def __init__(self, starts: Launcher, run: ProcessRun) -> None:
        """Start it; OSError if that fails."""
        self._launched = starts(run, sys.stdout.fileno())
        self.out_of_memory = False

    def wait(self, seconds: float) -> int | None:
        """Return the exit status once all its processes have ended, or None on timeout.

        The status is as in `hosts.agent.replica_rules`.
        """
        if not self._launched.wait(seconds):
            return None
        end = self._launched.reap()
        self.out_of_memory = end.out_of_memory
        return end.status

    def stop(self, seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL after this many seconds."""
        self._launched.stop(seconds)
        if not self._launched.wait(FIRST_PROCESS_SHARE * seconds):
            self._launched.signal(signal.SIGTERM)
            seconds -= FIRST_PROCESS_SHARE * seconds
        while not self._launched.wait(seconds):
            self._launched.signal(signal.SIGKILL)
            seconds = _POLL_SECONDS

    def terminate(self, seconds: float) -> None:
        """Pass on a SIGTERM; the trial is killed after this many seconds."""
        self._launched.stop(seconds)


def trial_launcher(
    starts: Launcher, job: str, cwd: Path, stop_signal: str = "main", stop_seconds: float = Plan.stopSeconds
) -> Callable[[Sequence[str], Mapping[str, str]], TrialUnit]:
    """Return a function that starts trials of a job in that folder.

    A trial reports its metrics in a file of a folder of its own.
    """

    def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> TrialUnit:
        scratch = Path(environment[METRIC_FILE]).parent
        return TrialUnit(
            starts, ProcessRun(job, argv, cwd, environment, scratch, stop_signal=stop_signal, stop_seconds=stop_seconds)
        )

    return spawn


def _end_others() -> None:
    """Send SIGKILL to all others of the group, and to those that they start meanwhile."""
    while others := _others():
        for pid in others:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _others() -> list[int]:
    """Return the processes of this process group, without itself and zombies."""
    group, own, pids = os.getpgrp(), os.getpid(), []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (pid := int(path.name)) != own:
            with suppress(OSError, ValueError, IndexError):
                state, _, of_group = (path / "stat").read_text().rpartition(") ")[2].split()[:3]
                if int(of_group) == group and state not in "ZX":
                    pids.append(pid)
    return pids


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == os.getpgrp():  # the process may have ended, and its number be that of another
            os.kill(pid, number)
