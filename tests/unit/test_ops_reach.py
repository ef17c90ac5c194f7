"""The model servers of a cluster: the order of requests, and installation where one is missing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from infra.inventory import Inventory
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.errors import HostError, OpsError
from ops.models import client, serve, server
from ops.models.client import HEALTH, NO_SERVER, Answer, ServingClient

PREDICT = "/v1/models/m:predict"
DONE, LOADING, SILENT = (200, {"predictions": [1]}), (503, {"error": "not loaded yet"}), (NO_SERVER, {"error": "nobody"})
# As one says that was away when the version was deployed.
UNHEARD: Answer = (404, {"error": "there is no such version"})


class Asked(ServingClient):
    """Each server answers any path with the set answer; a host with an error cannot be reached."""

    def __init__(self, cluster: ClusterClient, **answers: Answer | Exception) -> None:
        super().__init__(cluster)
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.asked: list[tuple[str, str]] = []

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> Answer:
        self.asked.append((name, path))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def order(self) -> list[str]:
        """Return and reset the servers that were asked for a prediction."""
        found = [name for name, path in self.asked if path == PREDICT]
        self.asked.clear()
        return found


class FakeFleet:
    """Hosts that take in what they are sent; `then` is what comes of it."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, bool]] = []
        self.then: Callable[[str], None] = lambda _: None

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        return fan_out(names, work, seconds)

    def must(self, name: str, command: str, what: str, stdin: bytes | None = None) -> str:
        self.ran.append((name, "end-serving" not in command))
        self.then(name)
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
    "first", [SILENT, UNHEARD, LOADING, (500, {"error": "could not be loaded"}), HostError("serving-0", "is gone")]
)
def test_the_next_one_is_asked_and_stays(cluster: ClusterClient, first: Answer | Exception) -> None:
    servers = Asked(cluster, serving_0=first, serving_1=DONE)
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-0", "serving-1"]
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-1"], "nobody comes back to one that did not answer"
    servers.answers = {"serving-0": DONE, "serving-1": OpsError("the model server on serving-1 does not answer: timed out")}
    assert servers.request("POST", PREDICT) == DONE
    assert servers.order() == ["serving-1", "serving-0"]


@pytest.mark.parametrize("status", [200, 400, 408, 413, 504])
def test_what_another_server_would_say_as_well_is_the_answer(cluster: ClusterClient, status: int) -> None:
    servers = Asked(cluster, serving_0=(status, {}), serving_1=DONE)
    assert servers.request("POST", PREDICT)[0] == status
    assert servers.order() == ["serving-0"]


def test_of_bad_answers_the_most_telling_one(cluster: ClusterClient) -> None:
    assert Asked(cluster, serving_0=SILENT, serving_1=LOADING).request("POST", PREDICT) == LOADING
    assert Asked(cluster, serving_0=HostError("serving-0", "is gone"), serving_1=LOADING).request("POST", PREDICT) == LOADING
    assert Asked(cluster, serving_0=UNHEARD, serving_1=LOADING).request("POST", PREDICT) == LOADING
    assert Asked(cluster, serving_0=UNHEARD, serving_1=SILENT).request("POST", PREDICT) == UNHEARD, "all that answer say so"
    nobody = (NO_SERVER, {"error": "no model server answers on serving-0, serving-1"})
    assert Asked(cluster, serving_0=SILENT, serving_1=SILENT).request("POST", PREDICT) == nobody
    assert Asked(cluster, serving_0=SILENT, serving_1=HostError("x", "is gone")).request("POST", PREDICT) == nobody
    with pytest.raises(HostError, match="serving-0 is gone"):
        Asked(cluster, serving_0=HostError("serving-0", "is gone"), serving_1=HostError("x", "y")).request("POST", PREDICT)


def test_a_host_without_a_server_gets_it_and_the_master_s_ends(cluster: ClusterClient, fleet: FakeFleet) -> None:
    servers = Asked(cluster, serving_0=DONE, serving_1=SILENT)
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    servers.finish_start()
    assert fleet.ran == [("serving-1", True), ("master-0", False)]


def test_servers_that_are_there_are_left_alone(cluster: ClusterClient, fleet: FakeFleet) -> None:
    servers = Asked(cluster, serving_0=DONE, serving_1=LOADING)
    servers.start()
    servers.finish_start()
    assert fleet.ran == []


