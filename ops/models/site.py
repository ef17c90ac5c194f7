"""The page of `fab try` and what it asks for, on this machine's loopback: for this machine's browser, and no other site."""

from __future__ import annotations

import json
import socketserver
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from ops.errors import OpsError
from ops.models import drawing
from ops.models.drawing import Question
from ops.models.reach import NOBODY
from serving.records import NAME, LoadState

Ask = Callable[[str, str, bytes | None], tuple[int, Any]]
"""Method, path and body to the model server; the status and the JSON of its answer."""
MOST_BYTES = 32 << 10
"""The largest request: a drawing has some 5 kB."""
HTML, CSS, JS = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
_JSON = "application/json"
_STATES, _PREDICT = "/states", "/predict/"
_SILENCE_SECONDS = 60.0
# Nothing runs or is fetched but what this very server gives, and no page of others may show this one.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Reply:
    """What a request gets: its HTTP status, and content of a kind."""

    status: int
    kind: str
    content: bytes

    @classmethod
    def of(cls, value: Any, status: int = 200) -> Reply:
        """A value as JSON."""
        return cls(status, _JSON, json.dumps(value, allow_nan=False).encode())

    @classmethod
    def error(cls, status: int, line: str) -> Reply:
        """One line that says what is wrong."""
        return cls.of({"error": line}, status)


class Site:
    """What is answered to whom; for many threads at once."""

    def __init__(self, model: str, ask: Ask, files: Mapping[str, tuple[str, bytes]], port: int) -> None:
        """`files` by path: kind and content. `port` is that of this machine at which browsers ask."""
        self._where, self._ask, self._files = f"/v1/models/{model}", ask, files
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._questions: dict[str, Question | None] = {}  # a version's name is used once, so this holds for ever

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Reply | None:
        """The answer to a request whose content need not be read; None for one that is fine so far.

        A name that leads here and is not ours is another site's, which makes its visitors' browsers ask (DNS rebinding).
        `headers` by name in lower case.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return Reply.error(403, f"this is for {' and '.join(sorted(self._hosts))} alone")
        if origin is not None and origin != f"http://{host}":
            return Reply.error(403, "this is for its own page alone")
        if method == "GET" and (path in self._files or path == _STATES):
            return None
        if method != "POST" or not NAME.fullmatch(path.removeprefix(_PREDICT)) or not path.startswith(_PREDICT):
            return Reply.error(404, f"there are GET {_STATES} and POST {_PREDICT}VERSION")
        if headers.get("content-type") != _JSON:  # what another site may send without asking first is no JSON
            return Reply.error(415, f"a drawing comes as {_JSON}")
        size = headers.get("content-length", "")
        if not (size.isascii() and size.isdecimal()) or "transfer-encoding" in headers:
            return Reply.error(411, "Content-Length is missing")
        if len(size) > len(str(MOST_BYTES)) or int(size) > MOST_BYTES:
            return Reply.error(413, f"a drawing has at most {MOST_BYTES} bytes")
        return None

    def answer(self, method: str, path: str, content: bytes) -> Reply:
        """The answer to a request that was not refused. Never raises for what the model server says or does."""
        if method == "GET" and path in self._files:
            kind, found = self._files[path]
            return Reply(200, kind, found)
        try:
            return self._states() if method == "GET" else self._predict(path.removeprefix(_PREDICT), content)
        except OpsError as error:
            return Reply.error(504, str(error))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return Reply.error(502, f"the model server's answer is not understood ({type(error).__name__}: {error})")

    def _states(self) -> Reply:
        """The versions that answer, whether they take a drawing, and which is the default, empty while there is none."""
        status, said = self._ask("GET", self._where, None)
        if status != 200:
            return _passed_on(status, said)
        names = [each["version"] for each in said["model_version_status"] if each["state"] == LoadState.AVAILABLE]
        status, default = self._ask("GET", f"{self._where}/metadata", None)
        return Reply.of(
            {
                "default": default["model_spec"]["version"] if status == 200 else "",
                "versions": [{"name": name, "draws": self.question(name) is not None} for name in names],
            }
        )

    def question(self, version: str) -> Question | None:
        """How a version is asked; None for one that takes no drawing, or does not answer now."""
        if version not in self._questions:
            status, said = self.metadata(version)
            if status != 200:
                return None
            self._questions[version] = drawing.question_of(said)
        return self._questions[version]

    def metadata(self, version: str) -> tuple[int, Any]:
        """What the model server says of a version's signatures."""
        return self._ask("GET", f"{self._where}/versions/{version}/metadata", None)

    def _predict(self, version: str, content: bytes) -> Reply:
        try:
            image = drawing.drawn(content)
        except (ValueError, RecursionError) as error:
            return Reply.error(400, str(error))
        question = self.question(version)
        if question is None:
            return Reply.error(404, f"version {version} is not there, or takes no drawing")
        body = drawing.asked(question, image)
        began = time.perf_counter()
        status, said = self._ask("POST", f"{self._where}/versions/{version}:predict", body)
        seconds = time.perf_counter() - began
        if status != 200:
            return _passed_on(status, said)
        values = drawing.probabilities(question, said)
        return Reply.of({"probabilities": values, "milliseconds": round(seconds * 1000, 3)})


def _passed_on(status: int, said: Any) -> Reply:
    """An error of the model server's own."""
    return Reply.error(503 if status == NOBODY else status, str(said["error"]))


class SiteServer(socketserver.ThreadingTCPServer):
    """Listens for browsers; what they ask, `site` answers."""

    daemon_threads = True
    allow_reuse_address = True
    site: Site

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), Handler)
        self.port: int = self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser may go at any time, which is nothing to tell of."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection of a browser."""

    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_SECONDS
    disable_nagle_algorithm = True  # else what comes behind the headers may wait 40 ms
    server: SiteServer

    def do_GET(self) -> None:
        """Answers a GET."""
        self._answer(b"")

    def do_POST(self) -> None:
        """Answers a POST."""
        self._answer(None)

    def _answer(self, content: bytes | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.site.refusal(self.command, self.path, headers)
        if answer is None:
            if content is None:
                content = self.rfile.read(int(headers["content-length"]))
            answer = self.server.site.answer(self.command, self.path, content)
        else:
            self.close_connection = True  # its content was not read
        self.send_response(answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.content)

    def version_string(self) -> str:
        """Which server this is."""
        return "scaletier"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  http.server's name
        """Nothing: stdout and stderr are for people."""
