"""Hosts by SSH, with a server that is a ProxyCommand: with only the stack's key and known hosts."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from opsdata import inventory_json, put_job, put_log
from replicahosts import until
from waiting import limit

from hosts.agent.lines import OutputLine as SaidLine
from hosts.agent.log import Log
from infra.inventory import Inventory
from jobs.bucket import BucketError, Conflict
from jobs.chunks import LogFilter
from jobs.folder import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster import remote, shell
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.cluster.remote import Fleet
from ops.errors import HostError, HostsError, UsageError
from ops.logs import lines
from ops.logs.follow import Follower, Note
from ops.logs.read import read_logs

SERVER = Path(__file__).with_name("fakehost.py")


def new_key(path: Path) -> str:
    """Write the private half of a key pair, and return the public half."""
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """Return a stack of which every host but evaluator-0 answers through a ProxyCommand."""
    # A fake host is a whole Python, and several start at once: a busy machine needs its time.
    for name in ("CONNECT_SECONDS", "SSHD_SECONDS"):
        monkeypatch.setattr(remote, name, limit())
    new_key(tmp_path / "id_ed25519")
    host_key = new_key(tmp_path / "host_key")
    inventory = parse(inventory_json(operatorBucket=f"file://{tmp_path}/bucket"), tmp_path)
    (tmp_path / "bucket").mkdir()
    serve = f"ProxyCommand {sys.executable} {SERVER} {tmp_path}/host_key {tmp_path}/id_ed25519"
    entries = [f"Host {h.name}\n  HostName {h.address}\n  {serve}\n" for h in inventory.hosts[:-1]]
    entries.append("Host evaluator-0\n  HostName 10.0.0.96\n  ProxyCommand false\n")
    common = f"Host *\n  User scaletier\n  IdentityFile {tmp_path}/id_ed25519\n"
    (tmp_path / "ssh_config").write_text("".join(entries) + common)
    (tmp_path / "known_hosts").write_text("".join(f"{host.address} {host_key}\n" for host in inventory.hosts))
    return inventory


@pytest.fixture
def fleet(cluster: Inventory) -> Iterator[Fleet]:
    fleet = Fleet(cluster)
    yield fleet
    fleet.close()


def test_a_command_and_its_exit_code(fleet: Fleet) -> None:
    ran = fleet.run("master-0", "cat; echo out; echo err >&2; exit 3", b"in\n" * 100_000)
    assert (ran.exit_code, ran.output) == (3, "in\n" * 100_000 + "out\nerr\n")
    assert fleet.must("master-0", "echo 'a  b'", "failed") == "a  b\n"
    with pytest.raises(HostError, match=r"^master-0 could not stop, it ended with exit code 1: no such unit$"):
        fleet.must("master-0", "echo no such unit; exit 1", "could not stop, it ended")
    older = (
        r"^master-0 keeps its log with exit code 1; it is not ready, or older than this scaletier \(pulumi up\): sudo: a pass"
    )
    with pytest.raises(HostError, match=older):
        fleet.must("master-0", "echo sudo: a password is required; exit 1", "keeps its log")


def test_a_command_that_reads_nothing_of_much(fleet: Fleet) -> None:
    assert fleet.run("master-0", "exit 5", b"x" * 5_000_000).exit_code == 5
    pieces = list[int]()
    assert fleet.run("master-0", "cat", (b"one ", b"two"), pieces.append).output == "one two"
    assert pieces == [4, 3]


def test_several_at_once_and_each_failure_named(fleet: Fleet) -> None:
    outcome = fleet.each(fleet.inventory.names, lambda name: fleet.run(name, f"echo {name}").output, limit())
    assert outcome.results == {name: f"{name}\n" for name in ("ps-0", "master-0", "worker-0", "worker-1")}
    assert str(outcome.failures["evaluator-0"]).startswith("evaluator-0 (10.0.0.96) does not answer")
    connected = fleet.connect_each(fleet.inventory.names)
    assert (list(connected.results), list(connected.failures)) == (list(fleet.inventory.names[:-1]), ["evaluator-0"])


def test_a_host_that_vanishes_and_comes_back(fleet: Fleet) -> None:
    fleet.run("ps-0", "true")
    with pytest.raises(HostError, match=r"ps-0 \(10.0.0.32\) broke off"):
        fleet.must("ps-0", "vanish", "x")
    assert fleet.run("ps-0", "echo back").output == "back\n"


def changed(folder: Path, change: Callable[[str], str]) -> None:
    known = folder / "known_hosts"
    known.write_text(change(known.read_text()))


def test_a_host_key_is_never_accepted_blindly(cluster: Inventory) -> None:
    changed(cluster.folder, lambda _: "")
    with pytest.raises(HostError, match=r"ps-0 \(10.0.0.32\) has a host key that is not recorded here: run fab connect"):
        Fleet(cluster).run("ps-0", "true")


def test_another_host_key_is_refused(cluster: Inventory) -> None:
    other = new_key(cluster.folder / "other")
    changed(cluster.folder, lambda _: f"10.0.0.32 {other}\n")
    with pytest.raises(HostError, match=r"has another host key than is recorded here: .* fab connect"):
        Fleet(cluster).run("ps-0", "true")


def test_a_key_that_the_host_does_not_know(cluster: Inventory) -> None:
    folder = cluster.folder
    (folder / "ssh_config").write_text(
        (folder / "ssh_config").read_text().replace(f"IdentityFile {folder}/id_ed25519", f"IdentityFile {folder}/host_key")
    )
    with pytest.raises(HostError, match="refuses the stack's key"):
        Fleet(cluster).run("ps-0", "true")


@pytest.mark.parametrize("name", ["ssh_config", "known_hosts", "id_ed25519"])
def test_a_file_of_the_stack_that_is_gone(cluster: Inventory, name: str) -> None:
    (cluster.folder / name).unlink()
    with pytest.raises(UsageError, match="run pulumi up"):
        Fleet(cluster).run("ps-0", "true")


def test_any_host_will_do_for_the_bucket(cluster: Inventory) -> None:
    config = cluster.folder / "ssh_config"
    config.write_text("Host master-0\n  HostName 10.0.0.2\n  ProxyCommand false\n" + config.read_text())
    others = set(cluster.names) - {"master-0", "evaluator-0"}  # the one is broken, the other is not there
    assert Fleet(cluster).any_connection().original_host in others


def test_following_a_job_to_its_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fleet.inventory.folder
    monkeypatch.setattr(lines, "LOG_DIR", str(folder))
    ledger = Ledger(open_bucket(fleet.inventory.operator_bucket))
    record = JobRecord("job01", hosts=list(fleet.inventory.replicas)).to(JobState.PREPARING)
    put_job(ledger, record)
    there = [lines.LogLine(f"2026-01-31T12:00:0{n}.000Z", "INFO", "ps-0", str(n)) for n in range(4)]
    put_log(folder / "job01", there[:3])
    seen: list[object] = []
    for event in Follower(fleet, ledger, record, ["ps-0", "evaluator-0"], LogFilter(2)).events():
        seen.append(event.state if isinstance(event, JobRecord) else event)
        if event == there[2]:
            put_log(folder / "job01", there[3:])
            ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.EXITED, exitCode=0), None)
            put_job(ledger, record.to(JobState.SUCCEEDED))
    notes = [event for event in seen if isinstance(event, Note)]
    assert [event for event in seen if isinstance(event, lines.LogLine)] == there[1:]
    assert [note.text for note in notes] == [
        "evaluator-0 (10.0.0.96) does not answer; trying again",
        "evaluator-0: not all of its lines were shown; fab logs evaluator-0 --job job01 looks again",
    ]
    assert [event for event in seen if isinstance(event, str)] == ["PREPARING", "SUCCEEDED", "SUCCEEDED"]


def test_who_follows_looks_at_the_record_when_the_log_says_that_it_changed(
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


def test_a_connection_that_breaks_loses_no_line_and_brings_none_twice(
    cluster: Inventory, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal lines at one moment, written on and on while connections are cut; at the end all of it is there."""
    monkeypatch.setattr(lines, "LOG_DIR", str(tmp_path))
    monkeypatch.setattr("ops.logs.follow._RETRY_SECONDS", 0.05)
    monkeypatch.setattr("hosts.agent.log.LARGEST", 20_000)
    ledger = Ledger(FolderBucket(tmp_path / "bucket"))
    record = JobRecord("job01", hosts=list(cluster.replicas)).to(JobState.PREPARING).to(JobState.RUNNING)
    put_job(ledger, record)
    log = Log(tmp_path, "job01", "ps-0")
    log.write_message("first")

    def write() -> None:
        for n in range(4000):
            log.write([SaidLine(1769860800.0, "INFO", text) for text in ("equal", "equal", str(n))])
            if n % 800 == 799:
                until(lambda: fleet._open["ps-0"].is_connected)
                fleet._open["ps-0"].transport.close()
        ledger.write_replica("job01", ReplicaRecord("ps-0", ReplicaState.EXITED, exitCode=0), None)
        put_job(ledger, record.to(JobState.SUCCEEDED))

    seen, notes = [], []
    for event in Follower(fleet, ledger, record, ["ps-0"], LogFilter()).events():
        if isinstance(event, lines.LogLine):
            if event.message == "first":
                threading.Thread(target=write, daemon=True).start()
            seen.append(event.message)
        elif isinstance(event, Note):
            notes.append(event.text)
    assert seen[1:] == [text for n in range(4000) for text in ("equal", "equal", str(n))]
    assert [note for note in notes if "broke off" in note]


