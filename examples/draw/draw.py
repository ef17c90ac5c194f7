"""Serve a page to draw digits, which sends them to all versions of a model that `fab serve` makes reachable."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

LOOPBACK = "127.0.0.1"
API = "/v1/models/"
PIXELS = 784
MAX_REQUEST_BYTES = 32 << 10
"""The largest request; that of a drawing has about 5 kB."""
_SECONDS = 60.0
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", re.ASCII)
_LAST_PORT = 65535
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = {"/": "page.html"} | {f"/{name}": name for name in ("page.css", "page.js", "digit.js", "model.js")}
_IMAGES = "/images.json"
_JSON = "application/json"
# The page may load only its own files, and no other page may embed it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def refusal(method: str, path: str, headers: Mapping[str, str], port: int) -> tuple[int, str] | None:
    """Check a request before its content is read.

    Any web site in a browser can reach a forwarded port: by a request from its page, or by its own name if that resolves to
    127.0.0.1 (DNS rebinding). So only requests of this page to its own names are forwarded.

    Args:
        headers: by name in lower case.
        port: the page's port.

    Returns: an HTTP status and a line with the reason if the request is refused, else None.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if host not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
        return 403, f"this page is for {LOOPBACK}:{port} and localhost:{port} alone"
    if origin is not None and origin != f"http://{host}":
        return 403, "another site may not ask here"
    if method == "GET" and (path in _FILES or path == _IMAGES or path.startswith(API)):
        return None
    if method != "POST" or not path.startswith(API) or not path.endswith(":predict"):
        return 404, f"valid are GET {API}… and POST {API}…:predict"
    if headers.get("content-type") != _JSON:  # browsers send other types across origins without a preflight request
        return 415, f"the content type must be {_JSON}"
    size = headers.get("content-length", "")
    if not (size.isascii() and size.isdecimal()) or "transfer-encoding" in headers:
        return 411, "Content-Length is missing"
    if len(size) > len(str(MAX_REQUEST_BYTES)) or int(size) > MAX_REQUEST_BYTES:
        return 413, f"a request has at most {MAX_REQUEST_BYTES} bytes"
    return None


def read_images(file: Path | None) -> list[list[float]]:
    """Read images to offer beside the drawing.

    Args:
        file: a request as `python -m trainer.request` writes it, a JSON object with `image` on each line; None for no images.

    Returns: for each image its 784 numbers from 0 to 1.

    Raises:
        OSError, ValueError: the file cannot be read, or is no such request.
    """
    if file is None:
        return []
    images = [json.loads(line).get("image") for line in file.read_text().splitlines()]
    if not all(isinstance(image, list) and len(image) == PIXELS for image in images):
        raise ValueError(f"a line has no `image` of {PIXELS} numbers")
    return images


class Server(ThreadingHTTPServer):
    """Listen for browsers on this machine; forward REST requests to `api`, an address such as 127.0.0.1:8501."""

    daemon_threads = True

    def __init__(self, port: int, api: str, images: Sequence[Sequence[float]]) -> None:
        super().__init__((LOOPBACK, port), Page)
        self.api, self.images = api, images

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing if a browser has disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Answer a request that `refusal` has accepted.

        Returns: status, content type, and content.
        """
        if name := _FILES.get(path):
            return 200, f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8", (Path(__file__).parent / name).read_bytes()
        if path == _IMAGES:
            return 200, _JSON, json.dumps(self.images).encode()
        connection = http.client.HTTPConnection(self.api, timeout=_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": _JSON})
            response = connection.getresponse()
            return response.status, _JSON, response.read()
        except (OSError, http.client.HTTPException):
            return _error(502, "fab serve does not answer: it has ended, or the connection broke off. Start it again.")
        finally:
            connection.close()


def _error(status: int, line: str) -> tuple[int, str, bytes]:
    return status, _JSON, json.dumps({"error": line}).encode()


class Page(BaseHTTPRequestHandler):
    """Serve one connection of a browser."""

    protocol_version = "HTTP/1.1"
    timeout = _SECONDS
    disable_nagle_algorithm = True  # otherwise the content may be delayed by 40 ms
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = urlsplit(self.path).path
        if refused := refusal(self.command, path, headers, self.server.server_port):
            self.close_connection = True  # the content is not read
            status, kind, content = _error(*refused)
        else:
            body = self.rfile.read(int(headers["content-length"])) if self.command == "POST" else None
            status, kind, content = self.server.answer(self.command, path, body)
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  http.server's name
        """Log nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the page until Ctrl-C.

    Returns: exit code 0, or 2 for an invalid argument.
    """
    parser = argparse.ArgumentParser(prog="python examples/draw/draw.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="name of the model, as fab models lists it")
    parser.add_argument("--api", default=f"{LOOPBACK}:8501", metavar="HOST:PORT", help="where fab serve listens")
    parser.add_argument("--port", type=int, default=8700, help="port of this machine for the page (default: 8700)")
    parser.add_argument("--images", type=Path, metavar="FILE", help="images to choose from, made by python -m trainer.request")
    flags = parser.parse_args(arguments)
    if not (address := _ADDRESS.fullmatch(flags.api)) or int(address[1]) > _LAST_PORT:
        parser.error(f"--api {flags.api!r} is not HOST:PORT, such as {LOOPBACK}:8501")
    try:
        images = read_images(flags.images)
    except (OSError, ValueError, AttributeError) as error:
        parser.error(f"--images {flags.images} is no request: {getattr(error, 'strerror', None) or error}")
    try:
        server = Server(flags.port, flags.api, images)
    except (OSError, OverflowError) as error:
        parser.error(f"--port {flags.port} cannot be used: {getattr(error, 'strerror', None) or error}")
    with server:
        print(f"http://{LOOPBACK}:{server.server_port}/?model={quote(flags.model, safe='')}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
