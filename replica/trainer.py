"""The trainer as a child process: started without a shell, read to its last byte, stopped with all its children."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jobs.firsterror import ErrorFinder, FirstError
from replica.lines import Line, Messages, Splitter
from replica.log import Log, moment
from replica.memory import oom_kills
from replica.noise import is_quiet, is_remark

TAIL_LINES = 20
TAIL_CHARACTERS = 1000
_READ = 64 * 1024
_PIPE = 1024 * 1024


class Trainer:
    """A running trainer, leader of its own session so that a signal reaches every process that it started."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], log: Log) -> None:
        """Start it; OSError where that cannot be, ValueError for an argument that no process can have."""
        self._stop_at: float | None = None
        self._quiet = is_quiet(env)
        self._oom_kills = oom_kills()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.lines = 0
        self._errors = ErrorFinder()
        self._process = subprocess.Popen(
            [argument.encode("utf-8", "surrogateescape") for argument in argv],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, because two would lose the order of the lines
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._ended, self._end = os.pipe()
        # The pump has a thread of its own: a slow bucket must not hold up the trainer's output.
        self._pump = threading.Thread(target=self._read, args=(log,), name="pump", daemon=True)
        self._pump.start()

    @property
    def stopping(self) -> bool:
        """True once stop was called."""
        return self._stop_at is not None

    @property
    def out_of_memory(self) -> bool:
        """True where the kernel killed one of its processes for want of memory."""
        return oom_kills() > self._oom_kills

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._tail)

    @property
    def first_error(self) -> FirstError | None:
        """The first error that it has printed."""
        return self._errors.found

    def stop(self, seconds: float) -> None:
        """SIGTERM to all its processes now, and SIGKILL after so many seconds."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + seconds
            self._signal(signal.SIGTERM)

    def poll(self) -> int | None:
        """The exit code as a shell gives it once the trainer has ended and its output is read, until then None.

        Children that outlive the trainer are killed: they would hold its port.
        """
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._signal(signal.SIGKILL)
        # Not reaped before its group is signalled, so that the group's id cannot be somebody else's yet.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._signal(signal.SIGKILL)
        os.close(self._end)
        self._pump.join()
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def due(self) -> float:
        """Seconds until poll has something to do besides a SIGCHLD."""
        return float("inf") if self._stop_at is None else max(self._stop_at - time.monotonic(), 0.1)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self, log: Log) -> None:
        splitter, messages = Splitter(), Messages()
        for data in self._output(lambda: splitter.due(time.time())):
            moment = time.time()
            texts = splitter.feed(data, moment) if data else splitter.half(moment)
            self._take(log, [messages.add(text, moment) for text in texts])
        moment = time.time()
        self._take(log, [messages.add(text, moment) for text in splitter.end()])

    def _output(self, due: Callable[[], float | None]) -> Iterator[bytes]:
        """All that the trainer writes, in pieces; an empty one where none comes within the seconds that are `due`.

        Not to the end of the pipe but to the end of the trainer and what is in the pipe by then: a process that left the
        trainer's session may hold the pipe open.
        """
        assert self._process.stdout is not None
        with self._process.stdout as pipe, os.fdopen(self._ended, "rb") as ended:
            with suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)  # room for a burst
            left = _PIPE
            while left > 0:
                ready = select.select([pipe, ended], [], [], due())[0]
                if not ready:
                    yield b""
                    continue
                if pipe not in ready or not (data := os.read(pipe.fileno(), _READ)):
                    return
                if ended in ready:
                    left -= len(data)
                yield data

    def _take(self, log: Log, lines: list[Line]) -> None:
        if self._quiet:
            lines = [line for line in lines if not is_remark(line.message)]
        if lines:
            self._tail.extend(line.message[:TAIL_CHARACTERS] for line in lines[-TAIL_LINES:])
            for line in lines:
                self._errors.see(line.time, line.severity, line.message, moment(line.time))
            log.write(lines)
            self.lines += len(lines)