@pytest.mark.parametrize("error", [EOFError(), OSError("Socket is closed"), paramiko.SSHException("gone")])
def test_whatever_of_a_connection_breaks_is_one_error(error: Exception) -> None:
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


def test_reading_logs_from_hosts_and_from_the_bucket_where_a_host_breaks_off(
    cluster: Inventory, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "LOG_DIR", str(tmp_path / "host"))
    record = JobRecord("job01", JobState.SUCCEEDED, hosts=["ps-0", "evaluator-0"])
    bucket = tmp_path / "bucket"
    said = [
        lines.LogLine(f"2026-01-31T12:00:{n // 1000:02}.{n % 1000:03}Z", "INFO", "ps-0", f"{n} {'x' * 200}")
        for n in range(9000)
    ]
    put_log(tmp_path / "host" / "job01", said)
    put_log(bucket / "jobs/job01/logs/ps-0", said)
    put_log(bucket / "jobs/job01/logs/evaluator-0", said[:1])
    up = ClusterClient(replace(cluster, operator_bucket=str(bucket)), fleet)
    logs = read_logs(up, record, ["ps-0", "evaluator-0"], LogFilter())
    assert list(logs["evaluator-0"]) == said[:1]
    whole = logs["ps-0"]
    first = [next(whole) for _ in range(5)]
    fleet._open["ps-0"].transport.close()
    assert [*first, *whole] == said
    said_of_them = capsys.readouterr().err
    assert "evaluator-0 (10.0.0.96) does not answer; its lines are the bucket's copy" in said_of_them
    # paramiko tells of an end without a word in one of two ways.
    assert re.search(r"^ps-0 broke off(: EOFError)?; the rest of its lines is the bucket's copy$", said_of_them, re.MULTILINE)
    last = read_logs(up, record, ["ps-0"], LogFilter(3, pattern="x+"))["ps-0"]
    assert list(last) == said[-3:]
    with pytest.raises(UsageError, match=r"--grep '\(x\+\)\+y' takes longer than 1 s on one line"):
        list(read_logs(up, record, ["ps-0"], LogFilter(3, pattern="(x+)+y"))["ps-0"])


