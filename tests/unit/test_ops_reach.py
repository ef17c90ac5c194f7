"""Check the client of a cluster's model servers: the order of requests, and installation on hosts without a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from paramiko.common import AUTH_SUCCESSFUL, OPEN_FAILED_CONNECT_FAILED, OPEN_SUCCEEDED
from waiting import limit

from infra.inventory import Inventory
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.errors import HostError, OpsError
from ops.models import client, serve, server
from ops.models.client import HEALTH, NO_SERVER, Answer, ServingClient

PREDICT = "/v1/models/m:predict"
DONE, LOADING, NOT_RUNNING = (200, {"predictions": [1]}), (503, {"error": "not loaded yet"}), (NO_SERVER, {"error": "nobody"})
# The answer of a server that was unreachable when the version was deployed.
UNKNOWN: Answer = (404, {"error": "there is no such version"})
NOBODY = (NO_SERVER, {"error": "no model server answers on serving-0, serving-1"})


class FakeServers(ServingClient):
    """Let each server give a set answer to any request; a host with an error cannot be reached."""

    def __init__(self, cluster: ClusterClient, **answers: Answer | Exception) -> None:
        super().__init__(cluster)
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.requests: list[tuple[str, str]] = []

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        self.requests.append((name, path))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def order(self) -> list[str]:
        """Return the servers that got a prediction request, and reset the list."""
        names = [name for name, path in self.requests if path == PREDICT]
        self.requests.clear()
        return names


class FakeFleet:
    """Record commands on hosts and call `on_command` for each."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, bool]] = []
        self.on_command: Callable[[str], None] = lambda _: None

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        return fan_out(names, work, seconds)

    def check_output(self, name: str, command: str, what: str, stdin: bytes | None = None) -> str:
        self.commands.append((name, "end-serving" not in command))
        self.on_command(name)
        return ""


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def cluster(served: Inventory, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> ClusterClient:
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(client, "_LISTEN_SECONDS", 0.1)
    return ClusterClient(served, fleet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "first", [NOT_RUNNING, UNKNOWN, LOADING, (500, {"error": "could not be loaded"}), HostError("serving-0", "is gone")]
)
def test_a_failing_server_is_replaced_by_the_next_one(cluster: ClusterClient, first: Answer | Exception) -> None:
    servers = FakeServers(cluster, serving_0=first, serving_1=DONE)
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-0", "serving-1"]
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-1"], "a server that did not answer is not tried first again"
    servers.answers = {"serving-0": DONE, "serving-1": OpsError("the model server on serving-1 does not answer: timed out")}
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-1", "serving-0"]


@pytest.mark.parametrize("status", [200, 400, 408, 413, 504])
def test_an_answer_that_is_the_same_everywhere_is_returned_at_once(cluster: ClusterClient, status: int) -> None:
    servers = FakeServers(cluster, serving_0=(status, {}), serving_1=DONE)
    assert servers.request("POST", PREDICT)[0] == status
    assert servers.order() == ["serving-0"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (NOT_RUNNING, LOADING, LOADING),
        (HostError("serving-0", "is gone"), LOADING, LOADING),
        (UNKNOWN, LOADING, LOADING),
        (UNKNOWN, NOT_RUNNING, UNKNOWN),  # all running servers agree
        (NOT_RUNNING, NOT_RUNNING, NOBODY),
        (NOT_RUNNING, HostError("x", "is gone"), NOBODY),
        (HostError("serving-0", "is gone"), HostError("x", "y"), "serving-0 is gone"),
    ],
)
def test_the_most_specific_error_is_returned(
    cluster: ClusterClient, first: Answer | Exception, second: Answer | Exception, expected: Answer | str
) -> None:
    servers = FakeServers(cluster, serving_0=first, serving_1=second)
    if isinstance(expected, str):
        with pytest.raises(HostError, match=f"^{expected}$"):
            servers.request("POST", PREDICT)
    else:
        assert servers.request("POST", PREDICT) == expected


def test_a_host_without_a_server_gets_it_and_the_masters_stops(cluster: ClusterClient, fleet: FakeFleet) -> None:
    servers = FakeServers(cluster, serving_0=DONE, serving_1=NOT_RUNNING)
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    servers.finish_start()
    assert fleet.commands == [("serving-1", True), ("master-0", False)]


