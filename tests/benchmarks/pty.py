"""A command on a terminal of its own: the times of its frames, and its processor time."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import end

_LINES, _COLUMNS = 50, 160
# Every frame begins at the top left.
_HOME = b"\x1b[H"
_END_SECONDS = 20.0


@dataclass(frozen=True)
class Watched:
    """The monotonic times of the frames, the processor seconds, and the seconds of the whole run."""

    frames: Sequence[float]
    cpu: float
    seconds: float

    @property
    def share(self) -> float:
        """Percent of a processor."""
        return 100 * self.cpu / self.seconds


def watch(command: Sequence[str], env: Mapping[str, str], cwd: Path, seconds: float) -> Watched:
    """Run a command on a terminal for `seconds`, then Ctrl-C; its processor time is that of the whole run."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    on_terminal = {**env, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    on_terminal.pop("COLUMNS", None)
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=on_terminal, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    frames: list[float] = []
    try:
        interrupted = False
        while (remaining := began + seconds + (_END_SECONDS if interrupted else 0) - time.monotonic()) > 0 or not interrupted:
            if remaining <= 0:
                os.kill(process.pid, signal.SIGINT)
                interrupted = True
            elif select.select([ours], [], [], remaining)[0]:
                try:
                    data = os.read(ours, 1 << 16)
                except OSError:  # it has ended
                    break
                frames += [time.monotonic()] * data.count(_HOME)
        _, code, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
    finally:
        end(process)
        os.close(ours)
    return Watched(frames, usage.ru_utime + usage.ru_stime, time.monotonic() - began)