def test_records_in_a_bucket_on_hosts(cluster: Inventory, fleet: Fleet) -> None:
    there = cluster.folder / "bucket"
    up = ClusterClient(replace(cluster, operator_bucket=f"sftp://{there}"), fleet)
    ledger = up.ledger
    put_job(ledger, JobRecord("job01", labels={"é": "\udcff"}))
    before = ledger.job("job01")
    assert before is not None
    assert Ledger(FolderBucket(there)).job("job01") == before, "it is as if it was written there"
    preparing = up.ledger.change_job(before, before.record.to(JobState.PREPARING))
    with pytest.raises(Conflict):
        ledger.change_job(before, before.record)
    assert [job.state for job in ledger.jobs()[0]] == ["PREPARING"]
    for name in fleet.inventory.names[:-1]:  # the channel breaks, whichever host it is of
        with pytest.raises(HostError):
            fleet.must(name, "vanish", "x")
    ledger.change_job(preparing, preparing.record.to(JobState.RUNNING))
    assert [job.state for job in ledger.jobs()[0]] == ["RUNNING"]
    (there / "jobs/job01/job.json").write_bytes(b"{")
    assert ledger.jobs()[0] == []
    there.rename(there.with_name("gone"))
    with pytest.raises(BucketError, match=f"{there} is not there"):
        ledger.jobs()


def test_records_while_no_host_answers(cluster: Inventory) -> None:
    config = cluster.folder / "ssh_config"
    config.write_text("Host *\n  ProxyCommand false\n" + config.read_text())
    with pytest.raises(
        HostsError, match=r"^master-0 \(10.0.0.2\) does not answer: no other host can be reached either; run pulumi up"
    ):
        ClusterClient(replace(cluster, operator_bucket="sftp:///bucket"), Fleet(cluster)).ledger.jobs()


def test_shell(inventory: Inventory) -> None:
    ssh = ["ssh", "-F", f"{inventory.folder}/ssh_config", "-l", "admin", "worker-1"]
    assert shell.argv(inventory, "worker-replica-1") == ssh
    assert shell.argv(inventory, "worker-1", ["echo", "a  b", "$HOME"]) == [*ssh, "--", "echo 'a  b' '$HOME'"]
    assert shell.argv(inventory, "worker-1", ["cd /tmp; ls"]) == [*ssh, "--", "cd /tmp; ls"]


def test_the_inventory_is_of_another_place(cluster: Inventory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ssh_config is missing: run pulumi up"):
        Fleet(replace(cluster, folder=tmp_path / "elsewhere"))
