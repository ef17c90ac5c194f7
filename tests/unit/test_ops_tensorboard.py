"""Check `fab tensorboard` without a host: its process there, its end, its port, and its refusals."""

from __future__ import annotations

import copy
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from opsdata import put_job
from waiting import limit, scale, wait_for

from infra.inventory import Inventory
from jobs.paths import PYTHON
from jobs.queue import QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient
from ops.cluster.forward import Forward, first_free, local_ports, open_channel
from ops.errors import HostError, OpsError, UsageError
from ops.models import tensorboard as module


class FakeChannel:
    """A channel that returns these pieces (None for a timeout) and then ends."""

    def __init__(self, *pieces: bytes | None, exited: int = 1, error: Exception | None = None, connected: bool = False) -> None:
        self.pieces, self.sent, self.exit_code, self.timeouts = list(pieces), b"", exited, list[float]()
        self.calls: list[str] = []
        self.transport = SimpleNamespace(saved_exception=error, is_active=lambda: connected)

    def get_transport(self) -> SimpleNamespace:
        return self.transport

    def recv_exit_status(self) -> int:
        return self.exit_code

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)

    def recv(self, size: int) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if piece is None:
            raise TimeoutError
        return piece

    def sendall(self, content: bytes) -> None:
        self.sent += content

    def set_combine_stderr(self, combine: bool) -> None:
        assert combine
        self.calls.append("combine")

    def exec_command(self, command: str) -> None:
        self.calls.append(command)

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    (tmp_path / "bucket").mkdir()
    return ClusterClient(replace(inventory, operator_bucket=f"{tmp_path}/bucket"))


def unit_command(inventory: Inventory, logdir: str, title: str) -> list[str]:
    """Return the command in the unit."""
    argv = shlex.split(module.command(inventory.chief, logdir, title))
    return argv[argv.index("--") + 1 :]


def test_it_runs_in_a_reading_sandbox(inventory: Inventory) -> None:
    argv = shlex.split(module.command(inventory.chief, "/bucket/jobs", "x"))
    assert argv[:7] == ["sudo", "-n", "/usr/lib/scaletier/root-helper", "sandbox", "reading", "800000000", "--"]


def test_the_command_reads_any_bucket_and_listens_on_loopback(inventory: Inventory) -> None:
    env, cache_setting, python, dash_c, code, *flags = unit_command(inventory, "gs://b/jobs/it's", "job01")
    assert (env, python, dash_c) == ("env", PYTHON, "-c")
    assert cache_setting == 'FSSPEC_GS={"use_listings_cache": false}'
    assert unit_command(inventory, "/bucket/jobs", "x")[:2] == ["env", PYTHON]
    compile(code, "serve", "exec")
    assert flags == [
        *("--logdir", "gs://b/jobs/it's", "--window_title", "job01", "--host", "127.0.0.1", "--port", "0"),
        *("--reload_interval", "5", "--load_fast=false"),
    ]


