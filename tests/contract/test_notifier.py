"""A job's end, reported: to a URL within seconds and a few attempts, or to a command with the record on stdin."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from waiting import until

from hosts.agent import notifier
from hosts.agent.notifier import NotifyError, command_with_stdin, post
from jobs.notification import Notification, check_url

RECORD = json.dumps({"jobId": "job01", "text": "é 'quoted' $HOME `x`\n" * 9000}).encode()


class Server(HTTPServer):
    """Answer each POST with the next status, and then always with the last."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses, self.bodies, self.paths = statuses, list[bytes](), list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?a=b"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.send_header("Location", "http://169.254.169.254/")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(*statuses: int) -> Iterator[Server]:
    with Server(list(statuses)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def run(_: list[str], __: Mapping[str, str]) -> int:
    raise AssertionError("there is no command")


def notify_and_wait(
    target: str, arguments: list[str] | None = None, run: notifier.RunCommand = run, record: bytes = RECORD
) -> Notification:
    pauses: list[float] = []
    task = notifier.start(target, arguments or [], record, run, pauses.append)
    until(lambda: task.result is not None)
    assert task.result.time
    assert pauses == [1.0, 2.0][: task.result.attempts - 1]
    return task.result


@pytest.mark.parametrize(
    ("statuses", "attempts", "error"),
    [
        ([200], 1, ""),
        ([204], 1, ""),
        ([503, 429, 201], 3, ""),
        ([500], 3, "it answered 500"),
        ([404], 1, "it answered 404"),
        ([302], 1, "it answered 302"),
    ],
)
def test_a_record_is_posted(statuses: list[int], attempts: int, error: str) -> None:
    with serving(*statuses) as server:
        result = notify_and_wait(server.url)
    assert (result.attempts, result.error) == (attempts, error)
    assert result.target == f"POST http://127.0.0.1:{server.server_port}/…"
    assert server.bodies == [RECORD] * attempts
    assert set(server.paths) == {"/hook?a=b"}


def test_a_missing_and_an_unresponsive_server_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(NotifyError, match="timed out") as error:
            post(check_url(f"http://127.0.0.1:{port}/"), b"{}", timeout=0.05)
        assert error.value.is_retriable
    with socket.socket() as closed:  # no other program gets its port
        closed.bind(("127.0.0.1", 0))
        result = notify_and_wait(f"http://127.0.0.1:{closed.getsockname()[1]}/")
    assert (result.attempts, result.error) == (3, "Connection refused")


def test_a_hanging_command_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "NOTIFY_TIMEOUT", 0.0)
    finished = threading.Event()
    task = notifier.start("./done.sh", ["./done.sh"], b"{}", lambda *_: int(finished.wait()))
    until(lambda: task.result is not None)
    assert task.result.error == "it took longer than 0 s"
    finished.set()


def test_a_host_name_is_refused_by_its_address_at_request_time(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("10.0.0.1", "169.254.169.254")]
    monkeypatch.setattr(notifier.socket, "getaddrinfo", lambda *_, **__: addresses)
    monkeypatch.setattr(notifier.socket, "create_connection", lambda *_: pytest.fail("a connection was opened"))
    result = notify_and_wait("http://rebound.example.com/")
    assert (result.attempts, "169.254.169.254 is a link-local" in result.error) == (1, True)


@pytest.mark.parametrize("status", [200, 404])
def test_a_connection_is_closed_after_the_answer(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(notifier, "_connect", lambda *_: ours)
    with theirs:
        theirs.sendall(f"HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n".encode())
        with suppress(NotifyError):
            post(check_url("https://example.com"), b"{}")
        assert ours.fileno() < 0
        request = theirs.recv(65536).decode()
    head = "POST / HTTP/1.1\r\nHost: example.com:443\r\nAccept-Encoding: identity\r\nContent-Length: 2\r\n"
    assert request == f"{head}Content-Type: application/json\r\nUser-Agent: scaletier\r\n\r\n{{}}"


def test_https_is_used_with_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    names: list[str] = []

    def wrap_socket(plain: socket.socket, server_hostname: str) -> str:
        names.append(server_hostname)
        if len(names) > 1:
            raise ssl.SSLError(1, "certificate verify failed")
        return "encrypted"

    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 443))]
    connections = iter([ours for ours, _ in pairs])
    monkeypatch.setattr(notifier.socket, "getaddrinfo", lambda *_, **__: addresses)
    monkeypatch.setattr(notifier.socket, "create_connection", lambda *_: next(connections))
    monkeypatch.setattr(notifier.ssl, "create_default_context", lambda: SimpleNamespace(wrap_socket=wrap_socket))
    parts = check_url("https://hooks.example.com/x")
    assert notifier._connect(parts, 443, 5.0) == "encrypted"  # type: ignore[comparison-overlap]
    with pytest.raises(ssl.SSLError):
        notifier._connect(parts, 443, 5.0)
    assert names == ["hooks.example.com"] * 2
    assert [ours.fileno() < 0 for ours, _ in pairs] == [False, True]
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_name_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier.socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(OSError, match="it has no address"):
        notifier._connect(check_url("http://example.com"), 80, 5.0)


def test_a_command_gets_the_record_on_stdin_only() -> None:
    argv, variables = command_with_stdin(["sh", "-c", 'cat; env | grep -c SCALETIER_RECORD; exit "$1"', "sh", "3"], RECORD)
    assert len(variables) > 1
    assert not any("/" in value for value in variables.values())
    result = subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (3, RECORD + b"0\n")


@pytest.mark.parametrize(
    ("code", "error"), [(0, ""), (127, "it exited with status 127"), (None, "it was stopped after 30 s"), ("no", "no room")]
)
def test_results_of_a_command_are_reported(code: int | str | None, error: str) -> None:
    def run(argv: list[str], variables: Mapping[str, str]) -> int:
        assert argv[-2:] == ["./done.sh", "job01"]
        assert variables
        if code is None:
            raise TimeoutError
        if isinstance(code, str):
            raise OSError("no room")
        return code

    assert notify_and_wait("./done.sh ${JOB_ID}", ["./done.sh", "job01"], run).error == error


def test_a_command_gets_no_record_over_the_size_limit() -> None:
    assert notify_and_wait("./done.sh", ["./done.sh"], record=b"x" * 1_000_001).error == (
        "the record has 1000001 bytes, and a command is given 1000000 at most"
    )
