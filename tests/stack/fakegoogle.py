"""A fake of Google's APIs on loopback, for the few calls that the project makes itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class FakeGoogle:
    """A fake API; `answers` maps a path to (status, JSON), or to a list of them, one for each request."""

    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    port: int = 0

    def answer(self, path: str) -> tuple[int, Mapping[str, Any]]:
        response = self.answers.get(path, (404, {"error": {"code": 404, "message": f"{path} was not found"}}))
        if isinstance(response, list):
            return response.pop(0) if len(response) > 1 else response[0]
        return response

    def config(self, key: str) -> str | None:
        """Return a value of the `gcp:` configuration for this server."""
        base = f"http://127.0.0.1:{self.port}"
        return {
            "gcp:accessToken": "token-of-a-test",
            "gcp:computeCustomEndpoint": f"{base}/compute/v1/",
            "gcp:storageCustomEndpoint": f"{base}/storage/v1",
        }.get(key)

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve on a free port."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.requests.append(self.path)
                fake.tokens.add(self.headers["Authorization"])
                status, body = fake.answer(self.path)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds between checks for shutdown
        try:
            yield self
        finally:
            server.shutdown()
