"""Every kind of store, and what makes it unreachable."""

from __future__ import annotations

import http.client
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import pytest

from jobs import remote
from jobs.folder import Folder
from jobs.objects import Objects
from jobs.store import Files, Store

SERVER = Path(__file__).parents[2] / ".cache/fake-gcs/fake-gcs-server"
LIMIT = 2.0  # seconds, where a store is to give up; elsewhere it has the time that a busy machine needs


class Bucket(Store, Files, Protocol):
    """A store that takes files too."""


@dataclass(frozen=True)
class Kind:
    """A store, empty at first; the same, which gives up after LIMIT; and how to take away what is behind both."""

    store: Bucket
    hasty: Bucket
    take_away: Callable[[], None]
    root: Path | None = None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ask(port: int, method: str, path: str, body: object = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, content
        return json.loads(content) if content.startswith(b"{") else None
    finally:
        connection.close()


@contextmanager
def served() -> Iterator[tuple[int, Callable[[], None]]]:
    """A double of Google's storage on a loopback port, and what ends it, which may be called early."""
    if not SERVER.exists():
        pytest.fail("the double of Google's storage is missing: make gcs")
    port = free_port()
    command = [str(SERVER), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-public-host", f"127.0.0.1:{port}"]  # where Go's library reads
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop() -> None:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()

    try:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                ask(port, "GET", "/_internal/healthcheck")
                break
            time.sleep(0.01)
        else:
            pytest.fail("the double of Google's storage does not start")
        yield port, stop
    finally:
        stop()


@pytest.fixture(scope="session")
def gcs() -> Iterator[int]:
    with served() as (port, _):
        yield port


@pytest.fixture
def bucket(gcs: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A bucket of this test's own; nobody signs in."""
    import gcsfs  # noqa: F401  no part of what a test measures
    from fsspec.config import conf

    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{gcs}")
    name = f"bucket-{time.monotonic_ns()}"
    ask(gcs, "POST", "/storage/v1/b?project=test", {"name": name})
    yield name


@pytest.fixture
def folder(tmp_path: Path) -> Kind:
    root = tmp_path / "bucket"
    root.mkdir()
    return Kind(Folder(root), Folder(root, LIMIT), lambda: shutil.rmtree(root), root)


@pytest.fixture
def objects(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Kind:
    store, hasty = (Objects(f"gs://{bucket}/some/prefix", seconds) for seconds in (30, LIMIT))

    def take_away() -> None:
        with served() as (port, stop):
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            ask(port, "POST", "/storage/v1/b?project=test", {"name": bucket})
            assert store.scan("*") == {}
            stop()

    return Kind(store, hasty, take_away)


class Pipe:
    """A channel as SSH has it, to a process of this machine."""

    def __init__(self, root: Path) -> None:
        argv = shlex.split(remote.command(str(root)))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Far(remote.Remote):
    """A folder of another machine; its files go another way, by SFTP."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.channels: list[Pipe] = []
        super().__init__(lambda: self._opened(root), seconds)
        files = Folder(root)
        self.upload, self.download, self.sizes, self.delete = files.upload, files.download, files.sizes, files.delete

    def _opened(self, root: Path) -> Pipe:
        self.channels.append(Pipe(root))
        return self.channels[-1]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Kind]:
    root = tmp_path / "bucket"
    root.mkdir()
    stores = (Far(root, 30), Far(root, LIMIT))
    yield Kind(*stores, lambda: shutil.rmtree(root), root)
    for each in stores:
        for channel in each.channels:
            channel.close()


# The kinds of store: a name here is a fixture above that gives a Kind.
KINDS = ("folder", "far", "objects")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Kind)
    return found


@pytest.fixture
def store(kind: Kind) -> Iterator[Bucket]:
    """A store of every kind, which is left without a trace of a write that was under way."""
    yield kind.store
    if kind.root is not None and kind.root.exists():
        assert [path for path in kind.root.rglob("*") if path.name.startswith(".")] == []


@dataclass
class Front:
    """What stands between a store and Google's storage: it counts, and it does one evil for each word of `evils`."""

    behind: int
    seen: list[str] = field(default_factory=list)
    evils: list[str] = field(default_factory=list)  # lose: the answer of what was done; hang; or a status such as 503
    page: int = 0  # the most objects of a listing's answer
    over: Event = field(default_factory=Event)

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.seen.append(f"{handler.command} {handler.path}")
        evil = self.evils.pop(0) if self.evils else ""
        handler.close_connection = True
        if evil == "hang":
            self.over.wait(30)
        elif evil.isdigit():
            handler.send_error(int(evil), "no")
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=5)
            headers = {name: value for name, value in handler.headers.items() if name not in ("Host", "Connection")}
            path = handler.path + (f"&maxResults={self.page}" if self.page and "matchGlob" in handler.path else "")
            connection.request(handler.command, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if evil != "lose":
                handler.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower().startswith("x-goog") or name == "Content-Type":
                        handler.send_header(name, value)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)


@pytest.fixture
def front(bucket: str, gcs: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    front = Front(gcs)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            front.forward(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the class above
            """A test's output is pytest's affair."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    try:
        yield front
    finally:
        front.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
