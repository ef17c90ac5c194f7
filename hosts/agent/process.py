"""Interface of a running program, and its simplest implementation: a child process that leads its own session."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hosts.agent.replica_rules import Exit
from jobs import cgroup
from jobs.records import STOP_FILE_VARIABLE, Plan

FIRST_PROCESS_SHARE = 0.8
"""The share of the time until SIGKILL after which SIGTERM goes to all processes, not to the first alone."""
UNKILLABLE_SECONDS = 60.0
"""The time after SIGKILL after which a program is given up: a process that waits for a device in the kernel does not end."""


@dataclass(frozen=True)
class ProgramSpec:
    """A program to run: its job, its command line, its folder and its environment.

    `scratch` is a folder that the program shares with its caller, `stdin` its input. With `stop_signal_to` `main`
    SIGTERM goes to its first process alone, with `all` to each of them. With a launcher, processes that outlive the first
    one have `stop_seconds` to end, and only the hosts of `peers`, addresses by name, and the program can reach each other.
    """

    job: str
    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    scratch: Path | None = None
    stdin: bytes = b""
    stop_signal_to: str = "main"
    stop_seconds: float = Plan.stopSeconds
    peers: Mapping[str, str] = field(default_factory=dict)


class HostBusyError(OSError):
    """No program can start now, as an earlier one on this host has not ended; the same start may succeed later."""


class RunningProgram(Protocol):
    """A program that was started, and all that it starts."""

    pid: int

    def stop(self, seconds: float) -> None:
        """Send SIGTERM by `stop_signal_to`, and write the seconds until SIGKILL to the file that SCALETIER_STOP_FILE names."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes; do nothing if there is none."""

    def ended(self) -> bool:
        """Return True once it has ended; a SIGCHLD reports that. Processes that it left are dead, or `reap` kills them."""

    def reap(self) -> Exit:
        """Return how it ended, after its end."""


class StartProgram(Protocol):
    """Starts a program; OSError, such as HostBusyError, if that fails, ValueError for an argument that no process can have."""

    def __call__(self, run: ProgramSpec, output: int) -> RunningProgram:
        """Start a program; `output` is a descriptor that the caller closes."""


class Child:
    """A child of this process: `signal` reaches every process of its process group."""

    def __init__(self, run: ProgramSpec, output: int) -> None:
        self._oom_kills = cgroup.oom_kills()
        self._stop_signal_to, self._stop_file = run.stop_signal_to, run.env.get(STOP_FILE_VARIABLE)
        if self._stop_file:
            Path(self._stop_file).unlink(missing_ok=True)
        stdin = os.memfd_create("stdin") if run.stdin else os.open(os.devnull, os.O_RDONLY)
        try:
            if run.stdin:
                os.write(stdin, run.stdin)
                os.lseek(stdin, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [argument.encode("utf-8", "surrogateescape") for argument in run.argv],  # byte for byte
                cwd=run.cwd,
                env=run.env,
                stdin=stdin,
                stdout=output,
                stderr=output,  # one pipe, because two would lose the order of the lines
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        self.pid = self._process.pid

    def stop(self, seconds: float) -> None:
        if self._stop_file:
            complete = Path(f"{self._stop_file}.new")
            complete.write_text(f"{seconds:.1f}\n")
            complete.rename(self._stop_file)
        if self._stop_signal_to == "all":
            self.signal(signal.SIGTERM)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # Popen.terminate would reap a process that has ended, and `ended` fail

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ended(self) -> bool:
        # Not reaped before its group is signalled, so that the group's id is not reused yet.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> Exit:
        self.signal(signal.SIGKILL)
        return Exit(self._process.wait(), cgroup.oom_kills() > self._oom_kills, cgroup.memory_limit())


def describe_unkillable(pid: int) -> str:
    """Return one line about a program that is given up."""
    why = "the kernel waits for a disk or another device"
    return f"the program (pid {pid}) has not ended {UNKILLABLE_SECONDS:g} s after SIGKILL, and is given up: {why}"


def output_pipe() -> tuple[int, int]:
    """Make a pipe for a program's output; return the end to read from and the end for the program.

    A program of another user, too, can open its end again by name, such as /dev/stderr. Reading stays with this user.
    """
    pipe, output = os.pipe()
    os.fchmod(output, 0o622)
    return pipe, output


def delete(folder: Path) -> None:
    """Delete a folder as far as this user may, by `rm`, which no depth of folders stops."""
    subprocess.run(["rm", "-rf", "--", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
