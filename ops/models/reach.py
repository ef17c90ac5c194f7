"""The model servers of a cluster, asked from here through tunnels: one for as long as it answers, and then the next."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

import paramiko

from infra.spec import SERVING_PORT
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.fanout import Outcome
from ops.cluster.forward import Forward, at_once
from ops.cluster.remote import Fleet
from ops.errors import HostError, OpsError
from ops.models import server
from ops.models.server import LOOPBACK

NOBODY = 0
"""The status of an answer that did not come, as nobody listens."""
HEALTH = "/health"
# Another server may have what this one lacks: a process, a version that it loaded, room for one more request.
_ANOTHER = frozenset({NOBODY, 500, 503})
_SECONDS = 60.0
# From the start of a server's process until it listens.
_LISTEN_SECONDS = 20.0
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.2

Answer = tuple[int, Any]
"""The status and the JSON of an answer."""


class Servers:
    """For many threads. A request may come to more than one server, as predictions change nothing."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        """Nothing is connected yet; `stack` closes the tunnels."""
        self.names = server.names_of(cluster.inventory)
        self._cluster, self._stack = cluster, stack
        self._ways = {name: _Way(cluster.fleet, name) for name in self.names}
        self._first = self.names[0]
        self._ports: dict[str, int] = {}
        self._lock = threading.Lock()
        self._brought: Future[Outcome[bool]] | None = None
        self._listens_by = 0.0

    def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """The answer of the first server that has one; NOBODY where none does, not even once it was brought. As `ask_one`."""
        found = self._ask_any(method, path, body)
        if found[0] == NOBODY and self._brought:
            brought = self._brought.result()
            if brought.failures and not any(brought.results.values()):
                raise next(iter(brought.failures.values()))
            while found[0] == NOBODY and time.monotonic() < self._listens_by:
                time.sleep(_POLL_SECONDS)
                found = self._ask_any(method, path, body)
        return found

    def ask_one(self, name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        """A server's answer; HostError where its host cannot be reached, OpsError where what listens there does not answer."""
        self._cluster.fleet.connection(name)
        connection = http.client.HTTPConnection(LOOPBACK, self._port(name), timeout=_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (ConnectionError, http.client.HTTPException):
            return NOBODY, {"error": f"no model server answers on {name}"}
        except (OSError, ValueError) as error:
            raise OpsError(f"the model server on {name} does not answer: {error}") from error
        finally:
            connection.close()

    def open_channel(self, kind: str, there: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
        """A connection to a server, for a `Forward`: to the one that answered last, and where that refuses to the next."""
        failed: Exception | None = None
        for name in self._order():
            try:
                channel = self._ways[name].open_channel(kind, there, peer, timeout)
            except (paramiko.SSHException, OSError, EOFError) as error:
                failed = error
            else:
                self._first = name
                return channel
        raise paramiko.SSHException(f"{self._nobody()}: {failed}")

    def bring(self) -> None:
        """Meanwhile those of the hosts where nothing listens get their server."""
        self._brought = Future()
        threading.Thread(target=self._bring, args=(self._brought,), daemon=True).start()

    def settle(self) -> None:
        """A server answers: wait a little for what `bring` began, say what it could not reach, and end the master's."""
        if self._brought is None:
            return
        with contextlib.suppress(TimeoutError):
            brought = self._brought.result(_SETTLE_SECONDS)
            for error in brought.failures.values():
                terminal.note(str(error))
            if any(brought.results.values()):
                server.hand_over(self._cluster)

    def _ask_any(self, method: str, path: str, body: bytes | None) -> Answer:
        answers: list[Answer] = []
        failed: OpsError | None = None
        for name in self._order():
            try:
                found = self.ask_one(name, method, path, body)
            except OpsError as error:
                failed = failed or error
                continue
            if found[0] not in _ANOTHER:
                self._first = name
                return found
            answers.append(found)
        if not answers and failed:
            raise failed
        return next((found for found in answers if found[0] != NOBODY), (NOBODY, {"error": self._nobody()}))

    def _nobody(self) -> str:
        return f"no model server answers on {', '.join(self.names)}"

    def _order(self) -> list[str]:
        place = self.names.index(self._first)
        return [*self.names[place:], *self.names[:place]]

    def _port(self, name: str) -> int:
        """The port of this machine that leads to a server, whatever becomes of the connection to its host meanwhile."""
        with self._lock:
            if name not in self._ports:
                forward = self._stack.enter_context(Forward(self._ways[name], LOOPBACK, range(1)))
                forward.port_there = SERVING_PORT
                self._ports[name] = forward.port
            return self._ports[name]

    def _bring(self, brought: Future[Outcome[bool]]) -> None:
        outcome = self._cluster.fleet.each(self.names, self._bring_to, server.START_SECONDS)
        self._listens_by = time.monotonic() + _LISTEN_SECONDS
        brought.set_result(outcome)

    def _bring_to(self, name: str) -> bool:
        """True where it was missing."""
        if self.ask_one(name, "GET", HEALTH)[0] != NOBODY:
            return False
        for error in server.start(self._cluster, [name]).failures.values():
            raise error
        return True


class _Way:
    """To the server of one host, by a new connection to that host where the one before broke off."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def open_channel(self, kind: str, there: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
        try:
            transport = self._fleet.connection(self._name).transport
        except HostError as error:
            raise paramiko.SSHException(str(error)) from error
        at_once(transport)
        return transport.open_channel(kind, there, peer, timeout=timeout)


@contextlib.contextmanager
def reached(cluster: Cluster) -> Iterator[Servers]:
    """The servers through tunnels that are there as long as the context."""
    with contextlib.ExitStack() as stack:
        yield Servers(cluster, stack)


def hold(servers: Servers, what: str) -> NoReturn:
    """For as long as a server's host can be reached, with one in front that answers; then OpsError, with the command to run."""
    servers.settle()
    while True:
        try:
            servers.ask("GET", HEALTH)
        except HostError as error:
            raise OpsError(f"the connection to the host broke off: run {what} again") from error
        except OpsError:
            pass  # it is busy, and may be quicker next time
        time.sleep(1.0)
