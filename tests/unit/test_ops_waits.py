"""Check the reports on a silent job, at its start and at its end."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opsdata import put_job
from test_ops_logs import NoHosts

from infra.inventory import Inventory
from jobs.chunks import LogFilter
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, ReplicaRecord, UnsavedFiles
from jobs.states import JobState, ReplicaState
from ops import client, terminal
from ops.logs import follow, waits
from ops.logs.follow import Event, Follower, Note, WaitReason
from ops.screen import logs

NAMES = ["master-0", "worker-0", "worker-1"]
JOB = JobRecord("job01", JobState.RUNNING, candidates={name: [name] for name in NAMES})
STARTED = "2026-01-31T12:00:00.000Z"


def make_replicas(*states: ReplicaState, code: int = 0, unsaved: UnsavedFiles | None = None) -> dict[str, ReplicaRecord]:
    exits = [code if state is ReplicaState.EXITED else None for state in states]
    return {
        name: ReplicaRecord(name, state, exit_code, startTime=STARTED, unsaved=unsaved)
        for name, state, exit_code in zip(NAMES, states, exits, strict=False)
    }


RUNNING, EXITED, PREPARING = ReplicaState.RUNNING, ReplicaState.EXITED, ReplicaState.PREPARING
CHECKED = UnsavedFiles()


@pytest.mark.parametrize(
    ("state", "records", "reading", "expected"),
    [
        (JobState.RUNNING, make_replicas(RUNNING, RUNNING, RUNNING), (), ""),
        (JobState.RUNNING, make_replicas(RUNNING, EXITED, EXITED), (), ""),
        (JobState.RUNNING, make_replicas(EXITED, EXITED, EXITED, code=1), (), ""),
        (JobState.RUNNING, make_replicas(EXITED, RUNNING, EXITED), (), "waiting for worker-0 to end"),
        (JobState.RUNNING, make_replicas(EXITED, EXITED, EXITED), (), "waiting for the job to end: all its replicas have"),
        (JobState.CANCELLING, make_replicas(RUNNING, RUNNING, EXITED), (), "waiting for master-0, worker-0 to end"),
        (JobState.FAILED, make_replicas(EXITED, RUNNING, RUNNING), (), "waiting for worker-0, worker-1 to end"),
        (
            JobState.SUCCEEDED,
            make_replicas(EXITED, EXITED, EXITED),
            (),
            "waiting for master-0, worker-0, worker-1 to look for files outside JOB_DIR",
        ),
        (JobState.SUCCEEDED, make_replicas(EXITED, EXITED, EXITED, unsaved=CHECKED), (), ""),
        (JobState.SUCCEEDED, {"worker-0": ReplicaRecord("worker-0", EXITED)}, (), ""),
        (JobState.CANCELLING, make_replicas(EXITED, EXITED), (), "waiting for the job to end: all its replicas have"),
        (
            JobState.SUCCEEDED,
            make_replicas(EXITED, EXITED, EXITED, unsaved=CHECKED),
            {"worker-1", "worker-0"},
            "collecting the logs of worker-0, worker-1",
        ),
        (JobState.SUCCEEDED, {}, {"master-0"}, "collecting the logs of master-0"),
        (JobState.PREPARING, {}, (), ""),
    ],
)
def test_the_message_at_the_end(state: JobState, records: dict[str, ReplicaRecord], reading: set[str], expected: str) -> None:
    assert waits.waiting_at_end(replace(JOB, state=state), records, NAMES, reading) == expected


def test_the_message_at_the_start() -> None:
    assert waits.waiting_at_start(JOB, make_replicas(RUNNING, RUNNING, RUNNING), NAMES) == "", "a program that computes"
    records = make_replicas(RUNNING, PREPARING)
    records["master-0"] = replace(records["master-0"], connections=["connecting to worker-0:2222", "listening on 2222"])
    assert waits.waiting_at_start(JOB, records, NAMES) == (
        "master-0 is RUNNING, connecting to worker-0:2222, listening on 2222; worker-0 is PREPARING; worker-1 has not reported"
    )
    many = [f"worker-{n}" for n in range(9)]
    assert waits.waiting_at_start(JOB, {}, many).endswith("worker-5 has not reported and 3 more")
    for job in (replace(JOB, state=JobState.QUEUED), replace(JOB, runSeconds=601.0)):
        assert waits.waiting_at_start(job, {}, NAMES) == ""
    for job in (replace(JOB, state=JobState.PREPARING), replace(JOB, runSeconds=600.0)):
        assert waits.waiting_at_start(job, {}, NAMES[:1]) == "master-0 has not reported"
    connecting = replace(records["master-0"], state=RUNNING)
    assert waits.waiting_at_start(JOB, {"master-0": connecting}, NAMES[:1]) == (
        "master-0 is RUNNING, connecting to worker-0:2222, listening on 2222"
    )


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Return the ledger of a running job, with everything due at once."""
    monkeypatch.setattr(waits, "END_QUIET_SECONDS", 0.0)
    for name in ("_POLL_SECONDS", "_LAST_POLL_SECONDS", "_RETRY_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(follow, name, 0.02)
    ledger = Ledger(FolderBucket(tmp_path))
    put_job(ledger, JOB)
    write_replicas(ledger, make_replicas(RUNNING, RUNNING, RUNNING))
    return ledger


def write_replicas(ledger: Ledger, records: dict[str, ReplicaRecord]) -> None:
    for name, record in records.items():
        ledger.write_replica("job01", record, ledger.replica_version("job01", name))


def test_a_follower_updates_the_message_at_the_end(inventory: Inventory, ledger: Ledger) -> None:
    fleet: Any = NoHosts(inventory)
    messages: list[str] = []
    write_replicas(ledger, make_replicas(EXITED, RUNNING, EXITED))
    for event in Follower(fleet, ledger, JOB, NAMES, LogFilter()).events():
        if not isinstance(event, WaitReason) or not event.text:
            continue
        messages.append(event.text)
        if event.text == "waiting for worker-0 to end":
            write_replicas(ledger, make_replicas(EXITED, EXITED, EXITED))
            put_job(ledger, replace(JOB, state=JobState.SUCCEEDED))
        elif "look for files" in event.text:
            write_replicas(ledger, make_replicas(EXITED, EXITED, EXITED, unsaved=CHECKED))
    unique_messages = dict.fromkeys(text.replace("job to end: all its replicas have", "leader") for text in messages)
    assert [text.split()[2] for text in unique_messages if "leader" not in text][:2] == ["worker-0", "master-0,"]


def test_a_follower_prints_the_message_at_the_start_once(
    inventory: Inventory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "START_QUIET_SECONDS", 0.05)
    fleet: Any = NoHosts(inventory)
    write_replicas(ledger, make_replicas(PREPARING, RUNNING, RUNNING))
    messages: list[str] = []
    ticks = 0
    for event in Follower(fleet, ledger, JOB, NAMES, LogFilter(), for_screen=True).events():
        ticks += isinstance(event, follow.ReplicaRecords)
        if isinstance(event, Note) and event.text.startswith("nothing was printed"):
            messages.append(event.text)
        if ticks == 20:
            write_replicas(ledger, make_replicas(EXITED, EXITED, EXITED, unsaved=CHECKED))
            put_job(ledger, replace(JOB, state=JobState.FAILED))
    states = "master-0 is PREPARING; worker-0 is RUNNING; worker-1 is RUNNING"
    assert messages == [f"nothing was printed for 0 s: {states}"]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("live", [True, False])
def test_a_status_line_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    stream = FakeTerminal() if live else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.delenv("NO_COLOR", raising=False)
    status = terminal.StatusLine(" …")
    for text in ("one", "two\033[2J is far too long for it", "", ""):
        status.show(text)
    if live:
        assert stream.getvalue() == "one …\r\033[Ktwo␛[2J is far to …\r\033[K"
    else:
        assert stream.getvalue() == "one\ntwo␛[2J is far too long for it\n"


def test_the_status_line_is_cleared_before_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clears: list[str] = []
    events: list[Event] = [WaitReason("waiting for worker-0 to end"), Note("a note"), replace(JOB, state=JobState.FAILED)]

    class FakeFollower:
        def __init__(self, *_: object) -> None:
            pass

        def batches(self) -> list[list[Event]]:
            return [events]

    monkeypatch.setattr(client, "Follower", FakeFollower)
    monkeypatch.setattr(terminal.StatusLine, "clear", lambda _: clears.append("clear"))
    cluster: Any = SimpleNamespace(fleet=None, ledger=Ledger(FolderBucket(tmp_path)))
    end = logs.follow_plain(cluster, JOB, NAMES, LogFilter(), False)
    assert end == events[-1]
    assert capsys.readouterr().err == "waiting for worker-0 to end\na note\n"
    assert len(clears) == 4
