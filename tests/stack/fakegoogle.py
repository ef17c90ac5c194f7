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
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    port: int = 0

    def answer(self, path: str) -> tuple[int, Mapping[str, Any]]:
        found = self.answers.get(path, (404, {"error": {"code": 404, "message": f"{path} was not found"}}))
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found

    def config(self, key: str) -> str | None:
        """Return a value of `gcp:` configuration, for this server."""
        base = f"http://127.0.0.1:{self.port}"
        return {
            "gcp:accessToken": "token-of-a-test",
            "gcp:computeCustomEndpoint": f"{base}/compute/v1/",
            "gcp:storageCustomEndpoint": f"{base}/storage/v1",
        }.get(key)

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve on a port of its own."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append(self.path)
                fake.tokens.add(self.headers["Authorization"])
                status, body = fake.answer(self.path)
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # looks so often whether it shall end
        try:
            yield self
        finally:
            server.shutdown()
