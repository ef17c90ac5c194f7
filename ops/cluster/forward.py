"""Forward a local port to a port of a host, through an open SSH connection."""

from __future__ import annotations

import contextlib
import errno
import socketserver
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import paramiko

from ops.cluster.remote import Fleet
from ops.errors import HostError, UsageError

_CHUNK = 32_768
_OPEN_SECONDS = 30.0
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


class ChannelOpener(Protocol):
    """Opens channels like paramiko's Transport, and with its errors."""

    def open_channel(self, kind: str, dest: tuple[str, int], src: tuple[str, int], /, *, timeout: float) -> Any:
        """Open a channel to the address `dest`, for a client at `src`."""


def open_channel_on(fleet: Fleet, name: str, kind: str, dest: tuple[str, int], src: tuple[str, int], timeout: float) -> Any:
    """Open a channel to a host; reconnect if the connection broke.

    Raises:
        HostError: if the host does not answer.
        SSHException: if it refuses the channel.
    """
    return fleet.connection(name).transport.open_channel(kind, dest, src, timeout=timeout)


class Forward:
    """Forward a local port, the first free one of `ports`, to a host's port `remote_port`, which the caller sets.

    Only clients on this machine can connect, as the local port listens on the address `loopback`.
    If the host closes a channel without an answer to the client's last data, `on_unanswered` is called with the channel; the
    client's connection is closed after that.
    """

    def __init__(
        self,
        transport: ChannelOpener,
        loopback: str,
        ports: Iterable[int],
        on_unanswered: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.remote_port = 0
        self._transport, self._loopback, self._on_unanswered = transport, loopback, on_unanswered
        self._server = self._listen(loopback, ports)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _listen(self, loopback: str, ports: Iterable[int]) -> socketserver.ThreadingTCPServer:
        forward = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                forward.carry(self.request, self.client_address)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128  # a browser opens many connections at once

        return first_free(ports, lambda port: Server((loopback, port), Handler))

    def carry(self, client: Any, address: tuple[str, int]) -> None:
        """Copy a client's connection both ways until the host ends it; return if the host refuses it."""
        dest = (self._loopback, self.remote_port)
        try:
            channel = self._transport.open_channel("direct-tcpip", dest, address, timeout=_OPEN_SECONDS)
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
