"""Start a program through /usr/lib/scaletier/launch, as user `trainer` in its own systemd unit."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts.agent.process import HostBusyError, ProgramSpec
from hosts.agent.replica_rules import SIGKILL_STATUS, Exit

SOCKET_VARIABLE = "SCALETIER_LAUNCH"
"""The variable that names the launcher's socket on a host; without it programs are plain children."""
STOP_FILE = "/run/scaletier-stop"
"""The file in a program's sandbox with the seconds that it has left to end."""
# systemd starts a launcher process for each connection, which takes long on a busy machine.
_START_SECONDS = 60.0
_PATH_REST = r"[^\s'\",;:|&<>*?\[\]{}\\]*"


class Launcher:
    """Client of this host's launcher; `bucket` is the bucket's URL or its folder on the host."""

    def __init__(self, address: str, bucket: str) -> None:
        self._address, self._bucket = address, bucket
        self._early_channels: list[socket.socket] = []

    def connect_early(self) -> None:
        """Connect before a trainer starts: the launcher takes time to start."""
        with suppress(OSError):
            if not self._early_channels:
                self._early_channels.append(_connect(self._address))

    def __call__(self, run: ProgramSpec, output: int) -> LaunchedProgram:
        """Start a program; HostBusyError while an earlier one has not ended, OSError if the launcher refuses."""
        return LaunchedProgram(self._channel(), request(run, self._bucket), output, run.stop_signal_to)

    def _channel(self) -> socket.socket:
        while self._early_channels:
            channel = self._early_channels.pop()
            if not select.select([channel], [], [], 0)[0]:
                return channel
            channel.close()  # readable before a request: its launcher has ended
        return _connect(self._address)

    def tidy(self, keep: Collection[str]) -> None:
        """Remove packages and homes of all jobs on this host except `keep`; OSError if that is not possible now."""
        with _connect(self._address) as channel:
            _send_message(channel, {"keep": sorted(keep)}, [])
            _answer(channel)


def request(run: ProgramSpec, bucket: str) -> dict[str, Any]:
    """Return the request to the launcher. The launcher itself decides which paths the program sees."""
    if any("\0" in word for word in (*run.argv, *run.env.values())):
        raise ValueError("embedded null byte")
    output = run.env.get("JOB_DIR", "").rstrip("/")
    below = re.compile(rf"{re.escape(bucket)}/{_PATH_REST}")
    words = [*run.argv, *run.env.values()] if bucket.startswith("/") else []
    return {
        "job": run.job,
        "argv": list(run.argv),
        "env": dict(run.env),
        "cwd": os.path.normpath(run.cwd),
        "output": output if bucket.startswith("/") and output.startswith(f"{bucket}/") else "",
        "names": sorted({os.path.normpath(path) for word in words for path in below.findall(word)}),
        "scratch": run.scratch.name if run.scratch else "",
        "peers": dict(run.peers),
        "stopSeconds": run.stop_seconds,
    }


class LaunchedProgram:
    """A program of the launcher. If this process ends, the launcher kills the program."""

    def __init__(self, channel: socket.socket, message: dict[str, Any], output: int, stop_signal_to: str = "main") -> None:
        """Start the program; OSError if it did not start.

        A stop sends SIGTERM to its first process if `stop_signal_to` is `main`, to all its processes if it is `all`.
        """
        self._channel, self._stop_signal_to = channel, stop_signal_to
        self._exit = Exit(SIGKILL_STATUS)  # if the launcher is gone, its program was killed with it
        self._ended = threading.Event()
        try:
            _send_message(channel, message, [output])
            self.pid = int(_answer(self._channel)["pid"])
            self._channel.settimeout(None)
        except BaseException:
            self._channel.close()
            raise
        threading.Thread(target=self._await, name="launched", daemon=True).start()

    def stop(self, seconds: float) -> None:
        self._send(f"{int(signal.SIGTERM)} {self._stop_signal_to} {seconds:.1f}")

    def signal(self, number: signal.Signals) -> None:
        self._send(str(int(number)))

    def _send(self, line: str) -> None:
        with suppress(OSError):
            self._channel.sendall(f"{line}\n".encode())

    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Return True once it has ended, False after this many seconds."""
        return self._ended.wait(seconds)

    def reap(self) -> Exit:
        self._channel.close()
        return self._exit

    def _await(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            reply = _answer(self._channel)
            status = -int(reply["signal"]) if reply["signal"] else int(reply["code"])
            processes_left = int(reply["left"])
            self._exit = Exit(status, bool(reply["outOfMemory"]), reply["memoryLimit"], processes_left)
        self._ended.set()
        os.kill(os.getpid(), signal.SIGCHLD)  # as the end of a child does


def _connect(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(_START_SECONDS)
        channel.connect(address)
    except BaseException:
        channel.close()
        raise
    return channel


def _send_message(channel: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    data = json.dumps(message).encode() + b"\n"
    count = socket.send_fds(channel, [data], descriptors)
    channel.sendall(data[count:])


def _answer(channel: socket.socket) -> dict[str, Any]:
    """Return the next line; OSError if it reports an error, or none comes."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            piece = channel.recv(1)
        except TimeoutError:
            raise TimeoutError(f"the host's launcher did not answer in {_START_SECONDS:g} s") from None
        if not piece:
            raise OSError("the host's launcher ended without an answer")
        line += piece
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise (HostBusyError if reply.get("busy") else OSError)(str(reply["error"]))
    return reply


def launcher(bucket: str, environ: os._Environ[str] | dict[str, str]) -> Launcher | None:
    """Return this host's launcher, or None if there is none."""
    address = environ.get(SOCKET_VARIABLE)
    return Launcher(address, bucket) if address else None


def trial_reports_folder(state: Path) -> Path:
    """Return the folder for the reports of trials, on a host with a launcher."""
    return state / "trials"
