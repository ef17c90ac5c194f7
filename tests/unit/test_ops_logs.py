"""Check log lines: the exact commands that read them, the order of several replicas, and their format."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
import unicodedata
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import put_job, put_log
from waiting import wait_for

from infra.inventory import Inventory
from jobs import chunks
from jobs.bucket import BucketError, Item
from jobs.chunks import NO_LOG, LogFilter, Position
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord, UnsavedFiles
from jobs.states import JobState, ReplicaState
from ops.errors import HostError, UsageError
from ops.logs import lines
from ops.logs.filters import parse_filter
from ops.logs.follow import TICK, Follower, Note, ReplicaRecords
from ops.logs.lines import LogLine


def line(time: float, replica: str, message: str = "x") -> LogLine:
    return LogLine(f"2026-01-31T12:00:{time:06.3f}Z", "INFO", replica, message)


def test_commands_that_read_and_follow() -> None:
    folder, python = "/var/lib/scaletier/logs/job01", ["python3", "-I", "-S", "-c"]
    source = Path(chunks.__file__).read_text()
    read, follow = (
        shlex.split(lines.read_command("job01", LogFilter(100))),
        lines.follow_command("job01", LogFilter(), Position(7, 40)),
    )
    assert read == [*python, source, folder, '[100, "", "", "", ""]', "read"]
    assert shlex.split(follow) == [*python, source, folder, '[null, "", "", "", ""]', "follow", "7 40"]
    assert shlex.split(lines.follow_command("job01", LogFilter(0)))[-1] == "follow"


def run_command(command: str, directory: Path) -> tuple[int, list[LogLine]]:
    result = subprocess.run(
        command.replace(lines.LOG_DIR, str(directory)), shell=True, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    parsed = (lines.parse_printed(output, "ps-0")[1] for output in result.stdout.splitlines() if output)
    return result.returncode, [line for line in parsed if line]


def test_a_log_is_read_on_a_host(tmp_path: Path) -> None:
    assert run_command(lines.read_command("job02", LogFilter(2)), tmp_path / "none") == (NO_LOG, [])
    expected = [line(second, "ps-0", f"{second} 'é'") for second in range(5)]
    put_log(tmp_path / "job02", expected)
    assert run_command(lines.read_command("job02", LogFilter(2)), tmp_path) == (0, expected[3:])
    assert run_command(lines.read_command("job02", LogFilter()), tmp_path) == (0, expected)
    assert run_command(lines.read_command("job02", LogFilter(pattern="'é'")), tmp_path) == (0, expected)
    assert run_command(lines.read_command("job01", LogFilter()), tmp_path) == (NO_LOG, [])
    assert run_command(lines.follow_command("job02", LogFilter(2)), tmp_path) == (0, expected[3:])
    assert run_command(lines.follow_command("job01", LogFilter()), tmp_path) == (0, [])


def test_filter_flags_are_parsed() -> None:
    now = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
    assert parse_filter() == LogFilter(100)
    assert [parse_filter(text).lines for text in ("0", "7", "all")] == [0, 7, None]
    assert parse_filter(severity="warning") == LogFilter(None, severity="WARNING")
    assert parse_filter("5", grep="a b") == LogFilter(5, pattern="a b")
    times = ("90s", "10m", "2h", "3d", "2026-01-31T12:00:00Z", "2026-01-31T13:00:00.5+01:00")
    assert [parse_filter(since=text, now=now).since for text in times] == [
        "2026-01-31T11:58:30.000Z",
        "2026-01-31T11:50:00.000Z",
        "2026-01-31T10:00:00.000Z",
        "2026-01-28T12:00:00.000Z",
        "2026-01-31T12:00:00.000Z",
        "2026-01-31T12:00:00.500Z",
    ]
    today = now.astimezone().replace(hour=14, minute=30, second=5).astimezone(UTC)
    assert parse_filter(until="14:30:05", now=now).until == today.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    ago = {f"{seconds}s": f"2026-01-31T11:59:{60 - seconds}.000Z" for seconds in (10, 20)}
    assert parse_filter(since="20s", now=now) == LogFilter(None, since=ago["20s"])
    assert parse_filter(until="20s", now=now) == LogFilter(None, until=ago["20s"])
    assert parse_filter(since="20s", until="10s", now=now) == LogFilter(None, since=ago["20s"], until=ago["10s"])
    assert parse_filter(since="10s", until="10s", now=now) == LogFilter(None, since=ago["10s"], until=ago["10s"])
    assert parse_filter("3", " 20s ", "20260131t120000Z", "a", "Info", now) == LogFilter(
        3, ago["20s"], "2026-01-31T12:00:00.000Z", "INFO", "a"
    )
    assert parse_filter(since="2026-01-31 12:00+00:00").since == "2026-01-31T12:00:00.000Z"
    assert parse_filter(grep="a") == LogFilter(None, pattern="a")
    assert parse_filter(grep="") == LogFilter(100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lines": "-1"}, "--lines '-1' is invalid. Valid: 0 and above, and all"),
        ({"lines": "ten"}, "Valid: 0 and above, and all"),
        ({"lines": ""}, "Valid: 0 and above, and all"),
        ({"lines": "1.5"}, "Valid: 0 and above, and all"),
        ({"since": "yesterday"}, "--since 'yesterday' is invalid. Valid: how long ago, as 90s, 10m, 2h or 3d, a time of"),
        ({"until": "25:00"}, "--until '25:00' is invalid. Valid: "),
        ({"since": "999999999d"}, "is invalid. Valid: "),
        ({"since": ""}, "is invalid. Valid: "),
        ({"since": "1m", "until": "2m"}, "--since 1m is later than --until 2m"),
        (
            {"severity": "WARN"},
            "--severity 'WARN' is invalid. Valid: DEBUG, INFO, WARNING, ERROR, CRITICAL; did you mean WARNING[?]",
        ),
        ({"grep": "("}, r"--grep '\(' is invalid: missing \), unterminated subpattern at position 0. Valid: a regular "),
    ],
)
def test_invalid_filter_flags_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_filter(**flags)  # type: ignore[arg-type]


@given(st.text() | st.from_regex(r"\d{1,3}[smhd]|20\d\d-\d\d-\d\d(T\d\d:\d\d)?", fullmatch=True))
def test_any_text_is_a_time_or_one_error(text: str) -> None:
    try:
        since = parse_filter(since=text).since
    except UsageError:
        return
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", since)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_line_survives_json(message: str, severity: str) -> None:
    original = LogLine("2026-01-31T12:00:00.000Z", severity, "ps-0", message)
    text = original.to_json()
    assert lines.parse_line(text, "other") == original
    assert not [character for character in text if unicodedata.category(character) == "Cc"]


def test_a_line_without_a_replica_is_of_the_log_it_is_in() -> None:
    text = LogLine("2026", "INFO", "", "4 lines cut").to_json()
    assert lines.parse_line(text, "ps-0") == LogLine("2026", "INFO", "ps-0", "4 lines cut")


def test_pieces_are_parsed_as_they_arrive() -> None:
    printed = [line(n, "ps-0").to_json().encode() for n in range(2)]
    pieces = [b"7 0 \n\n7 5", b"0 " + printed[0], b"\n", b"7 90 half a line\n7 99 " + printed[1] + b"\n8 0 "]
    assert list(lines.parse_pieces(pieces, "ps-0")) == [
        (Position(7, 0), []),
        (Position(7, 0), []),
        (Position(7, 50), [(5 + len(printed[0]), line(0, "ps-0"))]),
        (
            Position(7, 99),
            [(16, LogLine(line(0, "ps-0").time, "INFO", "ps-0", "half a line")), (5 + len(printed[1]), line(1, "ps-0"))],
        ),
    ]


@pytest.mark.parametrize(
    ("log_filter", "position", "messages"),
    [
        (LogFilter(), None, ["0", "1", "2", "3"]),
        (LogFilter(2), None, ["2", "3"]),
        (LogFilter(0), None, []),
        (LogFilter(1), 1, ["1", "2", "3"]),
        (LogFilter(), 2, ["2", "3"]),
    ],
)
def test_a_log_is_read_from_a_position(
    tmp_path: Path, log_filter: LogFilter, position: int | None, messages: list[str]
) -> None:
    every = [line(n, "ps-0", str(n)) for n in range(4)]
    put_log(tmp_path / "job01", every)
    start = None if position is None else Position(1769860800, sum(len(each.to_json()) + 1 for each in every[:position]))
    source = chunks.ChunkFolder(tmp_path / "job01")
    assert [each.message for each in lines.read_source(source, "ps-0", log_filter, start)] == messages


@pytest.mark.parametrize(
    "text", ['{"time": "2026', "plain", "[]", "{}", "null", '{"time": 1, "severity": "INFO"}', "[" * 100_000]
)
def test_an_incomplete_line_is_shown_unchanged(text: str) -> None:
    assert lines.parse_line(text, "ps-0", "before") == LogLine("before", "INFO", "ps-0", text)


sorted_times = st.lists(st.integers(0, 50), max_size=20).map(sorted)


@given(st.lists(sorted_times, max_size=4))
def test_a_merge_is_in_order_and_complete(times: list[list[int]]) -> None:
    logs = [[line(time / 10, f"worker-{i}", str(n)) for n, time in enumerate(log)] for i, log in enumerate(times)]
    merged = list(lines.merge(logs))
    assert merged == sorted(merged, key=lambda line: line.time)
    for i, log in enumerate(logs):
        assert [line for line in merged if line.replica == f"worker-{i}"] == log


def test_a_line_is_shown_in_columns() -> None:
    form = lines.LineFormatter(["ps-0", "worker-10"], colours=False)
    assert re.fullmatch(
        r"\d\d:\d\d:01\.500 WARNING ps-0       hello", form(LogLine("2026-01-31T12:00:01.500Z", "WARNING", "ps-0", "hello"))
    )
    assert form(LogLine("", "INFO", "ps-0", "half")) == "             INFO    ps-0       half"
    assert form(LogLine("", "INFO", "ps-0", "two\nlines")) == "             INFO    ps-0       two␊lines"
    assert form(LogLine("2026-01-31T12:00:01Z", "INFO", "ps-0", "")).split()[0].endswith(":01.000")
    error = LogLine("2026-01-31T12:00:01.500Z", "ERROR", "ps-0", "hello")
    plain, coloured = (lines.LineFormatter(["ps-0"], colours=colours)(error) for colours in (False, True))
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


def test_a_line_is_shown_in_the_colours_of_its_severity_and_replica() -> None:
    names = [f"worker-{n}" for n in range(10)]
    form = lines.LineFormatter(names, colours=True)
    time = " " * 12
    assert form(LogLine("", "ERROR", "worker-0", "bad")) == (
        f"\033[2m{time}\033[0m \033[31mERROR  \033[0m \033[36mworker-0\033[0m  \033[31mbad\033[0m"
    )
    assert form(LogLine("", "INFO", "ps-0", "good")) == f"\033[2m{time}\033[0m INFO    ps-0      good"
    codes = [form(LogLine("", "INFO", name, ""))[31:33] for name in names]
    assert codes == ["36", "32", "35", "34", "33", "96", "92", "95", "94", "36"]
    assert lines.LineFormatter([], colours=False)(LogLine("", "INFO", "", "x")) == f"{time} INFO      x"


class FailingBucket(FolderBucket):
    """Fail all reads while `failing` is set."""

    failing = False

    def read(self, name: str) -> Item | None:
        if self.failing:
            raise BucketError("no answer within 30 s")
        return super().read(name)


class NoHosts:
    """A cluster whose hosts do not answer."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = replace(inventory, poll_seconds=0.02)

    def stream(self, name: str, _: str) -> None:
        raise HostError(name, "does not answer")


