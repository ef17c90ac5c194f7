"""Check hosts by SSH, through a ProxyCommand to a fake server: only the stack's key and known hosts are used."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from fabric import Config
from opsdata import inventory_json, put_job, put_log
from waiting import limit, until

from hosts.agent.lines import OutputLine
from hosts.agent.log import Log
from infra.inventory import Inventory
from jobs.bucket import BucketError, Conflict
from jobs.chunks import LogFilter
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster import remote, shell
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.cluster.remote import Fleet
from ops.errors import HostError, OpsError, SeveralHostsError, UsageError
from ops.logs import lines
from ops.logs.follow import Follower, Note
from ops.logs.read import read_logs

SERVER = Path(__file__).with_name("fakehost.py")


def make_key(path: Path) -> str:
    """Write the private half of a key pair, and return the public half."""
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inventory]:
    """Return a stack whose hosts all answer through a ProxyCommand, except evaluator-0."""
    # A fake host is a whole Python process, and several start at once: a busy machine needs more time.
    for name in ("CONNECT_SECONDS", "SSHD_SECONDS"):
        monkeypatch.setattr(remote, name, limit())
    make_key(tmp_path / "id_ed25519")
    host_key = make_key(tmp_path / "host_key")
    inventory = parse(inventory_json(operatorBucket=f"file://{tmp_path}/bucket"), tmp_path)
    (tmp_path / "bucket").mkdir()
    serve = f"ProxyCommand {sys.executable} {SERVER} {tmp_path}/host_key {tmp_path}/id_ed25519"
    entries = [f"Host {h.name}\n  HostName {h.address}\n  {serve}\n" for h in inventory.hosts[:-1]]
    entries.append("Host evaluator-0\n  HostName 10.0.0.96\n  ProxyCommand false\n")
    common = f"Host *\n  User scaletier\n  IdentityFile {tmp_path}/id_ed25519\n"
    (tmp_path / "ssh_config").write_text("".join(entries) + common)
    (tmp_path / "known_hosts").write_text("".join(f"{host.address} {host_key}\n" for host in inventory.hosts))
    yield inventory
    for thread in threading.enumerate():
        if thread.name in inventory.names:  # it still connects to a host that another one outran, whose files would be gone
            thread.join(limit())


@pytest.fixture
def fleet(cluster: Inventory) -> Iterator[Fleet]:
    fleet = Fleet(cluster)
    yield fleet
    fleet.close()


def test_a_command_returns_output_and_exit_code(fleet: Fleet) -> None:
    result = fleet.run("master-0", "cat; echo out; echo err >&2; exit 3", b"in\n" * 100_000)
    assert (result.exit_code, result.output) == (3, "in\n" * 100_000 + "out\nerr\n")
    assert fleet.check_output("master-0", "echo 'a  b'", "failed") == "a  b\n"
    with pytest.raises(HostError, match=r"^master-0 could not stop, it ended with exit code 1: no such unit$"):
        fleet.check_output("master-0", "echo no such unit; exit 1", "could not stop, it ended")
    message = (
        r"^master-0 keeps its log with exit code 1; it is not ready, or older than this scaletier \(pulumi up\): sudo: a pass"
    )
    with pytest.raises(HostError, match=message):
        fleet.check_output("master-0", "echo sudo: a password is required; exit 1", "keeps its log")
    with pytest.raises(HostError, match=r"^master-0 keeps its log with exit code 1: disk full$"):
        fleet.check_output("master-0", "echo sudo: a warning; echo disk full; exit 1", "keeps its log")


def test_large_input_may_stay_unread(fleet: Fleet) -> None:
    assert fleet.run("master-0", "exit 5", b"x" * 5_000_000).exit_code == 5
    byte_counts = list[int]()
    assert fleet.run("master-0", "cat", (b"one ", b"two"), byte_counts.append).output == "one two"
    assert byte_counts == [4, 3]
    byte_counts.clear()
    assert fleet.run("master-0", "wc -c", b"x" * 600_000, byte_counts.append).output.strip() == "600000"
    assert byte_counts == [262_144, 262_144, 75_712]


def test_several_hosts_run_at_once_and_each_failure_is_named(fleet: Fleet) -> None:
    outcome = fleet.each(fleet.inventory.names, lambda name: fleet.run(name, f"echo {name}").output, limit())
    assert list(map(str, outcome.failures.values())) == ["evaluator-0 (10.0.0.96) does not answer"]
    assert outcome.results == {name: f"{name}\n" for name in ("ps-0", "master-0", "worker-0", "worker-1")}
    connected = fleet.connect_each(fleet.inventory.names)
    assert (list(connected.results), list(connected.failures)) == (list(fleet.inventory.names[:-1]), ["evaluator-0"])


def test_a_new_connection_changes_no_config_of_another(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    other, merge, merged = fleet._new("ps-0"), Config.merge, []

    def empty_and_merge(config: Config) -> None:
        config._set(_config={})
        merged.append(other.authentication.strategy_class)
        merge(config)

    monkeypatch.setattr(Config, "merge", empty_and_merge)
    fleet._new("master-0")
    assert merged, "Fabric merges a connection's config once it is made: if no longer, this test has no reason"


def test_this_machines_name_is_not_looked_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("a slow resolver takes seconds for it"))
    assert fleet._new("ps-0").connect_kwargs["pkey"]


def test_a_broken_connection_is_opened_again(fleet: Fleet) -> None:
    fleet.run("ps-0", "true")
    first = fleet.connection("ps-0")
    assert fleet.connection("ps-0") is fleet.any_connection() is first
    with pytest.raises(HostError, match=r"ps-0 \(10.0.0.32\) broke off"):
        fleet.check_output("ps-0", "vanish", "x")
    assert "ps-0" not in fleet._open
    assert fleet.run("ps-0", "echo back").output == "back\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "known_hosts",
            "10.0.0.32 ",
            "10.0.0.99 ",
            r"^ps-0 \(10.0.0.32\) has a host key that is not recorded here: run fab con",
        ),
        ("known_hosts", "10.0.0.32 .*", "10.0.0.32 {other}", r"has another host key than is recorded here: .* fab connect"),
        ("ssh_config", "IdentityFile (.*)/id_ed25519", r"IdentityFile \1/host_key", "refuses the stack's key"),
    ],
)
def test_unknown_keys_are_refused(cluster: Inventory, name: str, old: str, new: str, message: str) -> None:
    file, other = cluster.folder / name, make_key(cluster.folder / "other")
    file.write_text(re.sub(old, new.replace("{other}", other), file.read_text(), flags=re.MULTILINE))
    with pytest.raises(HostError, match=message):
        Fleet(cluster).run("ps-0", "true")


@pytest.mark.parametrize("name", ["ssh_config", "known_hosts", "id_ed25519"])
def test_a_missing_file_of_the_stack_asks_for_pulumi_up(cluster: Inventory, name: str) -> None:
    (cluster.folder / name).unlink()
    with pytest.raises(UsageError, match=rf"{name} (is missing|cannot be read \(.*\)): run pulumi up$"):
        Fleet(cluster).run("ps-0", "true")


def test_threads_that_open_a_cluster_share_its_connections(cluster: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets, another = list[Fleet](), threading.Event()

    class SlowFleet(Fleet):
        def __init__(self, inventory: Inventory) -> None:
            fleets.append(self)
            another.wait(0.1)  # another thread would open one meanwhile
            super().__init__(inventory)

    monkeypatch.setattr("ops.cluster.cluster.Fleet", SlowFleet)
    monkeypatch.setattr(cached_property, "__get__", _get_without_a_lock)
    client = ClusterClient(cluster)
    for thread in (threads := [threading.Thread(target=lambda: client.fleet) for _ in range(2)]):
        thread.start()
    for thread in threads:
        thread.join(limit())
    assert fleets == [client.fleet]


def _get_without_a_lock(self: Any, instance: Any, owner: Any = None) -> Any:
    """Do as cached_property does since Python 3.12."""
    cache = instance.__dict__
    if self.attrname not in cache:
        cache[self.attrname] = self.func(instance)
    return cache[self.attrname]


def test_any_host_can_serve_the_bucket(cluster: Inventory) -> None:
    config = cluster.folder / "ssh_config"
    config.write_text("Host master-0\n  HostName 10.0.0.2\n  ProxyCommand false\n" + config.read_text())
    others = set(cluster.names) - {"master-0", "evaluator-0"}  # one is broken, the other does not answer
    assert Fleet(cluster).any_connection().original_host in others


def test_a_job_is_followed_to_its_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fleet.inventory.folder
    monkeypatch.setattr(lines, "LOG_DIR", str(folder))
    ledger = Ledger(open_bucket(fleet.inventory.operator_bucket))
    record = JobRecord("job01", hosts=list(fleet.inventory.replicas)).to(JobState.PREPARING)
    put_job(ledger, record)
    log_lines = [lines.LogLine(f"2026-01-31T12:00:0{n}.000Z", "INFO", "ps-0", str(n)) for n in range(4)]
    put_log(folder / "job01", log_lines[:3])
    events: list[object] = []
    for event in Follower(fleet, ledger, record, ["ps-0", "evaluator-0"], LogFilter(2)).events():
        events.append(event.state if isinstance(event, JobRecord) else event)
        if event == log_lines[2]:
            put_log(folder / "job01", log_lines[3:])
            ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.EXITED, exitCode=0), None)
            put_job(ledger, record.to(JobState.SUCCEEDED))
    notes = [event for event in events if isinstance(event, Note)]
    assert [event for event in events if isinstance(event, lines.LogLine)] == log_lines[1:]
    assert [note.text for note in notes] == [
        "evaluator-0 (10.0.0.96) does not answer; trying again",
        "evaluator-0: not all of its lines were shown; fab logs evaluator-0 --job job01 tries again",
    ]
    assert [event for event in events if isinstance(event, str)] == ["PREPARING", "SUCCEEDED", "SUCCEEDED"]


def test_a_follower_reads_the_record_after_a_log_line_about_the_job(
    cluster: Inventory, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LOG_DIR", str(tmp_path))
    monkeypatch.setattr("ops.logs.follow._POLL_SECONDS", 1e6)
    ledger = Ledger(FolderBucket(tmp_path / "bucket"))
    record = JobRecord("job01", hosts=list(cluster.replicas)).to(JobState.PREPARING).to(JobState.RUNNING)
    put_job(ledger, record)
    put_log(tmp_path / "job01", [lines.LogLine("2026-01-31T12:00:00.000Z", "INFO", "ps-0", "at work")])
    for event in Follower(fleet, ledger, record, ["ps-0"], LogFilter()).events():
        if isinstance(event, lines.LogLine) and event.message == "at work":
            ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.EXITED, exitCode=0), None)
            put_job(ledger, record.to(JobState.SUCCEEDED))
            put_log(tmp_path / "job01", [lines.LogLine("2026-01-31T12:00:01.000Z", "INFO", "ps-0", "job SUCCEEDED")])


def test_a_broken_connection_neither_loses_nor_repeats_lines(
    cluster: Inventory, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write equal lines with equal times while connections are cut; in the end all of them are shown once."""
    monkeypatch.setattr(lines, "LOG_DIR", str(tmp_path))
    monkeypatch.setattr("ops.logs.follow._RETRY_SECONDS", 0.05)
    monkeypatch.setattr("hosts.agent.log.CHUNK_BYTES", 20_000)
    ledger = Ledger(FolderBucket(tmp_path / "bucket"))
    record = JobRecord("job01", hosts=list(cluster.replicas)).to(JobState.PREPARING).to(JobState.RUNNING)
    put_job(ledger, record)
    log = Log(tmp_path, "job01", "ps-0")
    log.write_message("first")

    def write() -> None:
        for n in range(4000):
            log.write([OutputLine(1769860800.0, "INFO", text) for text in ("equal", "equal", str(n))])
            if n % 800 == 799:
                until(lambda: fleet._open["ps-0"].is_connected)
                fleet._open["ps-0"].transport.close()
        ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.EXITED, exitCode=0), None)
        put_job(ledger, record.to(JobState.SUCCEEDED))

    messages, notes = [], []
    for event in Follower(fleet, ledger, record, ["ps-0"], LogFilter()).events():
        if isinstance(event, lines.LogLine):
            if event.message == "first":
                threading.Thread(target=write, daemon=True).start()
            messages.append(event.message)
        elif isinstance(event, Note):
            notes.append(event.text)
    assert messages[1:] == [text for n in range(4000) for text in ("equal", "equal", str(n))]
    assert [note for note in notes if "broke off" in note]


