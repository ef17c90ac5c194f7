"""A token broker on Google's hosts: an emulated metadata server with tokens limited to one job.

`python -m hosts.agent.token_broker OUTPUT -- COMMAND` runs COMMAND for fab with a broker whose tokens may write OUTPUT and
read the stack's data. The word @port@ in COMMAND is replaced by the broker's port.

The host's own token may do all that the host may: write every job's records, and start other hosts. A trainer must not have it.
This broker gives it a token that is downscoped to its job: TensorFlow, google-auth and gcsfs all ask the server in
GCE_METADATA_HOST. The broker cannot know which buckets outside the stack a program needs. It allows those that the
program's arguments and environment name, if the host may use them. Source: Compute Engine documentation, "About VM metadata",
for the paths.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from jobs import paths
from jobs.token_access import Access, Boundary, boundary

Mint = Callable[[Any], tuple[str, float]]
"""Returns a token within a boundary, and the seconds for which it is valid; OSError if none is available."""

PORT = "@port@"
"""An argument of the command that is replaced by the port."""
_MOST_AT_ONCE, _SILENCE_SECONDS = 32, 10.0
_LOOPBACK = "127.0.0.1"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_EARLY = 300.0  # a token is renewed this many seconds before it expires, as by Google's clients
_ROOT = "/computeMetadata/v1/"
_ACCOUNT = f"{_ROOT}instance/service-accounts/default"
_FLAVOR = {"Metadata-Flavor": "Google"}


class _Server(ThreadingHTTPServer):
    """Limits its connections and closes silent ones: a trainer may try to exhaust the agent's memory."""

    daemon_threads = True
    broker: Broker

    def __init__(self, broker: Broker) -> None:
        super().__init__((_LOOPBACK, 0), _Handler)
        self.broker = broker
        self._slots = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started: the system has no more
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client has gone."""


class Broker:
    """Answers on a loopback port of its own until `close`; only the trainer gets the port."""

    def __init__(
        self, rights: Access, mint: Mint, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the broker; `report` is called when a failure to get a token begins, or its reason changes."""
        self._rules, self._mint, self._report, self._clock = boundary(rights), mint, report, clock
        self._last_error = ""
        self._lock = threading.Lock()
        self._token, self._good_until = "", 0.0
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, name="broker", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that direct Google's clients to this broker."""
        address = f"{_LOOPBACK}:{self.port}"
        return {"GCE_METADATA_HOST": address, "GCE_METADATA_IP": address}

    def close(self) -> None:
        """Stop answering; an issued token stays valid until it expires."""
        self._server.shutdown()
        self._server.server_close()

    def token(self) -> dict[str, Any]:
        """Return a token in the metadata server's form; OSError if there is none."""
        with self._lock:
            if self._clock() > self._good_until - _EARLY:
                self._token, seconds = self._mint_token()
                self._good_until = self._clock() + seconds
            remaining = int(self._good_until - self._clock())
            return {"access_token": self._token, "expires_in": remaining, "token_type": "Bearer"}

    def _mint_token(self) -> tuple[str, float]:
        try:
            minted = self._mint(self._rules)
        except OSError as error:
            if self._last_error != (message := str(error)):
                self._report(f"no token for the bucket: {message}")
            self._last_error = message
            raise
        self._last_error = ""
        return minted


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path != "/" and self.headers["Metadata-Flavor"] != "Google":
            return self._respond(403, "")
        if path == "/":
            return self._respond(200, "")
        if path == f"{_ACCOUNT}/":
            return self._respond(200, json.dumps({"aliases": ["default"], "email": "default", "scopes": [_SCOPE]}))
        if path != f"{_ACCOUNT}/token":
            return self._respond(404, "")
        try:
            return self._respond(200, json.dumps(self.server.broker.token()))
        except OSError as error:
            return self._respond(503, str(error))

    def _respond(self, status: int, content: str) -> None:
        body = content.encode()
        self.send_response(status)
        kind = "application/json" if content.startswith("{") else "application/text"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_FLAVOR}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing for a request."""


def mint(rules: Boundary) -> tuple[str, float]:
    """Return a token of this host's account, downscoped by Google's token service."""
    import google.auth  # here, as it takes a third of a second, and LXD hosts need none of it
    import urllib3
    from google.auth import downscoped, exceptions
    from google.auth.transport.urllib3 import Request

    boundary_rules = []
    for rule in rules:
        condition = rule.get("availabilityCondition")
        boundary_rules.append(
            downscoped.AccessBoundaryRule(
                rule["availableResource"],
                rule["availablePermissions"],
                downscoped.AvailabilityCondition(condition["expression"]) if condition else None,
            )
        )
    try:
        source, _ = google.auth.default(scopes=[_SCOPE])
        narrow = downscoped.Credentials(source, downscoped.CredentialAccessBoundary(boundary_rules))
        start = time.time()
        # Verify TLS by the host's CA certificates, as its other clients do, and not by a package's own list.
        with urllib3.PoolManager(ssl_context=ssl.create_default_context()) as pool:
            narrow.refresh(Request(pool))
    except exceptions.GoogleAuthError as error:
        raise OSError(f"Google's token service: {' '.join(str(error).split())}") from None
    ends = narrow.expiry  # in UTC, but without a time zone
    return str(narrow.token), ends.replace(tzinfo=UTC).timestamp() - start if ends else _EARLY


def main(arguments: Sequence[str], mint: Mint = mint) -> int:
    """Run the command; return its exit code."""
    output, _, *command = arguments
    url = urlsplit(output)
    rights = Access(url.netloc, (url.path.strip("/"),), (paths.DATA,))
    broker = Broker(rights, mint, lambda text: print(text, file=sys.stderr))  # noqa: T201
    try:
        return subprocess.run([str(broker.port) if word == PORT else word for word in command], check=False).returncode
    finally:
        broker.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
