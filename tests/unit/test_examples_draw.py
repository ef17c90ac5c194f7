"""The drawing page's server, without a browser: its own answers, and requests passed to the REST API."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draw
import pytest

PORT = 8700
HOST_HEADER = {"host": f"127.0.0.1:{PORT}"}
PREDICT = "/v1/models/m/versions/v1:predict"
POST = HOST_HEADER | {"content-type": "application/json", "content-length": "5000"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", HOST_HEADER, None),
        ("GET", "/model.js", HOST_HEADER, None),
        ("GET", "/images.json", HOST_HEADER, None),
        ("GET", "/v1/models/m/metadata", {"host": f"localhost:{PORT}"}, None),
        ("POST", PREDICT, POST, None),
        ("POST", PREDICT, POST | {"origin": f"http://127.0.0.1:{PORT}"}, None),
        ("GET", "/", {}, 403),
        ("GET", "/", {"host": f"evil.example:{PORT}"}, 403),
        ("GET", "/", {"host": "127.0.0.1"}, 403),
        ("GET", "/", {"host": f"127.0.0.1:{PORT + 1}"}, 403),
        ("GET", "/", {"host": f"127.0.0.1:{PORT}.evil.example"}, 403),
        ("POST", PREDICT, POST | {"origin": "http://evil.example"}, 403),
        ("POST", PREDICT, POST | {"origin": f"http://localhost:{PORT}"}, 403),
        ("POST", PREDICT, POST | {"origin": "null"}, 403),
        ("GET", "/metrics", HOST_HEADER, 404),
        ("GET", "/../fabfile.py", HOST_HEADER, 404),
        ("GET", "/draw.py", HOST_HEADER, 404),
        ("POST", "/", POST, 404),
        ("POST", "/v1/models/m", POST, 404),
        ("POST", "/elsewhere:predict", POST, 404),
        ("POST", PREDICT, POST | {"content-type": "text/plain"}, 415),
        ("POST", PREDICT, HOST_HEADER | {"content-type": "application/json"}, 411),
        ("POST", PREDICT, POST | {"content-length": "-1"}, 411),
        ("POST", PREDICT, POST | {"transfer-encoding": "chunked"}, 411),
        ("POST", PREDICT, POST | {"content-length": "32769"}, 413),
        ("POST", PREDICT, POST | {"content-length": "9" * 5000}, 413),
    ],
)
def test_requests_of_other_origins_paths_and_types_are_refused(
    method: str, path: str, headers: dict[str, str], status: int | None
) -> None:
    refused = draw.refusal(method, path, headers, PORT)
    assert (refused and refused[0]) == status


class PageOnSocketPair(draw.Page):
    disable_nagle_algorithm = False  # socket pairs lack it


def exchange(request: bytes, answer: Any = None) -> bytes:
    """Return the answer to a browser that sends this and closes its side."""
    browser, server = socket.socketpair()
    with browser, server:
        browser.sendall(request)
        browser.shutdown(socket.SHUT_WR)
        PageOnSocketPair(server, ("127.0.0.1", 1), SimpleNamespace(server_port=PORT, answer=answer))  # type: ignore[arg-type]
        server.close()
        return b"".join(iter(lambda: browser.recv(65536), b""))


def test_answers_have_security_headers_and_connections_are_kept() -> None:
    requests = []

    def answer(*fields: Any) -> tuple[int, str, bytes]:
        requests.append(fields)
        return 200, "text/html", b"<page>"

    host = f"Host: 127.0.0.1:{PORT}\r\n".encode()
    head, _, page = exchange(b"GET /?model=m HTTP/1.1\r\n" + host + b"\r\n", answer).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert (lines[0], page, requests) == ("HTTP/1.1 200 OK", b"<page>", [("GET", "/", None)])
    policy = next(line for line in lines if line.startswith("Content-Security-Policy"))
    assert "default-src 'none'; script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert {"X-Content-Type-Options: nosniff", "Content-Length: 6", "Cache-Control: no-store"} <= {*lines}
    assert not any(line.lower().startswith("access-control") for line in lines)
    post = f"POST {PREDICT} HTTP/1.1\r\n".encode() + host + b"Content-Type: application/json\r\nContent-Length: "
    both = exchange((post + b"2\r\n\r\n{}") * 2, answer)
    assert both.count(b"HTTP/1.1 200 OK") == 2, "the connection is kept"
    assert requests[1:] == [("POST", PREDICT, b"{}")] * 2
    large = exchange(post + b"40000\r\n\r\nGET / HTTP/1.1\r\n" + host + b"\r\n", answer)
    assert (large.count(b"HTTP/1.1"), b" 413 " in large) == (1, True), "an unread body is not parsed as a request"
    assert exchange(b"OPTIONS / HTTP/1.1\r\n" + host + b"\r\n", answer).startswith(b"HTTP/1.1 501 ")


def test_the_page_needs_only_its_own_files() -> None:
    server = SimpleNamespace(images=[[0.5]])
    pages = {path: draw.Server.answer(server, "GET", path, None) for path in draw._FILES}  # type: ignore[arg-type]
    page = pages["/"][2].decode()
    assert {*re.findall(r'(?:src|href)="([^"]*)"', page)} == {"data:,", "/page.css", "/page.js"}
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", page)
    assert not any(
        b"//" in content.replace(b"// ", b"") or b"url(" in content for path, (*_, content) in pages.items() if path != "/"
    )
    assert draw.Server.answer(server, "GET", "/images.json", None)[2] == b"[[0.5]]"  # type: ignore[arg-type]


def test_invalid_arguments_are_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad := tmp_path / "request.json").write_text('{"image": [0, 1]}\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for arguments, message in [
            ([], "the following arguments are required: model"),
            (["m", "--port", port], f"--port {port} cannot be used: Address already in use"),
            (["m", "--port", "65536"], "--port 65536 cannot be used: "),
            *(
                (["m", "--port", port, "--api", api], f"--api {api!r} is not HOST:PORT, such as 127.0.0.1:8501")
                for api in (
                    "http://127.0.0.1",
                    "http://127.0.0.1:8501",
                    "localhost:http",
                    "localhost",
                    ":8501",
                    "a b:1",
                    "h:99999",
                    "",
                )
            ),
            (["m", "--images", str(bad)], f"--images {bad} is no request: a line has no `image` of 784 numbers"),
            (["m", "--images", "/nowhere"], "--images /nowhere is no request: No such file or directory"),
        ]:
            with pytest.raises(SystemExit) as ended:
                draw.main(arguments)
            assert (ended.value.code, message in capsys.readouterr().err) == (2, True), message
