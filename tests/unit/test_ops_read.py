"""Check `fab logs`: its arguments in either order, logs of hosts and of the bucket, and how a job is followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opsdata import FakeStream, put_job, put_log

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError
from jobs.chunks import NO_LOG, SLOW_PATTERN, LogFilter
from jobs.firsterror import FirstError
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops import client, terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome, fan_out
from ops.errors import DETACHED, DONE, FAILED, HostError, OpsError, UsageError
from ops.logs.follow import Note
from ops.logs.lines import FIRST_ERROR_MARK, LogLine, read_command
from ops.logs.read import read_logs, resolve_selection, select_replicas
from ops.screen import job as screen
from ops.screen.logs import show_logs


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    cluster = ClusterClient(inventory, object(), ledger=Ledger(FolderBucket(tmp_path)))  # type: ignore[arg-type]
    for second, job_id in enumerate(("job01", "worker")):
        create_time = f"2026-01-31T12:00:0{second}.000Z"
        put_job(cluster.ledger, JobRecord(job_id, hosts=list(inventory.replicas), createTime=create_time))
    return cluster


@pytest.mark.parametrize(
    ("word", "job", "replicas", "job_id"),
    [
        (None, None, "all", None),
        (None, "job01", "all", "job01"),
        ("worker", None, "worker", None),
        ("worker", "job01", "worker", "job01"),
        ("worker-replica-0", None, "worker-replica-0", None),
        ("job01", None, "all", "job01"),
        ("job01", "worker-1", "worker-1", "job01"),
        ("job01", "job02", "job01", "job02"),
    ],
)
def test_arguments_resolve_to_replicas_and_job(
    cluster: ClusterClient, word: str | None, job: str | None, replicas: str, job_id: str | None
) -> None:
    assert resolve_selection(cluster, word, job) == (replicas, job_id)


def test_an_unknown_argument_is_refused(cluster: ClusterClient) -> None:
    valid = "ps-0, master-0, worker-0, worker-1, evaluator-0, all"
    with pytest.raises(UsageError) as error:
        show_logs(cluster, "job02", None, LogFilter(), follow=False, as_json=False)
    assert str(error.value) == (
        f"there is no replica and no job 'job02'; did you mean job01?; replicas are {valid}, and fab jobs lists the jobs"
    )
    with pytest.raises(
        UsageError, match=r"job worker has no replica 'worker-7'; did you mean worker-\d[?]; valid are master-0, "
    ):
        show_logs(cluster, "worker-7", None, LogFilter(), follow=False, as_json=False)


def test_several_replicas_are_selected(cluster: ClusterClient) -> None:
    record = JobRecord("job01", hosts=list(cluster.inventory.replicas))
    assert select_replicas(record, "worker, ps-replica-0") == ["ps-0", "worker-0", "worker-1"]
    assert select_replicas(record, "worker-1,all") == list(cluster.inventory.replicas)
    assert resolve_selection(cluster, "worker-0,ps", None) == ("worker-0,ps", None)
    with pytest.raises(UsageError) as error:
        select_replicas(record, "worker,ps-7")
    assert str(error.value) == (
        "job job01 has no replica 'ps-7'; did you mean ps-0?; "
        "valid are master-0, ps-0, worker-0, worker-1, evaluator-0, master, ps, worker, evaluator, all"
    )


class DeletedHosts:
    """Fail for every host, as after a destroy."""

    def __init__(self, error: str = "does not answer") -> None:
        self.error = error

    def each(self, names: list[str], *_: object) -> Outcome[object]:
        return Outcome({}, {name: HostError(name, self.error) for name in names})


def archived_line(name: str, n: int) -> LogLine:
    severity = "ERROR" if n % 100 == 50 else "INFO"
    return LogLine(f"2026-01-31T12:{n // 60:02}:{n % 60:02}.000Z", severity, name, f"{name} {n}")


@pytest.fixture
def ended(inventory: Inventory, ledger: Ledger, tmp_path: Path) -> ClusterClient:
    """Return a cluster whose job has ended and whose hosts are deleted; each replica wrote 300 lines."""
    job = JobRecord("job01", JobState.FAILED, hosts=["ps-0", "worker-0"])
    put_job(ledger, job)
    for name in job.hosts:
        put_log(tmp_path / paths.log("job01", name), [])
        log_lines = [archived_line(name, n) for n in range(300)]
        for first in range(0, 300, 50):
            put_log(tmp_path / paths.log("job01", name), log_lines[first : first + 50])
    error = FirstError("2026-01-31T12:00:50.000Z", "worker-0 50")
    ledger.write_replica("job01", ReplicaRecord("worker-0", ReplicaState.EXITED, firstError=error), None)
    return ClusterClient(inventory, DeletedHosts(), open_bucket(str(tmp_path)), ledger)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log_filter", "messages"),
    [
        (LogFilter(2), ["ps-0 298", "worker-0 298", "ps-0 299", "worker-0 299"]),
        (LogFilter(1, until="2026-01-31T12:01:00.000Z"), ["ps-0 60", "worker-0 60"]),
        (LogFilter(None, since="2026-01-31T12:04:59.000Z"), ["ps-0 299", "worker-0 299"]),
        (LogFilter(None, severity="ERROR", until="2026-01-31T12:02:00.000Z"), ["ps-0 50", "worker-0 50"]),
        (LogFilter(None, pattern=r"^worker-0 29[89]$"), ["worker-0 298", "worker-0 299"]),
    ],
)
def test_logs_of_deleted_hosts_come_from_the_bucket(
    ended: ClusterClient, log_filter: LogFilter, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_logs(ended, "all", "job01", log_filter, follow=False, as_json=True) == 0
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["message"] for line in lines] == messages
    assert [line["message"] for line in lines if line.get("firstError")] == [text for text in messages if text == "worker-0 50"]
    assert "its lines are from the bucket's copy" in output.err


def test_follow_and_until_conflict(ended: ClusterClient) -> None:
    with pytest.raises(
        UsageError, match="--until is for what has been printed, --follow for what will be: use only one of them"
    ):
        show_logs(ended, "all", "job01", LogFilter(until="2026"), follow=True, as_json=False)


def test_a_slow_pattern_is_refused(ended: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.chunks.PATTERN_SECONDS", 0.05)
    put_log(tmp_path / paths.log("job01", "worker-0"), [LogLine("2027", "INFO", "worker-0", "a" * 50)], incarnation=1 << 33)
    with pytest.raises(UsageError, match=r"--grep '\(a\+\)\+b' takes longer than 0.05 s on one line"):
        show_logs(ended, "worker", "job01", LogFilter(pattern="(a+)+b"), follow=False, as_json=False)


class FakeFleet:
    """Hosts with these streams; another host does not answer."""

    def __init__(self, *streams: FakeStream) -> None:
        self.streams = {stream.host: stream for stream in streams}
        self.commands: dict[str, str] = {}

    def each(self, names: list[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        assert seconds == 60.0
        return fan_out(names, work, seconds)

    def stream(self, name: str, command: str) -> FakeStream:
        self.commands[name] = command
        if name not in self.streams:
            raise HostError(name, "does not answer")
        return self.streams[name]


def printed_line(name: str, number: int) -> bytes:
    """Return a line as a host prints it, with the position behind it, of the log of the fixture `ended`."""
    sizes = [len(archived_line(name, n).to_json()) + 1 for n in range(number + 1)]
    return f"1769860800 {sum(sizes)} {archived_line(name, number).to_json()}\n".encode()


def read_messages(cluster: ClusterClient, log_filter: LogFilter = LogFilter()) -> dict[str, list[str]]:  # noqa: B008
    record = cluster.ledger.job("job01")
    assert record
    read = read_logs(cluster, record.record, ["ps-0", "worker-0"], log_filter)
    return {name: [line.message.rpartition(" ")[2] for line in lines] for name, lines in read.items()}


def test_logs_are_read_from_hosts(ended: ClusterClient, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {name: [printed_line(name, n) for n in range(5)] for name in ("ps-0", "worker-0")}
    whole = FakeStream("ps-0", b"".join(lines["ps-0"][:2]), b"".join(lines["ps-0"][2:]))
    broken = FakeStream("worker-0", lines["worker-0"][0], lines["worker-0"][1], HostError("worker-0", "broke off"))
    fleet: Any = FakeFleet(whole, broken)
    cluster = ClusterClient(ended.inventory, fleet, ended.bucket, ended.ledger)
    assert read_messages(cluster) == {"ps-0": list("01234"), "worker-0": [str(n) for n in range(300)]}
    assert (whole.closed, set(fleet.commands.values())) == (True, {read_command("job01", LogFilter())})
    assert capsys.readouterr().err == "worker-0 broke off; the rest of its lines is from the bucket's copy\n"


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (FakeStream("worker-0", exit_code=NO_LOG), None),
        (FakeStream("worker-0", exit_code=1, stderr="x\nno space\n"), "worker-0 cannot read its log: no space"),
        (FakeStream("worker-0"), "worker-0 cannot read its log"),
        (FakeStream("worker-0", HostError("worker-0", "broke off")), "worker-0 broke off"),
        (
            FakeStream("worker-0", exit_code=SLOW_PATTERN),
            "--grep '' takes longer than 1 s on one line: avoid nested repetitions such as (a+)+",
        ),
        (FakeStream("other"), "worker-0 does not answer"),
    ],
)
def test_a_host_without_the_log_has_the_copy_of_the_bucket(
    ended: ClusterClient, tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: FakeStream, error: str | None
) -> None:
    fleet: Any = FakeFleet(FakeStream("ps-0", printed_line("ps-0", 0)), stream)
    cluster = ClusterClient(ended.inventory, fleet, ended.bucket, ended.ledger)
    assert read_messages(cluster, LogFilter(2)) == {"ps-0": ["0"], "worker-0": ["298", "299"]}
    assert capsys.readouterr().err == (f"{error}; its lines are from the bucket's copy\n" if error else "")
    for chunk in (tmp_path / paths.log("job01", "worker-0")).iterdir():
        chunk.unlink()
    fleet.streams["ps-0"] = FakeStream("ps-0", printed_line("ps-0", 0))
    assert read_messages(cluster) == {"ps-0": ["0"]}
    assert capsys.readouterr().err == (f"{error}; the bucket has no log of it\n" if error else "")


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [(1, "ps-0 cannot read its log: no space"), (SLOW_PATTERN, "--grep 'x' takes longer than 1 s on one line: avoid nested ")],
)
def test_a_host_that_fails_behind_some_lines_is_an_error(ended: ClusterClient, exit_code: int, message: str) -> None:
    fleet: Any = FakeFleet(FakeStream("ps-0", printed_line("ps-0", 0), exit_code=exit_code, stderr="no space"))
    with pytest.raises(OpsError) as error:
        read_messages(ClusterClient(ended.inventory, fleet, ended.bucket, ended.ledger), LogFilter(None, pattern="x"))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("state", "error_message", "message"),
    [
        (JobState.QUEUED, "", "job job02 is QUEUED and has printed nothing yet: --follow waits for its turn"),
        (JobState.RUNNING, "", "job job02 has no log of ps-0, worker-0 yet; ps-0 is off; worker-0 is off"),
        (
            JobState.CANCELLED,
            "",
            "job job02 is CANCELLED, and left no log of ps-0, worker-0; ps-0 is off; worker-0 is off: "
            "fab describe job02 shows more",
        ),
        (
            JobState.FAILED,
            "no memory.\nmore",
            "job job02 is FAILED (no memory), and left no log of ps-0, worker-0; ps-0 is off; worker-0 is off: "
            "fab describe job02 shows more",
        ),
    ],
)
def test_a_job_without_logs_gives_the_reason(
    ended: ClusterClient, capsys: pytest.CaptureFixture[str], state: JobState, error_message: str, message: str
) -> None:
    job = JobRecord("job02", state, hosts=["ps-0", "worker-0"], errorMessage=error_message)
    cluster = ClusterClient(ended.inventory, DeletedHosts("is off"), ended.bucket, ended.ledger)  # type: ignore[arg-type]
    with pytest.raises(OpsError) as error:
        read_logs(cluster, job, job.hosts, LogFilter())
    assert str(error.value) == message
    notes = [f"{name} is off; the bucket has no log of it" for name in job.hosts]
    assert capsys.readouterr().err.splitlines() == notes


def test_a_replica_on_a_host_of_another_cluster_is_read_from_the_bucket(ended: ClusterClient) -> None:
    job = JobRecord("job01", JobState.FAILED, hosts=["worker-9"], candidates={"ps-0": ["worker-9"]})
    fleet: Any = FakeFleet()
    cluster = ClusterClient(ended.inventory, fleet, ended.bucket, ended.ledger)
    assert [line.message for line in read_logs(cluster, job, ["ps-0"], LogFilter(1))["ps-0"]] == ["ps-0 299"]
    assert fleet.commands == {}


@pytest.mark.parametrize(("known", "marked"), [(True, ["worker-0 50"]), (False, [])])
def test_printed_logs_mark_the_recorded_first_error(
    ended: ClusterClient, capsys: pytest.CaptureFixture[str], known: bool, marked: list[str]
) -> None:
    if not known:
        ended.ledger.write_replica(
            "job01", ReplicaRecord("worker-0", ReplicaState.EXITED), ended.ledger.replica_version("job01", "worker-0")
        )
    assert show_logs(ended, None, None, LogFilter(None, severity="ERROR"), follow=True, as_json=False) == FAILED
    out = capsys.readouterr().out.splitlines()
    names = [(name, n) for n in (50, 150, 250) for name in ("ps-0", "worker-0")]
    assert [row.partition(" ")[2].removesuffix(FIRST_ERROR_MARK) for row in out] == [
        f"ERROR   {name:<8}  {name} {n}" for name, n in names
    ]
    assert [row.removesuffix(FIRST_ERROR_MARK).rpartition("  ")[2] for row in out if row.endswith(FIRST_ERROR_MARK)] == marked


def test_logs_are_printed_even_if_no_record_of_a_replica_can_be_read(
    ended: ClusterClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BucketError("no answer")

    monkeypatch.setattr(ended.ledger, "replicas", fail)
    assert show_logs(ended, "worker-0", "job01", LogFilter(None, severity="ERROR"), follow=False, as_json=False) == DONE
    assert [row.rpartition("  ")[2] for row in capsys.readouterr().out.splitlines()] == [
        "worker-0 50",
        "worker-0 150",
        "worker-0 250",
    ]


@pytest.mark.parametrize(
    ("state", "follow", "code"), [("SUCCEEDED", True, DONE), ("FAILED", True, FAILED), ("FAILED", False, DONE)]
)
def test_the_exit_code_of_an_ended_job(ended: ClusterClient, state: JobState, follow: bool, code: int) -> None:
    put_job(ended.ledger, JobRecord("job01", state, hosts=["ps-0", "worker-0"]))
    assert show_logs(ended, "ps", "job01", LogFilter(1), follow=follow, as_json=False) == code


def follow_events(monkeypatch: pytest.MonkeyPatch, *events: object) -> list[tuple[object, ...]]:
    """Let each follower yield these events, or raise one that is an exception; return the arguments of all."""
    followers: list[tuple[object, ...]] = []

    def batches() -> Iterator[list[object]]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield [event]

    def follower(*arguments: object) -> SimpleNamespace:
        followers.append(arguments)
        return SimpleNamespace(batches=batches)

    monkeypatch.setattr(client, "Follower", follower)
    return followers


FOLLOWED = JobRecord("job03", JobState.RUNNING, hosts=["ps-0", "worker-0"], startTime="2026-01-31T12:00:00.000Z")


@pytest.mark.parametrize(
    ("events", "code", "err"),
    [
        (
            [replace(FOLLOWED, state=JobState.PREPARING), FOLLOWED, FOLLOWED, replace(FOLLOWED, state=JobState.SUCCEEDED)],
            DONE,
            ["job03 PREPARING", "job03 RUNNING", "job03 SUCCEEDED"],
        ),
        (
            [Note("a note"), replace(FOLLOWED, state=JobState.FAILED, errorMessage="no memory\nmore")],
            FAILED,
            ["a note", "job03 FAILED: no memory"],
        ),
        ([], FAILED, []),
        ([FOLLOWED, KeyboardInterrupt()], DETACHED, ["job03 RUNNING"]),
    ],
)
def test_a_followed_job_sets_the_exit_code(
    ended: ClusterClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    events: list[object],
    code: int,
    err: list[str],
) -> None:
    put_job(ended.ledger, FOLLOWED)
    monkeypatch.setattr(terminal, "supports_screen", lambda: True)
    lines = [archived_line("worker-0", n) for n in (49, 50, 150)]
    followers = follow_events(monkeypatch, *lines, *events)
    assert show_logs(ended, "all", "job03", LogFilter(7), follow=True, as_json=False) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines() == err
    assert [row.partition(" ")[2] for row in captured.out.splitlines()] == [
        "INFO    worker-0  worker-0 49",
        f"ERROR   worker-0  worker-0 50{FIRST_ERROR_MARK}",
        "ERROR   worker-0  worker-0 150",
    ]
    assert followers == [(ended.fleet, ended.ledger, FOLLOWED, ["ps-0", "worker-0"], LogFilter(7), False)]


@pytest.mark.parametrize(
    ("plain", "as_json", "supported", "screens"),
    [(False, False, True, 1), (True, False, True, 0), (False, True, True, 0), (False, False, False, 0)],
)
def test_a_screen_is_for_terminals_that_support_it(
    ended: ClusterClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plain: bool,
    as_json: bool,
    supported: bool,
    screens: int,
) -> None:
    shown: list[tuple[object, ...]] = []

    def follow_on_screen(*arguments: object) -> JobRecord:
        shown.append(arguments)
        return replace(FOLLOWED, state=JobState.SUCCEEDED)

    put_job(ended.ledger, FOLLOWED)
    follow_events(monkeypatch, archived_line("ps-0", 1), replace(FOLLOWED, state=JobState.SUCCEEDED))
    monkeypatch.setattr(terminal, "supports_screen", lambda: supported)
    monkeypatch.setattr(screen, "follow", follow_on_screen)
    assert show_logs(ended, "ps", "job03", LogFilter(7), follow=True, as_json=as_json, plain=plain) == DONE
    out = capsys.readouterr().out
    assert out.count("\n") == 1 - screens
    assert out.startswith("{") is as_json
    assert shown == [(ended, FOLLOWED, ["ps-0"], LogFilter(7))] * screens
