"""SSH access to a cluster's model servers: each is used as long as it answers, then the next."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import paramiko

from infra.ports import SERVING_PORT
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.forward import open_channel_on
from ops.errors import HostError, OpsError
from ops.models import server
from ops.models.server import LOOPBACK

NO_SERVER = 0
"""The status of a request that no server answered."""
HEALTH = "/health"
# Another server may have what this one lacks: a process, a version that it knows or has loaded, room for one more request.
# If none has, the last of these statuses is the most specific.
_RETRY_STATUSES = (NO_SERVER, 404, 500, 503)
_SECONDS = 60.0
_OPEN_SECONDS = 60.0
# From the start of a server's process until it listens.
_LISTEN_SECONDS = 60.0
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.2

Answer = tuple[int, Any]
"""The status and the JSON of an answer."""


class ServingClient:
    """Client of the model servers, for many threads; a request may reach several of them."""

    def __init__(self, cluster: ClusterClient) -> None:
        """Connect to nothing yet."""
        self.names = server.serving_host_names(cluster.inventory)
        self._cluster = cluster
        self._first = self.names[0]
        self._names_of_channels = weakref.WeakKeyDictionary[Any, str]()
        self._started: Future[Outcome[bool]] | None = None
        self._listens_by: float

    def request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Return the first server's answer, or NO_SERVER if none answers, even after it was installed."""
        answer = self._request_any(method, path, body)
        if answer[0] == NO_SERVER and self._started:
            start = self._started.result()
            if start.failures and not any(start.results.values()):
                raise next(iter(start.failures.values()))
            while answer[0] == NO_SERVER and time.monotonic() < self._listens_by:
                time.sleep(_POLL_SECONDS)
                answer = self._request_any(method, path, body)
        return answer

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        """Return a server's answer.

        Raises:
            HostError: if its host cannot be reached.
            OpsError: if the process that listens there does not answer.
        """
        no_answer = NO_SERVER, {"error": f"no model server answers on {name}"}
        try:
            channel = open_channel_on(
                self._cluster.fleet, name, "direct-tcpip", (LOOPBACK, SERVING_PORT), (LOOPBACK, 0), _OPEN_SECONDS
            )
        except (paramiko.SSHException, OSError, EOFError):
            return no_answer
        with contextlib.closing(channel):
            connection = _Connection(channel)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (TimeoutError, ValueError) as error:
                raise OpsError(f"the model server on {name} does not answer: {str(error) or 'it sent nothing'}") from error
            except (OSError, EOFError, http.client.HTTPException):  # a channel that ended raises a plain OSError
                return no_answer

    def open_channel(self, kind: str, there: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
        """Open a connection for a `Forward` to the server that answered last, or to the next if it refuses."""
        failed: Exception | None = None
        for name in self._order():
            try:
                channel = open_channel_on(self._cluster.fleet, name, kind, there, peer, timeout)
            except (HostError, paramiko.SSHException, OSError, EOFError) as error:
                failed = error
            else:
                self._first = self._names_of_channels[channel] = name
                return channel
        raise paramiko.SSHException(f"{self._no_server()}: {failed}")

    def leave(self, channel: Any) -> None:
        """Try the server of this channel last: it ended the connection without an answer, as when it dies."""
        if (name := self._names_of_channels.get(channel)) == self._first and name is not None:
            self._first = [*self.names, *self.names][self.names.index(name) + 1]

    def start(self) -> None:
        """Install the server in the background on hosts where nothing listens."""
        self._started = Future()
        threading.Thread(target=self._start, args=(self._started,), daemon=True).start()

    def finish_start(self) -> None:
        """Wait briefly for the start by `start` once a server answers; report failures, and end the master's."""
        if self._started is None:
            return
        with contextlib.suppress(TimeoutError):
            start = self._started.result(_SETTLE_SECONDS)
            for error in start.failures.values():
                terminal.note(str(error))
            if any(start.results.values()):
                server.end_master_server(self._cluster)

    def _request_any(self, method: str, path: str, body: bytes | None) -> Answer:
        answers: list[Answer] = []
        failed: OpsError | None = None
        for name in self._order():
            try:
                answer = self.request_from(name, method, path, body)
            except OpsError as error:
                failed = failed or error
                continue
            if answer[0] not in _RETRY_STATUSES:
                self._first = name
                return answer
            answers.append(answer)
        if not answers and failed:
            raise failed
        best = max(answers, key=lambda answer: _RETRY_STATUSES.index(answer[0]))
        return best if best[0] != NO_SERVER else (NO_SERVER, {"error": self._no_server()})

    def _no_server(self) -> str:
        return f"no model server answers on {', '.join(self.names)}"

    def _order(self) -> list[str]:
        place = self.names.index(self._first)
        return [*self.names[place:], *self.names[:place]]

    def _start(self, started: Future[Outcome[bool]]) -> None:
        outcome = self._cluster.fleet.each(self.names, self._start_on, server.START_SECONDS)
        self._listens_by = time.monotonic() + _LISTEN_SECONDS
        started.set_result(outcome)

    def _start_on(self, name: str) -> bool:
        """Install the server on a host; return True if it was missing."""
        if self.request_from(name, "GET", HEALTH)[0] != NO_SERVER:
            return False
        for error in server.start(self._cluster, [name]).failures.values():
            raise error
        return True


class _Connection(http.client.HTTPConnection):
    """HTTP through a channel of an SSH connection, without a local port, which any web site could use."""

    def __init__(self, channel: Any) -> None:
        """Use an open channel, which the caller closes."""
        super().__init__(LOOPBACK, SERVING_PORT)
        self._channel = channel

    def connect(self) -> None:
        """Use the channel as the socket."""
        self._channel.settimeout(_SECONDS)
        self.sock = self._channel

    def close(self) -> None:
        """Leave the channel open: the rest of an answer after which the server closes is read from it."""
        self.sock = None
