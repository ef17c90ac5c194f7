"""Stores of every kind for the contract tests, and the servers behind them."""

from __future__ import annotations

import http.client
import json
import os
import select
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import IO, Any, Protocol

import pytest
from fake_storage import LoopbackServer, StorageServer
from waiting import limit, wait_for

from jobs.bucket import Bucket
from ops.cluster import ssh_bucket

BACKEND_VARIABLE = "SCALETIER_STORAGE"
"""The environment variable whose value `go` selects fake-gcs-server, which `make gcs` builds, instead of `fake_storage`."""
_GO_SERVER = Path(__file__).parents[2] / ".cache/fake-gcs/fake-gcs-server"


@dataclass(frozen=True)
class Kind:
    """A store, empty at first.

    Attributes:
        store: has timeouts for a busy machine.
        disconnect: makes the store's backend unreachable.
        impatient: the same store with short timeouts.
        gone: a pattern of the impatient store's error when disconnected.
        root: its folder, if it has one.
    """

    store: Bucket
    disconnect: Callable[[], None]
    impatient: Bucket
    gone: str
    root: Path | None = None


class Server(Protocol):
    """A server on a loopback port."""

    @property
    def port(self) -> int:
        """The port."""

    def stop(self) -> None:
        """Cut all connections and refuse new ones, and keep the port."""


class GoServer:
    """The process of fake-gcs-server."""

    def __init__(self) -> None:
        if not _GO_SERVER.exists():
            pytest.fail(f"{_GO_SERVER.name} is missing: run make gcs")
        # Bound but not listening: this reserves the port before and after the server uses it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = int(self._held.getsockname()[1])
        command = [str(_GO_SERVER), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        command += ["-public-host", f"127.0.0.1:{self.port}"]  # where Go's library reads
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._accepts_connections, "fake-gcs-server answers")

    def _accepts_connections(self) -> bool:
        assert self._process.poll() is None, "fake-gcs-server does not start"
        with suppress(OSError):
            ask(self.port, "GET", "/_internal/healthcheck")
            return True
        return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.stop()
        self._held.close()


@contextmanager
def serve_storage() -> Iterator[Server]:
    """Serve an empty storage with Google's API until the end of the block."""
    server = GoServer() if os.environ.get(BACKEND_VARIABLE) == "go" else StorageServer()
    try:
        yield server
    finally:
        server.close()


def ask(port: int, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of a storage's answer, or None if it is empty."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit())
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, content
        return json.loads(content) if content.startswith(b"{") else None
    finally:
        connection.close()


class Pipe:
    """A channel like SSH's to a process of this machine."""

    def __init__(self, root: Path) -> None:
        argv = shlex.split(ssh_bucket.command(str(root)))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0)

    def send(self, data: bytes) -> None:
        self._process.stdin.write(data)

    def read_line(self, seconds: float) -> bytes:
        return self._output(seconds).readline()

    def read(self, size: int, seconds: float) -> bytes:
        return self._output(seconds).read(size)

    def _output(self, seconds: float) -> IO[bytes]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self._process.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class RemoteFolder(ssh_bucket.SshBucket):
    """A folder on another machine."""

    def __init__(self, root: Path) -> None:
        self.channels: list[Pipe] = []
        super().__init__(lambda: self._open_pipe(root), limit())

    def _open_pipe(self, root: Path) -> Pipe:
        self.channels.append(Pipe(root))
        return self.channels[-1]


class FaultProxy(LoopbackServer):
    """Stand between a store and Google's storage: record requests, and inject one fault for each word of `faults`.

    Attributes:
        requests: method and path of each request.
        faults: `lose` the answer after the effect, `hang` until `released`, or answer a status such as `503`.
        page: the most objects of a list's page, 0 for the server's own limit.
        released: ends hanging requests.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.page = 0
        self.released = Event()
        super().__init__(_Forward)

    def close(self) -> None:
        self.released.set()
        super().close()


class _Forward(BaseHTTPRequestHandler):
    """Forwards the one request of a connection."""

    server: FaultProxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {self.path}")
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "hang":
            self.server.released.wait()
        elif fault.isdigit():
            self.send_error(int(fault), "no")
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=limit())
            headers = {name: value for name, value in self.headers.items() if name not in ("Host", "Connection")}
            path = self.path + (f"&maxResults={self.server.page}" if self.server.page and "prefix=" in self.path else "")
            connection.request(self.command, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if fault != "lose":
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower().startswith("x-goog") or name == "Content-Type":
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the class above
        """Print nothing."""