@pytest.mark.parametrize("ending", ["ended", "silent"])
def test_the_remote_process_ends_with_its_client(ending: str, tmp_path: Path) -> None:
    """Replace TensorBoard with a module that runs until it is terminated."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").touch()
    serve = "def run_main():\n    print('up', flush=True)\n    import time\n    time.sleep(6000)\n"
    (tmp_path / "tensorboard" / "main.py").write_text(serve)
    silence = 2 * scale() if ending == "silent" else 2 * limit()  # it begins before "up"
    code = module._SERVE.replace(f"{module._KEEPALIVE_TIMEOUT})", f"{silence})")
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, **pipes) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            if ending == "ended":
                process.stdin.close()
            assert process.wait(limit()) == -signal.SIGTERM
        finally:
            process.kill()


def test_the_remote_process_stays_while_keepalives_arrive() -> None:
    """Watch with a fake select and os: nine inputs, each within the timeout, then none."""
    timeouts, kills = list[int](), list[int]()

    def select(*args: Any) -> tuple[list[int], list[int], list[int]]:
        timeouts.append(args[3])
        return ([0] if len(timeouts) < 10 else []), [], []

    fakes = {
        "select": SimpleNamespace(select=select),
        "os": SimpleNamespace(
            read=lambda *_: b"\n", getpid=lambda: 7, kill=lambda pid, _: kills.append(pid), _exit=kills.append
        ),
        "signal": signal,
        "time": SimpleNamespace(sleep=lambda _: None),
    }
    exec("def watch" + module._SERVE.partition("def watch")[2].partition("threading.")[0], fakes)  # noqa: S102
    fakes["watch"]()  # type: ignore[operator]
    assert timeouts == [module._KEEPALIVE_TIMEOUT] * 10
    assert kills == [7, 1]


def test_the_port_is_read_from_tensorboards_output() -> None:
    output = b"\nTensorBoard 2.21.0 at http://127.0.0.1:43", b"210/ (Press CTRL+C to quit)\n"
    channel = FakeChannel(None, *(bytes([byte]) for byte in b"".join(output)))
    assert module._Server("master-0", channel).await_port() == 43210
    assert channel.sent == b"\n" * len(channel.timeouts), "the host gets keepalives"
    assert set(channel.timeouts) == {1.0}


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (FakeChannel(b"TensorBoard 2.21.0 at", exited=-1), "broke off"),
        (FakeChannel(exited=-1, error=ConnectionResetError("reset by peer"), connected=True), "broke off: reset by peer"),
        (FakeChannel(exited=-1, error=EOFError()), "broke off: EOFError"),
        (FakeChannel(exited=-1, connected=True), "has killed TensorBoard, as when memory is short"),
        (FakeChannel(None, b"Traceback\nImportError: no module\n", None), "has ended TensorBoard: ImportError: no module"),
    ],
)
def test_a_lost_connection_is_distinguished_from_a_killed_command(channel: FakeChannel, message: str) -> None:
    for wait in (module._Server.await_port, module._Server.await_end):
        with pytest.raises(HostError, match=f"^master-0 {message}$"):
            wait(module._Server("master-0", copy.deepcopy(channel)))


class FakeFleet:
    """Return one connection per channel; then the host does not answer."""

    def __init__(self, *channels: FakeChannel) -> None:
        self.channels = list(channels)

    def connection(self, name: str) -> SimpleNamespace:
        if not self.channels:
            raise HostError(name, "does not answer")
        channel = self.channels.pop(0)
        return SimpleNamespace(create_session=lambda: channel, transport=channel.transport)


def last_error(cluster: ClusterClient, *channels: FakeChannel) -> str:
    """Return the last error of `fab tensorboard --all`."""
    fleet: Any = FakeFleet(*channels)
    with pytest.raises(HostError) as caught:
        module.tensorboard(ClusterClient(cluster.inventory, fleet), None, every_job=True, port=None)
    return str(caught.value)


def serving_channel(port: int, **options: Any) -> FakeChannel:
    return FakeChannel(b"TensorBoard 2.21.0 at http://127.0.0.1:%d/ (Press CTRL+C to quit)\n" % port, **options)


def test_a_broken_connection_restarts_tensorboard_on_the_same_port(
    cluster: ClusterClient, capsys: pytest.CaptureFixture[str]
) -> None:
    error = EOFError("reset")
    channels = [serving_channel(1001, exited=-1, error=error), serving_channel(1002, exited=-1, error=error)]
    assert last_error(cluster, *channels) == "master-0 does not answer"
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1, "one URL"
    assert output.err.count("master-0 broke off: reset; starting TensorBoard again") == 2


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ([FakeChannel(exited=-1, error=EOFError())], "master-0 broke off: EOFError"),
        (
            [serving_channel(1, exited=-1, error=EOFError()), FakeChannel(exited=-1, error=EOFError("refused"))],
            "master-0 broke off: refused",
        ),
        ([serving_channel(1, exited=-1, connected=True)], "master-0 has killed TensorBoard, as when memory is short"),
        ([serving_channel(1, exited=0)], "master-0 has ended TensorBoard: TensorBoard 2.21.0 at "),
    ],
    ids=["broke off before it served", "and before it served again", "killed", "ended by itself"],
)
def test_other_ends_are_errors(cluster: ClusterClient, channels: list[FakeChannel], message: str) -> None:
    assert last_error(cluster, *channels, serving_channel(1)).startswith(message)


def test_ctrl_c_ends_it_and_connections_reach_the_chief(
    cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = serving_channel(1001)
    fleet: Any = FakeFleet(channel)

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Server, "await_end", interrupt)
    assert module.tensorboard(ClusterClient(cluster.inventory, fleet), None, every_job=True, port=None) == 0
    assert channel.calls == ["combine", module.command(cluster.inventory.chief, "/bucket/jobs", "test")]
    assert capsys.readouterr().err.splitlines() == ["TensorBoard on master-0 shows /bucket/jobs; Ctrl-C ends it"]
    transport = FakeTransport()
    fleet.connection = lambda _: SimpleNamespace(transport=transport)
    with open_channel(fleet, "master-0", 6006) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"", "the host has ended it, too"
    assert transport.opened == [("direct-tcpip", ("127.0.0.1", 6006))]


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", ""])
def test_an_invalid_call_is_refused(cluster: ClusterClient, port: str) -> None:
    with pytest.raises(UsageError, match="is no port; valid are 1 to 65535"):
        module.tensorboard(cluster, None, every_job=False, port=port)
    with pytest.raises(UsageError, match=r"^--job shows one job and --all every one: use only one of them$"):
        module.tensorboard(cluster, "old", every_job=True, port=None)


def test_the_chosen_jobs_logdir(cluster: ClusterClient) -> None:
    ledger = cluster.ledger
    with pytest.raises(UsageError, match="no job has run on this cluster yet"):
        module._logdir(cluster, None)
    for job in ("old", "new"):
        put_job(ledger, JobRecord(job, state=JobState.RUNNING))
    with pytest.raises(UsageError, match=r"there is no job 'other'; fab jobs lists"):
        module._logdir(cluster, "other")
    message = r"^job old \(RUNNING\) has no summaries in /bucket/jobs/old/output, try again in a moment$"
    with pytest.raises(OpsError, match=message):
        module._logdir(cluster, "old")
    cluster.bucket.upload("jobs/old/output/summaries/events.out.tfevents.1.v2", b"")
    assert module._logdir(cluster, "old") == ("/bucket/jobs/old/output", "old")
    ledger.change_queue(lambda queue: queue.added(QueueEntry("old", ["master-0"])))
    assert module._logdir(cluster, None) == ("/bucket/jobs/old/output", "old")


class FakeTransport:
    """A fake SSH transport to one service, which answers with its input twice when the input ends."""

    def __init__(self) -> None:
        self.opened: list[Any] = []

    def open_channel(self, kind: str, dest: tuple[str, int], peer: tuple[str, int], timeout: float) -> socket.socket:
        self.opened.append((kind, dest))
        client_socket, host_socket = socket.socketpair()

        def serve() -> None:
            with host_socket:
                received = b"".join(iter(lambda: host_socket.recv(1000), b""))
                host_socket.sendall(received * 2)

        threading.Thread(target=serve, daemon=True).start()
        return client_socket


def make_forward(ports: list[int]) -> Callable[[FakeTransport], Forward]:
    def connect(transport: FakeTransport) -> Forward:
        fleet: Any = SimpleNamespace(connection=lambda _: SimpleNamespace(transport=transport))
        return Forward(lambda port: open_channel(fleet, "master-0", port), ports)

    return connect


def test_connections_are_forwarded_in_parallel() -> None:
    transport = FakeTransport()
    with make_forward([0])(transport) as forward:
        forward.remote_port = 6006
        pairs = [socket.socketpair() for _ in range(20)]
        threads = [threading.Thread(target=forward.carry, args=(forwarded_end,)) for _, forwarded_end in pairs]
        for thread in threads:
            thread.start()
        for number, (local_end, _) in enumerate(pairs):
            local_end.sendall(bytes([number]) * 100_000)
            local_end.shutdown(socket.SHUT_WR)
        for number, (local_end, _) in enumerate(pairs):
            assert b"".join(iter(lambda local_end=local_end: local_end.recv(65536), b"")) == bytes([number]) * 200_000
        for thread in threads:
            thread.join(limit())
            assert not thread.is_alive()
    assert transport.opened == [("direct-tcpip", ("127.0.0.1", 6006))] * 20


def test_the_next_free_port_is_used_or_an_error_printed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used_socket:
        port = used_socket.getsockname()[1]
        with pytest.raises(UsageError, match=f"^port {port} is taken on this machine: give another --port$"):
            make_forward([port])(FakeTransport())
        with make_forward([port, 0])(FakeTransport()) as forward:
            assert forward.port not in (0, port)


@pytest.mark.parametrize(
    ("port", "ports"),
    [(None, range(6006, 6106)), ("1", range(1, 2)), ("65535", range(65535, 65536)), ("8600", range(8600, 8601))],
)
def test_the_ports_to_try(port: str | None, ports: range) -> None:
    assert local_ports(port, 6006) == ports


def test_the_first_free_port_is_returned() -> None:
    def listen(port: int) -> str:
        if port in errors:
            raise errors[port]
        return f"port {port}"

    taken = OSError(errno.EADDRINUSE, "taken")
    errors = {5: taken, 6: taken, 8: PermissionError(), 9: OSError(errno.EADDRNOTAVAIL, "no such address")}
    assert first_free([5, 6, 7, 8], listen) == "port 7"
    with pytest.raises(UsageError, match=r"^ports 5 to 6 are taken on this machine: give another --port$"):
        first_free([5, 6], listen)
    with pytest.raises(UsageError, match=r"^port 8 is for root alone: give a --port above 1023$"):
        first_free([5, 8, 7], listen)
    with pytest.raises(OSError, match="no such address"):
        first_free([9, 7], listen)


def test_a_listener_serves_in_the_background_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, carried = FakeTransport(), list[tuple[object, ...]]()
    forward = make_forward([0])(transport)
    server = forward._server
    assert (server.daemon_threads, server.allow_reuse_address) == (True, True)
    assert server.server_address == ("127.0.0.1", forward.port)
    monkeypatch.setattr(forward, "carry", lambda *arguments: carried.append(arguments))
    before = {*threading.enumerate()}
    with forward:
        (thread,) = {*threading.enumerate()} - before
        assert thread.daemon
        request = socket.socketpair()[0]
        server.finish_request(request, ("127.0.0.1", 9))
    assert carried == [(request,)]
    thread.join(limit())
    assert not thread.is_alive()
    assert server.fileno() == -1


@pytest.mark.parametrize("error", [paramiko.SSHException("refused"), OSError(), EOFError(), HostError("ps-0", "is gone")])
def test_a_refused_connection_is_closed(error: Exception) -> None:
    def refuse(port: int) -> None:
        raise error

    with Forward(refuse, [0]) as forward:
        request, client = socket.socketpair()
        with client:
            forward._server.process_request_thread(request, ("127.0.0.1", 9))  # type: ignore[attr-defined]
            assert client.recv(1) == b""


def test_both_directions_are_carried_until_the_host_ends_the_connection() -> None:
    daemons, opened = list[bool](), list[socket.socket]()
    ours, theirs = socket.socketpair()

    class Here:
        """The local end, whose input never comes."""

        def recv(self, size: int) -> bytes:
            daemons.append(threading.current_thread().daemon)
            return theirs.recv(size)

        def sendall(self, data: bytes) -> None:
            theirs.sendall(data)

        def shutdown(self, how: int) -> None:
            theirs.shutdown(how)

    def connect(port: int) -> socket.socket:
        here, there = socket.socketpair()
        there.sendall(b"answer")
        there.close()
        opened.append(here)
        return here

    with ours, theirs:
        Forward(connect, [0]).carry(Here())
        assert ours.recv(9) == b"answer"
        assert ours.recv(9) == b""
        assert opened[0].fileno() == -1
        ours.sendall(b"late")
        wait_for(lambda: daemons == [True], "the other direction's thread")


@pytest.mark.parametrize("answer", [b"", b"answer"])
def test_a_connection_that_ends_unanswered_is_reported_before_the_client_sees_its_end(answer: bytes) -> None:
    def connect(port: int) -> socket.socket:
        here, there = socket.socketpair()

        def serve() -> None:
            with there:
                there.recv(9)
                there.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return here

    unanswered = list[bytes]()
    request, client = socket.socketpair()
    client.setblocking(True)

    def note(_: Any) -> None:
        with pytest.raises(BlockingIOError):
            client.recv(9, socket.MSG_DONTWAIT)
        unanswered.append(answer)

    forward = Forward(connect, [0], note)
    with client, request:
        client.sendall(b"question")
        forward.carry(request)
        assert client.recv(9) == answer
    assert unanswered == ([b""] if not answer else [])
