"""Run a trial in a systemd unit of its own, through the launcher."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hosts.agent.launcher_client import Launcher
from hosts.agent.process import FIRST_PROCESS_SHARE, UNKILLABLE_SECONDS, ProgramSpec, describe_unkillable
from jobs.records import Plan

METRIC_FILE = "CLOUD_ML_HP_METRIC_FILE"
_POLL_SECONDS = 0.1


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