@pytest.mark.parametrize("error", [EOFError(), OSError("Socket is closed"), paramiko.SSHException("gone")])
def test_each_connection_error_is_one_error(error: Exception) -> None:
    class Broken:
        """A channel that fails in each of its calls but the first."""

        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                if name != "exec_command":
                    raise error

            return call

    class Connection:
        class transport:  # noqa: N801
            @staticmethod
            def open_session(window_size: int) -> Broken:
                assert window_size <= 1 << 20
                return Broken()

    stream = remote.Stream("ps-0", Connection, "true")
    with pytest.raises(HostError, match=f"ps-0 broke off: {str(error) or 'EOFError'}"):
        next(stream.pieces())
    stream.finish()
    stream.close()


def test_only_the_stack_s_own_settings_count(cluster: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home := tmp_path / "home").mkdir()
    (home / ".fabric.yaml").write_text("port: 99\nforward_agent: true\nconnect_kwargs: {password: x}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FABRIC_PORT", "98")
    fleet = Fleet(cluster)
    connection = fleet._new("ps-0")
    kwargs = dict(connection.connect_kwargs)
    assert kwargs.pop("pkey") is fleet._load_key(tmp_path / "gone"), "it is read once"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert kwargs.pop("transport_factory")(ours).handshake_timeout == remote.SSHD_SECONDS
    limits = dict.fromkeys(("auth_timeout", "banner_timeout"), remote.SSHD_SECONDS)
    assert kwargs == {"look_for_keys": False, "allow_agent": False, **limits}
    assert (connection.host, connection.port, connection.user) == ("10.0.0.32", 22, "scaletier")
    assert (connection.forward_agent, connection.connect_timeout) == (False, int(remote.CONNECT_SECONDS))
    assert isinstance(connection.client._policy, paramiko.RejectPolicy)
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("paramiko").handlers)