def test_a_request_waits_until_a_new_server_listens(
    cluster: ClusterClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LISTEN_SECONDS", limit())
    servers = FakeServers(cluster, serving_0=NOT_RUNNING, serving_1=NOT_RUNNING)
    fleet.on_command = lambda name: servers.answers.update({name: DONE})
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    servers.finish_start()
    assert sorted(fleet.commands) == [("master-0", False), ("serving-0", True), ("serving-1", True)]


def test_a_server_that_never_listens_is_no_server(cluster: ClusterClient) -> None:
    servers = FakeServers(cluster, serving_0=NOT_RUNNING, serving_1=NOT_RUNNING)
    servers.start()
    assert servers.request("POST", PREDICT)[0] == NO_SERVER


def test_a_failed_start_gives_its_reason(cluster: ClusterClient, fleet: FakeFleet) -> None:
    def fail(name: str) -> None:
        raise HostError(name, "could not start its model server", 1, "no TensorFlow")

    fleet.on_command = fail
    servers = FakeServers(cluster, serving_0=NOT_RUNNING, serving_1=NOT_RUNNING)
    servers.start()
    with pytest.raises(HostError, match="serving-0 could not start its model server: no TensorFlow"):
        servers.request("POST", PREDICT)


def test_one_new_server_is_enough(
    cluster: ClusterClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "_LISTEN_SECONDS", limit())
    servers = FakeServers(cluster, serving_0=NOT_RUNNING, serving_1=NOT_RUNNING)
    requested = threading.Event()
    request_from = servers.request_from

    def count(name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        answer = request_from(name, method, path, body)
        if (name, path) == ("serving-1", PREDICT):
            requested.set()
        return answer

    def start_one(name: str) -> None:
        assert requested.wait(limit())
        if name == "serving-0":
            raise HostError(name, "is gone")
        servers.answers[name] = DONE

    monkeypatch.setattr(servers, "request_from", count)
    fleet.on_command = start_one
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    fleet.on_command = lambda _: None
    servers.finish_start()
    assert capsys.readouterr().err == "serving-0 is gone\n"
    assert fleet.commands[-1] == ("master-0", False)


def test_an_unreachable_host_is_named_and_running_servers_are_not_changed(
    cluster: ClusterClient, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(cluster, serving_0=DONE, serving_1=HostError("serving-1", "does not answer"))
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    servers.finish_start()
    assert (capsys.readouterr().err, fleet.commands) == ("serving-1 does not answer\n", [])


class Transport:
    """Fake an SSH connection to a host on which a server listens, or none."""

    def __init__(self, listening: bool) -> None:
        self.listening = listening

    def open_channel(self, kind: str, destination: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
        if not self.listening:
            raise paramiko.ChannelException(2, "Connect failed")
        return self


def test_a_refused_channel_is_opened_to_the_next_server(cluster: ClusterClient) -> None:
    first, second = Transport(False), Transport(True)
    transports = {"serving-0": first, "serving-1": second}

    def connection(name: str) -> Any:
        if name not in transports:
            raise HostError(name, "is gone")
        return SimpleNamespace(transport=transports[name])

    cluster.fleet.connection = connection  # type: ignore[method-assign]
    servers = ServingClient(cluster)

    assert servers.connect(8501) is second
    first.listening = True
    assert servers.connect(8501) is second, "the current server is kept"
    second.listening = False
    assert servers.connect(8501) is first
    del transports["serving-0"]
    with pytest.raises(paramiko.SSHException, match="no model server answers on serving-0, serving-1"):
        servers.connect(8501)


def test_a_server_that_does_not_answer_is_tried_last(cluster: ClusterClient) -> None:
    transports = {"serving-0": Transport(True), "serving-1": Transport(True)}
    cluster.fleet.connection = lambda name: SimpleNamespace(transport=transports[name])  # type: ignore[method-assign,assign,return-value]
    servers = ServingClient(cluster)

    first = servers.connect(8501)
    assert first is transports["serving-0"]
    for _ in range(2):  # of two of its requests in progress
        servers.fail_over(first)
        assert servers.connect(8501) is transports["serving-1"]
    servers.fail_over(transports["serving-1"])
    assert servers.connect(8501) is first


class Ssh(paramiko.ServerInterface):
    """A host's side of SSH; the server listens while `listening` is set."""

    listening = True
    destination: tuple[str, int] | None = None

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_auth_none(self, username: str) -> int:
        return AUTH_SUCCESSFUL

    def check_channel_direct_tcpip_request(self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]) -> int:
        self.destination = destination
        assert origin == ("127.0.0.1", 0)
        return OPEN_SUCCEEDED if self.listening else OPEN_FAILED_CONNECT_FAILED


@pytest.fixture
def ssh(cluster: ClusterClient) -> Iterator[tuple[Ssh, paramiko.Transport]]:
    """Open a real SSH connection to serving-0; return it with the host's side."""
    client_socket, host_socket = socket.socketpair()
    host, host_transport, client_transport = Ssh(), paramiko.Transport(host_socket), paramiko.Transport(client_socket)
    with contextlib.closing(client_transport), contextlib.closing(host_transport):
        host_transport.add_server_key(paramiko.ECDSAKey.generate())
        host_transport.start_server(server=host, event=threading.Event())
        client_transport.start_client(timeout=limit())
        client_transport.auth_none("scaletier")
        cluster.fleet.connection = lambda _: SimpleNamespace(transport=client_transport)  # type: ignore[method-assign]
        yield host, host_transport


def answer_one_request(host_transport: paramiko.Transport, answer: bytes) -> threading.Thread:
    """Read and answer one request in the background, then close the connection."""

    def work() -> None:
        channel = host_transport.accept(limit())
        while b"\r\n\r\n" not in channel.recv(1 << 16):
            pass
        channel.sendall(answer)
        channel.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


RESPONSE = b"HTTP/1.1 200 OK\r\n%sContent-Length: 100000\r\n\r\n" + b"%99999d0" % 1


@pytest.mark.parametrize("extra_header", [b"", b"Connection: close\r\n"])
def test_a_request_uses_an_ssh_channel_and_no_local_port(
    cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], extra_header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("no local port may be opened"))
    host, host_transport = ssh
    thread = answer_one_request(host_transport, RESPONSE % extra_header)
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH) == (200, 10)
    thread.join(limit())
    assert host.destination == ("127.0.0.1", 8501)


@pytest.mark.parametrize("answer", [b"", (RESPONSE % b"")[:50], (RESPONSE % b"")[:5000]])
def test_a_truncated_response_is_no_server(cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], answer: bytes) -> None:
    answer_one_request(ssh[1], answer)
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH)[0] == NO_SERVER


