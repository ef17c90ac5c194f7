"""Forward a local port to a port of a host, through an open SSH connection."""

from __future__ import annotations

import contextlib
import errno
import socketserver
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import paramiko

from ops.cluster.remote import Fleet
from ops.errors import HostError, UsageError

LOOPBACK = "127.0.0.1"
_CHUNK = 32_768
_PORTS_TRIED = 100
_Listening = TypeVar("_Listening")


def local_ports(port: str | None, first: int) -> range:
    """Return the local ports to try, in order: the requested one, or the first hundred from `first`."""
    if port is None:
        return range(first, first + _PORTS_TRIED)
    if not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise UsageError(f"--port {port!r} is no port; valid are 1 to 65535")
    return range(int(port), int(port) + 1)


def first_free(ports: Iterable[int], listen: Callable[[int], _Listening]) -> _Listening:
    """Call `listen` with these ports until one is free, and return its result; UsageError if none is."""
    tried = []
    for port in ports:
        try:
            return listen(port)
        except PermissionError:
            raise UsageError(f"port {port} is for root alone: give a --port above 1023") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        tried.append(port)
    problem = f"port {tried[0]} is taken" if len(tried) == 1 else f"ports {tried[0]} to {tried[-1]} are taken"
    raise UsageError(f"{problem} on this machine: give another --port")


def open_channel(fleet: Fleet, name: str, port: int, seconds: float = 30.0) -> Any:
    """Open a channel to a port of a host; HostError if the host does not answer, SSHException if it refuses the channel.

    If the connection to the host broke, another is opened.
    """
    return fleet.connection(name).transport.open_channel("direct-tcpip", (LOOPBACK, port), (LOOPBACK, 0), timeout=seconds)


class Forward:
    """Forward a local port, the first free one of `ports`, to a host's port `remote_port`, which the caller sets.

    Only clients on this machine can connect. For each, `open_to_host` opens a channel to the remote port, like `open_channel`.
    If the host closes a channel without an answer to the client's last data, `on_unanswered` is called with the channel; the
    client's connection is closed after that.
    """

    def __init__(
        self,
        open_to_host: Callable[[int], Any],
        ports: Iterable[int],
        on_unanswered: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.remote_port = 0
        self._open_to_host, self._on_unanswered = open_to_host, on_unanswered
        self._server = self._listen(ports)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _listen(self, ports: Iterable[int]) -> socketserver.ThreadingTCPServer:
        forward = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                forward.carry(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128  # a browser opens many connections at once

        return first_free(ports, lambda port: Server((LOOPBACK, port), Handler))

    def carry(self, client: Any) -> None:
        """Copy a client's connection both ways until the host ends it; return if the host refuses it."""
        try:
            channel = self._open_to_host(self.remote_port)
        except (HostError, paramiko.SSHException, OSError, EOFError):
            return
        waits = threading.Event()

        def on_end() -> None:
            if waits.is_set():
                self._on_unanswered(channel)

        with contextlib.closing(channel):
            threading.Thread(target=_pump, args=(client, channel, waits.set), daemon=True).start()
            _pump(channel, client, waits.clear, on_end)


def _pump(source: Any, sink: Any, on_data: Callable[[], None], on_end: Callable[[], None] = lambda: None) -> None:
    """Copy one connection to another, then end it; call `on_data` before each piece, `on_end` before the end."""
    with contextlib.suppress(OSError, EOFError):
        try:
            while piece := source.recv(_CHUNK):
                on_data()
                sink.sendall(piece)
        finally:
            on_end()
        sink.shutdown(1)