def test_a_proxy_has_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[list[str], bool]]()

    def popen(argv: list[str], stdin: int, stdout: int, start_new_session: bool) -> None:
        assert stdin == stdout
        started.append((argv, start_new_session))

    monkeypatch.setattr(remote.subprocess, "Popen", popen)
    with remote._Connection("x", gateway="tunnel x").open_gateway() as ours:
        assert started == [(["/bin/sh", "-c", "exec tunnel x"], True)]
        assert ours.recv(1) == b"", "only the proxy has the other end"
    opened = list[str]()
    transport = SimpleNamespace(open_channel=lambda **kwargs: kwargs)
    jump = SimpleNamespace(open=lambda: opened.append("open"), transport=transport)
    channel = remote._Connection("x", gateway=jump).open_gateway()
    assert (opened, channel["dest_addr"]) == (["open"], ("x", 22))


def test_a_command_s_stderr_is_part_of_its_output(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, pieces = list[tuple[object, ...]](), [b"one ", b"tw\xff"]

    class Channel(contextlib.nullcontext[None]):
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: calls.append((name, *arguments))

        def recv(self, size: int) -> bytes:
            return pieces.pop(0) if pieces else b""

        def recv_exit_status(self) -> int:
            return 3

    monkeypatch.setattr(fleet, "connection", lambda _: SimpleNamespace(create_session=Channel))
    assert fleet.run("ps-0", "cat", b"in") == remote.CommandResult("ps-0", 3, "one tw\ufffd")
    assert calls == [("set_combine_stderr", True), ("exec_command", "cat"), ("sendall", b"in"), ("shutdown_write",)]


class Connection:
    """A connection that cannot be opened."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def open(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (paramiko.SSHException("Error reading SSH protocol banner"), "(10.0.0.32) does not answer"),
        (paramiko.SSHException("weird"), "(10.0.0.32) does not answer as an SSH server does: weird"),
        (EOFError(), "(10.0.0.32) does not answer"),
        (TimeoutError("timed out"), "(10.0.0.32) does not answer"),
    ],
)
def test_a_host_that_does_not_answer_is_one_line(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(fleet, "_new", lambda _: Connection(error))
    with pytest.raises(HostError) as caught:
        fleet.connection("ps-0")
    assert caught.value.why == message


def test_callers_at_once_share_one_attempt(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second caller come while the first one connects; a later caller tries again."""
    attempts, callers, errors = list[str](), list[threading.Thread](), list[str]()

    def call() -> None:
        with pytest.raises(HostError) as caught:
            fleet.connection("ps-0")
        errors.append(str(caught.value))

    def new(name: str) -> Connection:
        attempts.append(name)
        return Connection(OSError())

    def connect(name: str, connection: Connection) -> None:
        if len(callers) == 1:
            callers.append(threading.Thread(target=call))
            callers[1].start()
            until(lambda: len(reads) == 3)  # the first caller's two, and the second's before it waits
        raise HostError(name, f"attempt {len(attempts)}")

    class Failures(dict[str, HostError]):
        def get(self, name: str, default: Any = None) -> Any:
            reads.append(name)
            return super().get(name, default)

    reads: list[str] = []
    fleet._failed = Failures()
    monkeypatch.setattr(fleet, "_new", new)
    monkeypatch.setattr(fleet, "_connect", connect)
    callers.append(threading.Thread(target=call))
    callers[0].start()
    until(lambda: len(errors) == 2)
    call()
    assert errors == ["ps-0 attempt 1", "ps-0 attempt 1", "ps-0 attempt 2"]


class Socket:
    """A socket that records its options."""

    def __init__(self, family: socket.AddressFamily) -> None:
        self.family, self.options = family, list[tuple[int, ...]]()

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)


NODELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (socket.AF_INET, [NODELAY, (socket.IPPROTO_TCP, 18, 30_000)]),
        (socket.AF_INET6, [NODELAY, (socket.IPPROTO_TCP, 18, 30_000)]),
        (socket.AF_UNIX, []),
    ],
)
def test_a_silent_connection_ends_by_itself_and_small_messages_go_at_once(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, options: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(socket, "TCP_USER_TIMEOUT", 18, raising=False)
    keepalives = list[int]()
    transport: Any = SimpleNamespace(set_keepalive=keepalives.append, sock=Socket(family))
    remote._set_socket_options(transport)
    assert (keepalives, transport.sock.options) == ([10], options)
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")  # as on macOS
    transport.sock.options.clear()
    remote._set_socket_options(transport)
    assert transport.sock.options == options[:1]


@pytest.mark.parametrize(
    ("error", "active", "reason"),
    [
        (None, True, "reports that the command was killed, as when memory is short"),
        (None, False, "broke off"),
        (EOFError(), True, "broke off: EOFError"),
        (OSError("reset"), False, "broke off: reset"),
    ],
)
def test_a_stream_without_an_exit_code_has_a_reason(error: Exception | None, active: bool, reason: str) -> None:
    pieces = [b"one", b"two", b""]
    ready = [True]
    channel = SimpleNamespace(
        exec_command=lambda _: None,
        recv=lambda _: pieces.pop(0),
        recv_exit_status=lambda: exit_code,
        recv_stderr_ready=lambda: ready[0],
        recv_stderr=lambda _: b"caf\xc3\xa9 \xff",
        get_transport=lambda: SimpleNamespace(saved_exception=error, is_active=lambda: active),
    )
    connection = SimpleNamespace(transport=SimpleNamespace(open_session=lambda window_size: channel))
    stream, exit_code = remote.Stream("ps-0", connection, "true"), -1
    with pytest.raises(HostError) as caught:
        list(stream.pieces())
    assert str(caught.value) == f"ps-0 {reason}"
    assert stream.stderr == "café \ufffd"
    ready[0], exit_code = False, 0
    pieces[:] = [b"one", b""]
    assert (list(stream.pieces()), stream.stderr, stream.exit_code) == ([b"one"], "", 0)


def test_logs_of_a_broken_host_continue_from_the_bucket(
    cluster: Inventory, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "LOG_DIR", str(tmp_path / "host"))
    record = JobRecord("job01", JobState.SUCCEEDED, hosts=["ps-0", "evaluator-0"])
    bucket = tmp_path / "bucket"
    times = [f"2026-01-31T12:00:{n // 1000:02}.{n % 1000:03}Z" for n in range(9000)]
    log_lines = [lines.LogLine(time, "INFO", "ps-0", f"{n} {'x' * 200}") for n, time in enumerate(times)]
    put_log(tmp_path / "host" / "job01", log_lines)
    put_log(bucket / "jobs/job01/logs/ps-0", log_lines)
    put_log(bucket / "jobs/job01/logs/evaluator-0", log_lines[:1])
    client = ClusterClient(replace(cluster, operator_bucket=str(bucket)), fleet)
    logs = read_logs(client, record, ["ps-0", "evaluator-0"], LogFilter())
    assert list(logs["evaluator-0"]) == log_lines[:1]
    ps_lines = logs["ps-0"]
    first = [next(ps_lines) for _ in range(5)]
    fleet._open["ps-0"].transport.close()
    assert [*first, *ps_lines] == log_lines
    notes = capsys.readouterr().err
    assert "evaluator-0 (10.0.0.96) does not answer; its lines are from the bucket's copy" in notes
    # paramiko reports an abrupt end in one of two ways.
    assert re.search(r"^ps-0 broke off(: EOFError)?; the rest of its lines is from the bucket's copy$", notes, re.MULTILINE)
    last = read_logs(client, record, ["ps-0"], LogFilter(3, pattern="x+"))["ps-0"]
    assert list(last) == log_lines[-3:]
    with pytest.raises(UsageError, match=r"--grep '\(x\+\)\+y' takes longer than 1 s on one line"):
        list(read_logs(client, record, ["ps-0"], LogFilter(3, pattern="(x+)+y"))["ps-0"])


def test_records_in_a_bucket_by_sftp(cluster: Inventory, fleet: Fleet) -> None:
    folder = cluster.folder / "bucket"
    client = ClusterClient(replace(cluster, operator_bucket=f"sftp://{folder}"), fleet)
    ledger = client.ledger
    put_job(ledger, JobRecord("job01", labels={"é": "\udcff"}))
    before = ledger.job("job01")
    assert before is not None
    assert Ledger(FolderBucket(folder)).job("job01") == before, "the same as if it was written there"
    preparing = client.ledger.change_job(before, before.record.to(JobState.PREPARING))
    with pytest.raises(Conflict):
        ledger.change_job(before, before.record)
    assert [job.state for job in ledger.jobs()[0]] == ["PREPARING"]
    for name in fleet.inventory.names[:-1]:  # also the host of the channel breaks
        with pytest.raises(HostError):
            fleet.check_output(name, "vanish", "x")
    ledger.change_job(preparing, preparing.record.to(JobState.RUNNING))
    assert [job.state for job in ledger.jobs()[0]] == ["RUNNING"]
    (folder / "jobs/job01/job.json").write_bytes(b"{")
    assert ledger.jobs()[0] == []
    folder.rename(folder.with_name("gone"))
    with pytest.raises(BucketError, match=f"{folder} is not there"):
        ledger.jobs()


def test_records_need_a_reachable_host(cluster: Inventory) -> None:
    config = cluster.folder / "ssh_config"
    config.write_text("Host *\n  ProxyCommand false\n" + config.read_text())
    with pytest.raises(
        SeveralHostsError, match=r"^master-0 \(10.0.0.2\) does not answer: no other host can be reached either; run pulumi up"
    ):
        ClusterClient(replace(cluster, operator_bucket="sftp:///bucket"), Fleet(cluster)).ledger.jobs()


def test_the_shell_command(inventory: Inventory) -> None:
    ssh = ["ssh", "-F", f"{inventory.folder}/ssh_config", "-l", "admin", "worker-1"]
    assert shell.argv(inventory, "worker-replica-1") == ssh
    assert shell.argv(inventory, "worker-1", ["echo", "a  b", "$HOME"]) == [*ssh, "--", "echo 'a  b' '$HOME'"]
    assert shell.argv(inventory, "worker-1", ["cd /tmp; ls"]) == [*ssh, "--", "cd /tmp; ls"]


def test_the_shell_replaces_this_process(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, list[str]]]()
    monkeypatch.setattr("os.execvp", lambda program, argv: calls.append((program, argv)))
    shell.shell(inventory, None)
    shell.shell(inventory, "worker-1", ["df", "-h"])
    argvs = (shell.argv(inventory, "master-0"), shell.argv(inventory, "worker-1", ["df", "-h"]))
    assert calls == [("ssh", argv) for argv in argvs]

    def fail(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("os.execvp", fail)
    with pytest.raises(OpsError, match=r"^there is no ssh on this machine: install openssh-client$"):
        shell.shell(inventory, None)
