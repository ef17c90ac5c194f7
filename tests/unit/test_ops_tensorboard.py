"""`fab tensorboard` without a host: its process there, its end, its port, and its refusals."""

from __future__ import annotations

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

import pytest
from opsdata import put_job
from waiting import limit

from infra.inventory import Inventory
from jobs.paths import PYTHON
from jobs.queue import QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient
from ops.cluster.forward import Forward
from ops.errors import HostError, OpsError, UsageError
from ops.models import tensorboard as module


class FakeChannel:
    """A channel that has these pieces to say, None for a silence, and then has ended."""

    def __init__(self, *pieces: bytes | None, exited: int = 1, error: Exception | None = None, connected: bool = False) -> None:
        self.pieces, self.sent, self.exit_code = list(pieces), b"", exited
        self.transport = SimpleNamespace(saved_exception=error, is_active=lambda: connected)

    def get_transport(self) -> SimpleNamespace:
        return self.transport

    def recv_exit_status(self) -> int:
        return self.exit_code

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv(self, size: int) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if piece is None:
            raise TimeoutError
        return piece

    def sendall(self, content: bytes) -> None:
        self.sent += content

    def set_combine_stderr(self, combine: bool) -> None:
        assert combine

    def exec_command(self, command: str) -> None:
        assert command

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    (tmp_path / "bucket").mkdir()
    return ClusterClient(replace(inventory, operator_bucket=f"{tmp_path}/bucket"))


def _program(inventory: Inventory, logdir: str, title: str) -> list[str]:
    """Return the command in the unit."""
    words = shlex.split(module.command(inventory.chief, logdir, title))
    return words[words.index("--") + 1 :]


def test_it_is_nobody_and_takes_what_a_job_leaves(inventory: Inventory) -> None:
    words = shlex.split(module.command(inventory.chief, "/bucket/jobs", "x"))
    assert words[:7] == ["sudo", "-n", "/usr/lib/scaletier/root-helper", "sandbox", "reading", "800000000", "--"]


def test_the_command_reads_any_bucket_and_serves_the_host_alone(inventory: Inventory) -> None:
    env, fresh, python, dash_c, code, *flags = _program(inventory, "gs://b/jobs/it's", "job01")
    assert (env, python, dash_c) == ("env", PYTHON, "-c")
    assert fresh == 'FSSPEC_GS={"use_listings_cache": false}'
    assert _program(inventory, "/bucket/jobs", "x")[:2] == ["env", PYTHON]
    compile(code, "serve", "exec")
    assert flags == [
        *("--logdir", "gs://b/jobs/it's", "--window_title", "job01", "--host", "127.0.0.1", "--port", "0"),
        *("--reload_interval", "5", "--load_fast=false"),
    ]


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_what_runs_there_ends_with_whoever_started_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's place is taken by a module that runs until it is told to end."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").touch()
    serve = "def run_main():\n    print('up', flush=True)\n    import time\n    time.sleep(6000)\n"
    (tmp_path / "tensorboard" / "main.py").write_text(serve)
    code = module._SERVE.replace(f"{module._KEEPALIVE_TIMEOUT})", "0.5)")
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, **pipes) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            if how == "ended":
                process.stdin.close()
            assert process.wait(limit()) == -signal.SIGTERM
        finally:
            process.kill()


def test_what_runs_there_stays_for_as_long_as_somebody_says_something() -> None:
    """Watch with a select and an os of our own: nine words, each within the silence, then none."""
    waits, killed = list[int](), list[int]()

    def select(*asked: Any) -> tuple[list[int], list[int], list[int]]:
        waits.append(asked[3])
        return ([0] if len(waits) < 10 else []), [], []

    fakes = {
        "select": SimpleNamespace(select=select),
        "os": SimpleNamespace(
            read=lambda *_: b"\n", getpid=lambda: 7, kill=lambda pid, _: killed.append(pid), _exit=killed.append
        ),
        "signal": signal,
        "time": SimpleNamespace(sleep=lambda _: None),
    }
    exec("def watch" + module._SERVE.partition("def watch")[2].partition("threading.")[0], fakes)  # noqa: S102
    fakes["watch"]()  # type: ignore[operator]
    assert waits == [module._KEEPALIVE_TIMEOUT] * 10
    assert killed == [7, 1]


def test_the_port_is_what_tensorboard_says() -> None:
    said = b"\nTensorBoard 2.21.0 at http://127.0.0.1:43", b"210/ (Press CTRL+C to quit)\n"
    channel = FakeChannel(None, *said)
    assert module._Server("master-0", channel).await_port() == 43210
    assert channel.sent, "the host is told that somebody is here"


def test_an_end_is_an_error_with_its_last_line() -> None:
    host = module._Server("master-0", FakeChannel(b"Traceback\nModuleNotFoundError: No module named 'tensorboard'\n"))
    with pytest.raises(HostError, match=r"^master-0 has ended TensorBoard: ModuleNotFoundError: No module named"):
        host.await_port()
    with pytest.raises(HostError, match="has ended TensorBoard: late"):
        module._Server("master-0", FakeChannel(None, b"late\n", None)).await_end()


@pytest.mark.parametrize(
    ("channel", "says"),
    [
        (FakeChannel(b"TensorBoard 2.21.0 at", exited=-1), "broke off"),
        (FakeChannel(exited=-1, error=ConnectionResetError("reset by peer"), connected=True), "broke off: reset by peer"),
        (FakeChannel(exited=-1, error=EOFError()), "broke off: EOFError"),
        (FakeChannel(exited=-1, connected=True), "has killed TensorBoard, as when memory is short"),
    ],
)
def test_an_end_without_an_exit_code_tells_a_lost_connection_from_a_killed_command(channel: FakeChannel, says: str) -> None:
    with pytest.raises(HostError, match=f"^master-0 {says}$"):
        module._Server("master-0", channel).await_end()