def test_a_refused_channel_is_no_server(cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport]) -> None:
    ssh[0].listening = False
    no_server = (NO_SERVER, {"error": "no model server answers on serving-0"})
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH) == no_server


def test_a_silent_server_times_out(
    cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.1)
    with pytest.raises(OpsError, match="the model server on serving-0 does not answer: it sent nothing"):
        ServingClient(cluster).request_from("serving-0", "GET", HEALTH)


def test_serve_holds_while_a_host_is_reachable(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers(cluster, serving_0=LOADING, serving_1=DONE)
    gone = {name: HostError(name, "is gone") for name in servers.names}
    steps = iter([dict.fromkeys(servers.names, OpsError("is busy")), gone])
    monkeypatch.setattr(client.time, "sleep", lambda _: servers.answers.update(next(steps)))
    finished_starts: list[int] = []
    monkeypatch.setattr(servers, "finish_start", lambda: finished_starts.append(len(servers.requests)))
    with pytest.raises(OpsError, match="the connection to the host broke off: run fab serve again"):
        serve.keep_alive(servers)
    assert finished_starts == [0]
    assert servers.requests[:2] == [("serving-0", HEALTH), ("serving-1", HEALTH)]
    assert servers._names_to_try() == ["serving-1", "serving-0"], "the next request begins with a server that answers"


def test_serve_prints_the_address_of_a_local_port(
    cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(cluster, serving_0=UNKNOWN, serving_1=(200, {}))
    forwards = []

    @contextlib.contextmanager
    def forward(open_to_host: Any, ports: range, unanswered: Any) -> Iterator[SimpleNamespace]:
        assert (open_to_host, ports, unanswered) == (servers.connect, range(1234, 1235), servers.fail_over)
        forwards.append(SimpleNamespace(port=1234, remote_port=0))
        yield forwards[-1]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    started: list[int] = []
    monkeypatch.setattr(servers, "start", lambda: started.append(len(servers.requests)))
    monkeypatch.setattr(serve, "ServingClient", lambda _: servers)
    monkeypatch.setattr(serve, "Forward", forward)
    monkeypatch.setattr(serve, "catalog_of", lambda _: None)
    monkeypatch.setattr(serve, "served_model", lambda *_: SimpleNamespace(name="m"))
    monkeypatch.setattr(serve.time, "sleep", interrupt)
    assert serve.serve(cluster, "m", "1234") == 0
    output = capsys.readouterr()
    url = "http://127.0.0.1:1234/v1/models/m"
    assert output.out == f"{url}\n"
    assert output.err == f"curl -d '{{\"instances\": […]}}' {url}:predict; Ctrl-C ends it\n"
    assert started == [0], "before the first request"
    assert servers.requests == [("serving-0", "/v1/models/m"), ("serving-1", "/v1/models/m"), ("serving-1", HEALTH)]
    assert [each.remote_port for each in forwards] == [8501]
    servers.answers = dict.fromkeys(servers.names, NOT_RUNNING)
    with pytest.raises(OpsError, match=r"^no model server answers on serving-0, serving-1: fab deploy starts it$"):
        serve.serve(cluster, "m", "1234")


def test_the_names_of_servers(inventory: Inventory, served: Inventory) -> None:
    assert server.serving_host_names(inventory) == ["master-0"]
    assert server.serving_host_names(served) == ["serving-0", "serving-1"]