def test_it_is_waited_for_until_it_listens(cluster: ClusterClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LISTEN_SECONDS", 60.0)
    servers = Asked(cluster, serving_0=SILENT, serving_1=SILENT)
    fleet.then = lambda name: servers.answers.update({name: DONE})
    servers.start()
    assert servers.request("POST", PREDICT) == DONE
    servers.finish_start()
    assert sorted(fleet.ran) == [("master-0", False), ("serving-0", True), ("serving-1", True)]


def test_nobody_is_the_answer_of_one_that_never_listens(cluster: ClusterClient) -> None:
    servers = Asked(cluster, serving_0=SILENT, serving_1=SILENT)
    servers.start()
    assert servers.request("POST", PREDICT)[0] == NO_SERVER


def test_why_it_could_not_be_started(cluster: ClusterClient, fleet: FakeFleet) -> None:
    def fails(name: str) -> None:
        raise HostError(name, "could not start its model server", 1, "no TensorFlow")

    fleet.then = fails
    servers = Asked(cluster, serving_0=SILENT, serving_1=SILENT)
    servers.start()
    with pytest.raises(HostError, match="serving-0 could not start its model server: no TensorFlow"):
        servers.request("POST", PREDICT)


def test_a_host_that_is_down_is_named(cluster: ClusterClient, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    servers = Asked(cluster, serving_0=DONE, serving_1=HostError("serving-1", "does not answer"))
    servers.start()
    servers.finish_start()
    assert (capsys.readouterr().err, fleet.ran) == ("serving-1 does not answer\n", [])


class Transport:
    """An SSH connection to a host on which something listens, or nothing."""

    def __init__(self, listens: bool) -> None:
        self.listens = listens

    def open_channel(self, kind: str, there: tuple[str, int], peer: tuple[str, int], timeout: float) -> Any:
        if not self.listens:
            raise paramiko.ChannelException(2, "Connect failed")
        return self


def test_a_connection_goes_to_the_next_server_where_one_refuses(cluster: ClusterClient) -> None:
    first, second = Transport(False), Transport(True)
    transports = {"serving-0": first, "serving-1": second}

    def connection(name: str) -> Any:
        if name not in transports:
            raise HostError(name, "is gone")
        return SimpleNamespace(transport=transports[name])

    cluster.fleet.connection = connection  # type: ignore[method-assign]
    servers = ServingClient(cluster)

    def opened() -> Any:
        return servers.open_channel("direct-tcpip", ("127.0.0.1", 8501), ("127.0.0.1", 1), 1.0)

    assert opened() is second
    first.listens = True
    assert opened() is second, "it stays"
    second.listens = False
    assert opened() is first
    del transports["serving-0"]
    with pytest.raises(paramiko.SSHException, match="no model server answers on serving-0, serving-1"):
        opened()


class Ssh(paramiko.ServerInterface):
    """A host's side of SSH, on which the server listens as long as `listens`."""

    listens = True
    asked: tuple[str, int] | None = None

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_direct_tcpip_request(self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]) -> int:
        self.asked = destination
        return paramiko.OPEN_SUCCEEDED if self.listens else paramiko.OPEN_FAILED_CONNECT_FAILED


@pytest.fixture
def ssh(cluster: ClusterClient) -> Iterator[tuple[Ssh, paramiko.Transport]]:
    """Open a real SSH connection to serving-0; return it with the host's side."""
    ours, theirs = socket.socketpair()
    host, there, here = Ssh(), paramiko.Transport(theirs), paramiko.Transport(ours)
    with contextlib.closing(here), contextlib.closing(there):
        there.add_server_key(paramiko.ECDSAKey.generate())
        there.start_server(server=host, event=threading.Event())
        here.start_client(timeout=60)
        here.auth_none("scaletier")
        cluster.fleet.connection = lambda _: SimpleNamespace(transport=here)  # type: ignore[method-assign]
        yield host, there


def answered(there: paramiko.Transport, answer: bytes) -> threading.Thread:
    """Read and answer one request in the background, and close the connection."""

    def work() -> None:
        channel = there.accept(60)
        while b"\r\n\r\n" not in channel.recv(1 << 16):
            pass
        channel.sendall(answer)
        channel.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


SAID = b"HTTP/1.1 200 OK\r\n%sContent-Length: 100000\r\n\r\n" + b"%99999d0" % 1


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_it_is_asked_through_a_channel_and_no_port(
    cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("nobody may connect from here"))
    host, there = ssh
    thread = answered(there, SAID % more)
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH) == (200, 10)
    thread.join(60)
    assert host.asked == ("127.0.0.1", 8501)


@pytest.mark.parametrize("answer", [b"", (SAID % b"")[:50], (SAID % b"")[:5000]])
def test_nobody_answers_where_it_ends_meanwhile(
    cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], answer: bytes
) -> None:
    answered(ssh[1], answer)
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH)[0] == NO_SERVER


def test_nobody_answers_where_nothing_listens(cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport]) -> None:
    ssh[0].listens = False
    assert ServingClient(cluster).request_from("serving-0", "GET", HEALTH) == (
        NO_SERVER,
        {"error": "no model server answers on serving-0"},
    )


def test_one_that_says_nothing_does_not_answer(
    cluster: ClusterClient, ssh: tuple[Ssh, paramiko.Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SECONDS", 0.1)
    with pytest.raises(OpsError, match="the model server on serving-0 does not answer: it sent nothing"):
        ServingClient(cluster).request_from("serving-0", "GET", HEALTH)


def test_held_for_as_long_as_a_host_can_be_reached(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Asked(cluster, serving_0=LOADING, serving_1=DONE)
    steps = iter(
        [
            {"serving-1": OpsError("is busy"), "serving-0": OpsError("is busy")},
            {"serving-0": HostError("serving-0", "is gone"), "serving-1": HostError("serving-1", "is gone")},
        ]
    )
    monkeypatch.setattr(client.time, "sleep", lambda _: servers.answers.update(next(steps)))
    settled: list[int] = []
    monkeypatch.setattr(servers, "finish_start", lambda: settled.append(len(servers.asked)))
    with pytest.raises(OpsError, match="the connection to the host broke off: run fab serve again"):
        serve.hold(servers)
    assert settled == [0]
    assert servers.asked[:2] == [("serving-0", HEALTH), ("serving-1", HEALTH)]
    assert servers._order() == ["serving-1", "serving-0"], "who asks next finds one in front that answers"


def test_the_servers(inventory: Inventory, served: Inventory) -> None:
    assert server.names_of(inventory) == ["master-0"]
    assert server.names_of(served) == ["serving-0", "serving-1"]