class FakeFleet:
    """One connection after the other, each with one of these channels; then the host does not answer."""

    def __init__(self, *channels: FakeChannel) -> None:
        self.channels = list(channels)

    def connection(self, name: str) -> SimpleNamespace:
        if not self.channels:
            raise HostError(name, "does not answer")
        channel = self.channels.pop(0)
        return SimpleNamespace(create_session=lambda: channel, transport=channel.transport)


def _shown(cluster: ClusterClient, *channels: FakeChannel) -> str:
    """Return the last output of `fab tensorboard --all`."""
    fleet: Any = FakeFleet(*channels)
    with pytest.raises(HostError) as caught:
        module.tensorboard(ClusterClient(cluster.inventory, fleet), None, every_job=True, port=None)
    return str(caught.value)


def _serves(port: int, **how: Any) -> FakeChannel:
    return FakeChannel(b"TensorBoard 2.21.0 at http://127.0.0.1:%d/ (Press CTRL+C to quit)\n" % port, **how)


def test_after_a_connection_that_broke_off_it_begins_again_behind_the_same_port(
    cluster: ClusterClient, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = EOFError("reset")
    channels = [_serves(1001, exited=-1, error=lost), _serves(1002, exited=-1, error=lost)]
    assert _shown(cluster, *channels) == "master-0 does not answer"
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1, "one URL"
    assert said.err.count("master-0 broke off: reset; starting TensorBoard again") == 2


@pytest.mark.parametrize(
    ("channels", "says"),
    [
        ([FakeChannel(exited=-1, error=EOFError()), _serves(1)], "master-0 broke off: EOFError"),
        (
            [_serves(1, exited=-1, error=EOFError()), FakeChannel(exited=-1, error=EOFError("refused")), _serves(1)],
            "master-0 broke off: refused",
        ),
        ([_serves(1, exited=-1, connected=True), _serves(1)], "master-0 has killed TensorBoard, as when memory is short"),
        ([_serves(1, exited=0), _serves(1)], "master-0 has ended TensorBoard: TensorBoard 2.21.0 at "),
    ],
    ids=["broke off before it served", "and before it served again", "killed", "ended by itself"],
)
def test_what_else_ends_it_is_told(cluster: ClusterClient, channels: list[FakeChannel], says: str) -> None:
    assert _shown(cluster, *channels).startswith(says)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", ""])
def test_a_port_that_is_none(cluster: ClusterClient, port: str) -> None:
    with pytest.raises(UsageError, match="is no port; valid are 1 to 65535"):
        module.tensorboard(cluster, None, every_job=False, port=port)


def test_which_job_is_shown(cluster: ClusterClient) -> None:
    ledger = cluster.ledger
    with pytest.raises(UsageError, match="no job has run on this cluster yet"):
        module._logdir(cluster, None)
    for job in ("old", "new"):
        put_job(ledger, JobRecord(job, state=JobState.RUNNING))
    with pytest.raises(UsageError, match=r"there is no job 'other'; fab jobs lists"):
        module._logdir(cluster, "other")
    why = r"^job old \(RUNNING\) has no summaries in /bucket/jobs/old/output, try again in a moment$"
    with pytest.raises(OpsError, match=why):
        module._logdir(cluster, "old")
    cluster.bucket.upload("jobs/old/output/summaries/events.out.tfevents.1.v2", b"")
    assert module._logdir(cluster, "old") == ("/bucket/jobs/old/output", "old")
    ledger.change_queue(lambda queue: queue.added(QueueEntry("old", ["master-0"])))
    assert module._logdir(cluster, None) == ("/bucket/jobs/old/output", "old")


class FakeTransport:
    """A fake SSH transport with one service on its host: it answers with its input, twice, at its end."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def open_channel(self, kind: str, dest: tuple[str, int], peer: tuple[str, int], timeout: float) -> socket.socket:
        self.asked.append((kind, dest))
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs:
                got = b"".join(iter(lambda: theirs.recv(1000), b""))
                theirs.sendall(got * 2)

        threading.Thread(target=serve, daemon=True).start()
        return ours


def listening(ports: list[int]) -> Callable[[FakeTransport], Forward]:
    return lambda transport: Forward(transport, "127.0.0.1", ports)  # type: ignore[arg-type]


def test_connections_are_carried_side_by_side_to_their_ends() -> None:
    transport = FakeTransport()
    with listening([0])(transport) as forward:
        forward.port_there = 6006
        pairs = [socket.socketpair() for _ in range(20)]
        threads = [threading.Thread(target=forward.carry, args=(there, ("127.0.0.1", 1))) for _, there in pairs]
        for thread in threads:
            thread.start()
        for number, (here, _) in enumerate(pairs):
            here.sendall(bytes([number]) * 100_000)
            here.shutdown(socket.SHUT_WR)
        for number, (here, _) in enumerate(pairs):
            assert b"".join(iter(lambda here=here: here.recv(65536), b"")) == bytes([number]) * 200_000
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    assert transport.asked == [("direct-tcpip", ("127.0.0.1", 6006))] * 20


def test_the_next_free_port_is_taken_and_else_it_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"^port {port} is taken on this machine: give another --port$"):
            listening([port])(FakeTransport())
        with listening([port, 0])(FakeTransport()) as forward:
            assert forward.port not in (0, port)
