"""Start a trainer without a shell, read its output to the last byte, and stop it with all that it started."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from hosts.agent.lines import Messages, OutputLine, Splitter, is_quiet, is_startup_message
from hosts.agent.log import Log, format_time
from hosts.agent.process import (
    FIRST_PROCESS_SHARE,
    UNKILLABLE_SECONDS,
    Child,
    ProgramSpec,
    StartProgram,
    describe_unkillable,
    output_pipe,
)
from hosts.agent.replica_rules import SIGKILL_STATUS, Exit
from jobs.firsterror import ErrorFinder, FirstError
from jobs.progress import JobProgress, ProgressFinder

TAIL_LINES = 20
TAIL_CHARACTERS = 1000
_READ = 64 * 1024
_PIPE = 1024 * 1024


class Trainer:
    """A running trainer, with every process that it started; a SIGCHLD reports its end."""

    def __init__(self, run: ProgramSpec, log: Log, start: StartProgram = Child) -> None:
        """Start it; OSError if that fails, ValueError for an argument that no process can have."""
        self._stop_at: float | None = None
        self._signal_rest_at = math.inf
        self._kill_warning = ""
        self._stop_signal_to, self._log = run.stop_signal_to, log
        self._quiet = is_quiet(run.env)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.lines = 0
        self._errors, self._reports = ErrorFinder(), ProgressFinder()
        self._pipe, output = output_pipe()
        try:
            self._process = start(run, output)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(output)
        self.pid = self._process.pid
        self._end_reader, self._end_writer = os.pipe()
        # The pump has a thread of its own: a slow bucket must not hold up the trainer's output.
        self._pump = threading.Thread(target=self._read, args=(log,), name="pump", daemon=True)
        self._pump.start()

    @property
    def stopping(self) -> bool:
        """True once stop was called."""
        return self._stop_at is not None

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._tail)

    @property
    def first_error(self) -> FirstError | None:
        return self._errors.error

    @property
    def progress(self) -> JobProgress | None:
        return self._reports.progress

    def stop(self, seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL to all its processes after this many seconds.

        If SIGTERM goes to the first process alone, so that it can still use the others, they get it later, before SIGKILL.
        """
        if self._stop_at is None:
            now = time.monotonic()
            self._stop_at = now + seconds
            self._kill_warning = f"the program had not ended {seconds:g} s after SIGTERM, and was killed" if seconds else ""
            self._signal_rest_at = now + FIRST_PROCESS_SHARE * seconds if self._stop_signal_to == "main" else math.inf
            self._process.stop(seconds)

    def poll(self) -> Exit | None:
        """Return the exit, or None while it runs.

        At the exit its output has been read, and its children, which could keep its port in use, are killed. A program
        that has not ended UNKILLABLE_SECONDS after SIGKILL counts as killed, so that its job can end.
        """
        now = time.monotonic()
        if self._stop_at is not None and now >= self._stop_at:
            if self._kill_warning and not self._process.ended():
                self._log.write_message(self._kill_warning, "WARNING")
                self._kill_warning = ""
            self._process.signal(signal.SIGKILL)
        elif now >= self._signal_rest_at:
            self._signal_rest_at = math.inf
            self._process.signal(signal.SIGTERM)
        if self._process.ended():
            end = self._process.reap()
        elif self._stop_at is not None and now >= self._stop_at + UNKILLABLE_SECONDS:
            self._log.write_message(describe_unkillable(self.pid), "ERROR")
            end = Exit(SIGKILL_STATUS)
        else:
            return None
        os.close(self._end_writer)
        self._pump.join()
        if end.processes_left and not end.status and not self.stopping:  # ended by a signal, it may leave some
            verb = "was" if end.processes_left == 1 else "were"
            running = f"{end.processes_left} of its processes still ran when the program ended with 0, and {verb} ended"
            self._log.write_message(f"{running}: it must wait for what it starts in the background", "WARNING")
        return end

    def due(self) -> float:
        """Return the seconds until poll has work besides a SIGCHLD."""
        return math.inf if self._stop_at is None else max(min(self._stop_at, self._signal_rest_at) - time.monotonic(), 0.1)

    def _read(self, log: Log) -> None:
        splitter, messages = Splitter(), Messages()
        for data in self._output(lambda: splitter.due(time.monotonic())):
            now, wall_time = time.monotonic(), time.time()  # the latter may be set back
            texts = splitter.feed(data, now) if data else splitter.take_partial(now)
            self._log_lines(log, [messages.add(text, wall_time) for text in texts])
        wall_time = time.time()
        self._log_lines(log, [messages.add(text, wall_time) for text in splitter.end()])

    def _output(self, due: Callable[[], float | None]) -> Iterator[bytes]:
        """Yield the trainer's output in pieces; an empty one if none comes within the seconds `due`.

        It reads not to the end of the pipe but to the end of the trainer and what is in the pipe by then: a process that left
        the trainer's session may hold the pipe open.
        """
        with os.fdopen(self._pipe, "rb") as pipe, os.fdopen(self._end_reader, "rb") as ended:
            with suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)  # room for a burst
            rest = _PIPE
            while rest > 0:
                ready = select.select([pipe, ended], [], [], due())[0]
                if not ready:
                    yield b""
                    continue
                if pipe not in ready or not (data := os.read(pipe.fileno(), _READ)):
                    return
                if ended in ready:
                    rest -= len(data)
                yield data

    def _log_lines(self, log: Log, lines: list[OutputLine]) -> None:
        if self._quiet:
            lines = [line for line in lines if not is_startup_message(line.message)]
        if lines:
            self._tail.extend(line.message[:TAIL_CHARACTERS] for line in lines[-TAIL_LINES:])
            error, seconds = "", time.monotonic()
            for line in lines:
                self._errors.add_line(line.time, line.severity, line.message, format_time(line.time))
                error = self._reports.add_line(line.message, seconds, format_time(line.time)) or error
            log.write(lines)
            if error:
                log.write_message(error, "WARNING")
            self.lines += len(lines)
