"""Run the process of a trial.

With a launcher, a trial runs in its own systemd unit. Otherwise it runs in this process group; when it ends, all other
processes of the group are killed.
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
from hosts.agent.process import FIRST_PROCESS_SHARE, UNKILLABLE_SECONDS, ProgramSpec, describe_unkillable
from jobs.records import Plan

METRIC_FILE = "CLOUD_ML_HP_METRIC_FILE"
_POLL_SECONDS = 0.1


class TrialChild:
    """Run a trial as a child in this process group; it inherits stdout and stderr."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the trial; OSError if that fails."""
        self._oom_kills = oom_kills()
        self._process = subprocess.Popen(
            [argument.encode("utf-8", "surrogateescape") for argument in argv], env=environment, stdin=subprocess.DEVNULL
        )

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, -n for signal n, once all its processes have ended, or None on timeout."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        _kill_others()
        return status

    def stop(self, seconds: float) -> None:
        """Send SIGTERM to all processes of the trial now, and SIGKILL after this many seconds."""
        for pid in _other_pids():
            _signal(pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        _kill_others()
        self._process.wait()

    def terminate(self, seconds: float) -> None:
        """Do nothing: the trial is in this process group, so it already got the signal."""

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel's OOM killer has killed one of its processes."""
        return oom_kills() > self._oom_kills


class TrialUnit:
    """Run a trial in a systemd unit of its own that writes to this process's stdout."""

    def __init__(self, launcher: Launcher, run: ProgramSpec) -> None:
        """Start the trial; OSError if that fails."""
        self._launched = launcher(run, sys.stdout.fileno())
        self.out_of_memory = False

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, -n for signal n, once all its processes have ended, or None on timeout."""
        if not self._launched.wait(seconds):
            return None
        end = self._launched.reap()
        self.out_of_memory = end.out_of_memory
        return end.status

    def stop(self, seconds: float) -> None:
        """Send SIGTERM to the `main` process or to `all`, as in `stopSignal`; after a part of the time to all; last SIGKILL."""
        self._launched.stop(seconds)
        if not self._launched.wait(FIRST_PROCESS_SHARE * seconds):
            self._launched.signal(signal.SIGTERM)
            seconds -= FIRST_PROCESS_SHARE * seconds
        deadline = time.monotonic() + seconds + UNKILLABLE_SECONDS
        while not self._launched.wait(seconds):
            if time.monotonic() > deadline:
                sys.stderr.write(f"error: {describe_unkillable(self._launched.pid)}\n")
                return
            self._launched.signal(signal.SIGKILL)
            seconds = _POLL_SECONDS

    def terminate(self, seconds: float) -> None:
        """Pass a SIGTERM on to the trial; its unit kills it after this many seconds."""
        self._launched.stop(seconds)


def trial_launcher(
    launcher: Launcher, job: str, cwd: Path, stop_signal_to: str = "main", stop_seconds: float = Plan.stopSeconds
) -> Callable[[Sequence[str], Mapping[str, str]], TrialUnit]:
    """Return a function that starts trials of a job in the folder `cwd`.

    The folder of a trial's metric file belongs to that trial alone; the trial may write to it.
    """

    def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> TrialUnit:
        scratch = Path(environment[METRIC_FILE]).parent
        return TrialUnit(
            launcher,
            ProgramSpec(job, argv, cwd, environment, scratch, stop_signal_to=stop_signal_to, stop_seconds=stop_seconds),
        )

    return spawn


def _kill_others() -> None:
    """Send SIGKILL to all other processes of the group, until none is left."""
    while pids := _other_pids():
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _other_pids() -> list[int]:
    """Return the process ids of this process group, without this process and without zombies."""
    group, own, pids = os.getpgrp(), os.getpid(), []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (pid := int(path.name)) != own:
            with suppress(OSError, ValueError, IndexError):
                state, _, its_group = (path / "stat").read_text().rpartition(") ")[2].split()[:3]
                if int(its_group) == group and state not in "ZX":
                    pids.append(pid)
    return pids


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == os.getpgrp():  # the process may have ended, and another may have its id now
            os.kill(pid, number)