def test_a_queued_job_is_followed_from_the_queue_to_its_end(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ops.logs.follow._POLL_SECONDS", "ops.logs.follow._RETRY_SECONDS", "jobs.queue_monitor.PAUSE_SECONDS"):
        monkeypatch.setattr(name, 0.05)
    host = ["master-0"]
    store = FailingBucket(tmp_path)
    ledger = Ledger(store)
    put_job(ledger, JobRecord("job02", candidates={"master-0": host}))
    entries = [QueueEntry("job00", host, has_hosts=True), QueueEntry("job01", host, priority=1), QueueEntry("job02", host)]
    ledger.change_queue(lambda _: Queue(entries))
    for entry in entries[:2]:
        put_job(ledger, JobRecord(entry.jobId, JobState.RUNNING, hosts=host))
    messages: list[str] = []
    for event in Follower(NoHosts(inventory), ledger, JobRecord("job02"), host, LogFilter()).events():  # type: ignore[arg-type]
        assert not isinstance(event, LogLine)
        messages.append(event.text if isinstance(event, Note) else event.state)  # type: ignore[union-attr]
        if messages[-1] == "job02 is QUEUED behind job00, job01":
            time.sleep(0.2)  # it is printed once
            ledger.change_queue(lambda queue: queue.without(entries[0]))
        elif messages[-1] == "job02 is QUEUED behind job01":
            # The agent that released the hosts was killed before it assigned them: the queue monitor does it.
            ledger.change_queue(lambda _: Queue([entries[2]]))
            wait_for(lambda: ledger.queue().holder("master-0"), "the next holder of master-0")
            put_job(ledger, JobRecord("job02", JobState.PREPARING, hosts=host))
        elif messages[-1] == "PREPARING":
            store.failing = True
        elif "does not answer (" in messages[-1]:
            time.sleep(0.1)
            store.failing = False
        elif messages[-1] == "the bucket answers again":
            put_job(ledger, JobRecord("job02", JobState.SUCCEEDED, hosts=host))
    assert messages.count("master-0 does not answer; trying again") == 1
    messages.remove("master-0 does not answer; trying again")
    messages.remove("master-0: not all of its lines were shown; fab logs master-0 --job job02 tries again")
    assert sorted(messages[:2]) == ["QUEUED", "job02 is QUEUED behind job00, job01"]
    assert messages[2:] == [
        "job02 is QUEUED behind job01",
        "PREPARING",
        "the bucket does not answer (no answer within 30 s); the job continues, trying again",
        "the bucket answers again",
        "SUCCEEDED",
        "SUCCEEDED",
    ]


def test_a_follower_reports_replicas_and_ticks(inventory: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.logs.follow._TICK_SECONDS", 0.01)  # far less than the time between two events
    running = JobRecord("job01", JobState.RUNNING, hosts=["master-0"])
    put_job(ledger, running)
    ledger.write_replica("job01", ReplicaRecord("master-0", ReplicaState.EXITED, restarts=2), None)
    fleet: Any = NoHosts(inventory)
    fleet.inventory = replace(inventory, poll_seconds=0.4)
    ticks = updates = 0
    for event in Follower(fleet, ledger, running, ["master-0"], LogFilter(), for_screen=True).events():
        ticks += event == TICK
        if isinstance(event, ReplicaRecords):
            updates += 1
            assert event.records["master-0"].restarts == 2
            if updates == 2:
                put_job(ledger, replace(running, state=JobState.FAILED))
    assert updates >= 2
    assert ticks
    ended = replace(running, state=JobState.FAILED)
    plain = list(Follower(fleet, ledger, ended, ["master-0"], LogFilter()).events())
    assert [event for event in plain if event == TICK or isinstance(event, ReplicaRecords)] == []


RUNNING, EXITED = (ReplicaRecord("master-0", state) for state in (ReplicaState.RUNNING, ReplicaState.EXITED))
CHECKING = replace(EXITED, startTime="2026-01-31T12:00:00.000Z")


@pytest.mark.parametrize(
    ("limit", "replica", "waits"),
    [
        ("_STOP_SECONDS", RUNNING, True),
        ("_STOP_SECONDS", EXITED, False),
        ("_UNSAVED_SECONDS", CHECKING, True),
        ("_UNSAVED_SECONDS", replace(CHECKING, unsaved=UnsavedFiles()), False),
    ],
)
def test_a_follower_waits_for_last_lines_and_unsaved_files(
    inventory: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, limit: str, replica: ReplicaRecord, waits: bool
) -> None:
    """Check that a finished replica is not waited for, and an unresponsive one only for a limited time."""
    monkeypatch.setattr(f"ops.logs.follow.{limit}", 0.3 if waits else 1e6)
    record = JobRecord("job01", JobState.FAILED, hosts=["master-0"])
    put_job(ledger, record)
    ledger.write_replica("job01", replica, None)
    start = time.monotonic()
    list(Follower(NoHosts(inventory), ledger, record, ["master-0"], LogFilter()).events())  # type: ignore[arg-type]
    assert time.monotonic() - start >= 0.3 or not waits
