"""Requests to a cluster's model servers over SSH: one server gets them as long as it answers, then the next."""

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
from ops.cluster.forward import LOOPBACK, open_channel
from ops.errors import HostError, OpsError
from ops.models import server

NO_SERVER = 0
"""The status of a request that no server answered."""
HEALTH = "/health"
# After these statuses the next server is tried: this one may not run, lack the version, or have no memory for the request.
# If all answer so, the status that is last here is the most specific.
_RETRY_STATUSES = (NO_SERVER, 404, 500, 503)
_ANSWER_SECONDS = 60.0
_OPEN_SECONDS = 60.0
# From the start of a server's process until it listens.
_LISTEN_SECONDS = 60.0
_FINISH_SECONDS = 10.0
_POLL_SECONDS = 0.2

Answer = tuple[int, Any]
"""The status and the JSON of an answer."""


class ServingClient:
    """A client of the model servers, for many threads; it may send one request to several servers."""

    def __init__(self, cluster: ClusterClient) -> None:
        """Find the servers' hosts; each request connects to them."""
        self.names = server.serving_host_names(cluster.inventory)
        self._cluster = cluster
        self._preferred = self.names[0]
        self._names_of_channels = weakref.WeakKeyDictionary[Any, str]()
        self._start_outcome: Future[Outcome[bool]] | None = None
        self._listen_deadline: float

    def request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer of the first server that can serve it; if none answers, wait for those that `start` installs."""
        answer = self._request_any(method, path, body)
        if answer[0] == NO_SERVER and self._start_outcome:
            outcome = self._start_outcome.result()
            if outcome.failures and not any(outcome.results.values()):
                raise next(iter(outcome.failures.values()))
            while answer[0] == NO_SERVER and time.monotonic() < self._listen_deadline:
                time.sleep(_POLL_SECONDS)
                answer = self._request_any(method, path, body)
        return answer

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer of the server on one host; HostError if that cannot be reached, OpsError if its server hangs."""
        no_answer = NO_SERVER, {"error": f"no model server answers on {name}"}
        try:
            channel = open_channel(self._cluster.fleet, name, SERVING_PORT, _OPEN_SECONDS)
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

    def connect(self, port: int) -> Any:
        """Open a connection for a `Forward` to the server that answered last, or to the next if it refuses."""
        last_error: Exception | None = None
        for name in self._names_to_try():
            try:
                channel = open_channel(self._cluster.fleet, name, port)
            except (HostError, paramiko.SSHException, OSError, EOFError) as error:
                last_error = error
            else:
                self._preferred = self._names_of_channels[channel] = name
                return channel
        raise paramiko.SSHException(f"{self._no_server()}: {last_error}")

    def fail_over(self, channel: Any) -> None:
        """Try the server of this channel last: it ended the connection without an answer, as a killed process does."""
        if (name := self._names_of_channels.get(channel)) == self._preferred and name is not None:
            self._preferred = [*self.names, *self.names][self.names.index(name) + 1]

    def start(self) -> None:
        """Install the server in the background on hosts where nothing listens."""
        self._start_outcome = Future()
        threading.Thread(target=self._start, args=(self._start_outcome,), daemon=True).start()

    def finish_start(self) -> None:
        """Wait up to 10 s for `start`, once a server answers; print failures, and end the master's if it installed others."""
        if self._start_outcome is None:
            return
        with contextlib.suppress(TimeoutError):
            outcome = self._start_outcome.result(_FINISH_SECONDS)
            for error in outcome.failures.values():
                terminal.note(str(error))
            if any(outcome.results.values()):
                server.stop_unused_master_server(self._cluster)

    def _request_any(self, method: str, path: str, body: bytes | None) -> Answer:
        answers: list[Answer] = []
        first_error: OpsError | None = None
        for name in self._names_to_try():
            try:
                answer = self.request_from(name, method, path, body)
            except OpsError as error:
                first_error = first_error or error
                continue
            if answer[0] not in _RETRY_STATUSES:
                self._preferred = name
                return answer
            answers.append(answer)
        if not answers and first_error:
            raise first_error
        best = max(answers, key=lambda answer: _RETRY_STATUSES.index(answer[0]))
        return best if best[0] != NO_SERVER else (NO_SERVER, {"error": self._no_server()})

    def _no_server(self) -> str:
        return f"no model server answers on {', '.join(self.names)}"

    def _names_to_try(self) -> list[str]:
        place = self.names.index(self._preferred)
        return [*self.names[place:], *self.names[:place]]

    def _start(self, started: Future[Outcome[bool]]) -> None:
        outcome = self._cluster.fleet.each(self.names, self._start_on, server.START_SECONDS)
        self._listen_deadline = time.monotonic() + _LISTEN_SECONDS
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
        self._channel.settimeout(_ANSWER_SECONDS)
        self.sock = self._channel

    def close(self) -> None:
        """Keep the channel open: http.client calls this before the caller reads an answer that ends with the connection."""
        self.sock = None
