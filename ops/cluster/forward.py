"""A local port forwarded to one of a host through an open SSH connection."""

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
    """The connections to the other end, like paramiko's Transport, with its errors."""

    def open_channel(self, kind: str, there: tuple[str, int], peer: tuple[str, int], /, *, timeout: float) -> Any:
        """Open a channel to that host and port, for that peer."""


def open_channel_on(fleet: Fleet, name: str, kind: str, there: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
    """Open a channel to a host; reconnect if the connection broke. Raises HostError, and what a refused connection raises."""
    return fleet.connection(name).transport.open_channel(kind, there, peer, timeout=timeout)


class Forward:
    """A listener on the first free one of `ports`, for this machine alone, which leads to `port_there`.

    `unanswered` is called with a channel that ends before the other end has answered, and before the client learns of it.
    """

    def __init__(
        self,
        transport: ChannelOpener,
        loopback: str,
        ports: Iterable[int],
        unanswered: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.port_there = 0
        self._transport, self._loopback, self._unanswered = transport, loopback, unanswered
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

    def carry(self, here: Any, peer: tuple[str, int]) -> None:
        """Carry one connection both ways until the host's side ends it; close one that the host refuses."""
        try:
            there = self._transport.open_channel("direct-tcpip", (self._loopback, self.port_there), peer, timeout=_OPEN_SECONDS)
        except (HostError, paramiko.SSHException, OSError, EOFError):
            return
        waits = threading.Event()

        def ended() -> None:
            if waits.is_set():
                self._unanswered(there)

        with contextlib.closing(there):
            threading.Thread(target=_pump, args=(here, there, waits.set), daemon=True).start()
            _pump(there, here, waits.clear, ended)


def _pump(source: Any, sink: Any, moves: Callable[[], None], ended: Callable[[], None] = lambda: None) -> None:
    """Copy all bytes of one connection to the other, then its end; call `moves` before each piece, `ended` before the end."""
    with contextlib.suppress(OSError, EOFError):
        try:
            while piece := source.recv(_CHUNK):
                moves()
                sink.sendall(piece)
        finally:
            ended()
        sink.shutdown(1)
