"""Log lines: the exact commands that read them, the order of several replicas, and how a line is shown."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import put_job

from jobs.folder import Folder
from jobs.ledger import Ledger
from jobs.queue import Entry, Queue
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from jobs.store import Item, StoreError
from ops.cluster.inventory import Inventory
from ops.errors import HostError, UsageError
from ops.logs import lines
from ops.logs.follow import Follower, Note
from ops.logs.lines import Line
from ops.logs.read import parse_lines


def line(time: float, replica: str, message: str = "x") -> Line:
    return Line(f"2026-01-31T12:00:{time:06.3f}Z", "INFO", replica, message)


def test_the_commands() -> None:
    log = "/var/lib/scaletier/logs/job01.jsonl"
    assert lines.read_command("job01", 100) == f"[ -e {log} ] || exit 66; exec tail -n 100 {log}"
    assert lines.read_command("job01", None).endswith(f"tail -n +1 {log}")
    assert lines.follow_command("job01", 5) == (
        "for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e /var/lib/scaletier/logs/job01.jsonl ] && break; sleep 0.03; done; "
        "tail -n 5 -s 0.1 -F /var/lib/scaletier/logs/job01.jsonl 2>/dev/null & cat >/dev/null; sleep 0.2; kill $!"
    )


def run(command: str, directory: Path) -> tuple[int, str]:
    ran = subprocess.run(
        command.replace(lines.LOG_DIR, str(directory)), shell=True, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout


def test_reading_a_log_on_a_host(tmp_path: Path) -> None:
    assert run(lines.read_command("job02", 2), tmp_path / "none") == (lines.NO_LOG, "")
    text = "".join(line(second, "ps-0").to_json() + "\n" for second in range(5))
    (tmp_path / "job02.jsonl").write_text(text)
    code, output = run(lines.read_command("job02", 2), tmp_path)
    assert (code, lines.parse_log(output, "ps-0")) == (0, [line(3, "ps-0"), line(4, "ps-0")])
    assert run(lines.read_command("job02", None), tmp_path) == (0, text)
    assert run(lines.read_command("job01", None), tmp_path) == (lines.NO_LOG, "")


def test_following_on_a_host_ends_with_its_reader(tmp_path: Path) -> None:
    (tmp_path / "job01.jsonl").write_text("a\nb\nc\n")
    assert run(f"{lines.follow_command('job01', 2)} </dev/null", tmp_path)[1] == "b\nc\n"
    assert run(f"{lines.follow_command('job02', None)} </dev/null", tmp_path)[1] == ""


@pytest.mark.parametrize(("text", "lines"), [("0", 0), ("100", 100), ("all", None)])
def test_lines(text: str, lines: int | None) -> None:
    assert parse_lines(text) == lines


@pytest.mark.parametrize("text", ["-1", "ten", "", "1.5"])
def test_lines_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="valid are 0 and above, and all"):
        parse_lines(text)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_line_survives_its_journey(message: str, severity: str) -> None:
    there = Line("2026-01-31T12:00:00.000Z", severity, "ps-0", message)
    assert "\n" not in there.to_json()
    assert lines.parse_log(there.to_json() + "\n", "other") == [there]


@pytest.mark.parametrize("text", ['{"time": "2026', "plain", "[]", "{}", "null", '{"time": 1, "severity": "INFO"}'])
def test_half_a_line_is_shown_as_it_is(text: str) -> None:
    assert lines.parse_line(text, "ps-0", "before") == Line("before", "INFO", "ps-0", text)


rising = st.lists(st.integers(0, 50), max_size=20).map(sorted)


@given(st.lists(rising, max_size=4))
def test_a_merge_is_in_order_and_complete(times: list[list[int]]) -> None:
    found = [[line(time / 10, f"worker-{i}", str(n)) for n, time in enumerate(log)] for i, log in enumerate(times)]
    merged = list(lines.merge(found))
    assert merged == sorted(merged, key=lambda line: line.time)
    for i, log in enumerate(found):
        assert [line for line in merged if line.replica == f"worker-{i}"] == log


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), max_size=60))
def test_following_holds_back_no_line_for_longer_than_the_window(events: list[tuple[int, int]]) -> None:
    """Each event is a line written at some time in ms that arrives some ms later."""
    reorder = lines.Reorder(window=0.08)
    arrivals = sorted((written + delay, n, written) for n, (written, delay) in enumerate(events))
    shown: list[tuple[int, str]] = []
    now = 0
    for at, n, written in [*arrivals, (1000, -1, 0)]:
        while now < at:  # time passes in ms
            shown += [(now, one.message) for one in reorder.ready(now / 1000)]
            now += 1
        if n >= 0:
            reorder.add(line(written / 1000, "ps-0", str(n)), at / 1000)
            wait = reorder.wait(at / 1000)
            assert wait is not None
            assert 0 <= wait <= 0.08
    assert list(reorder.rest()) == []
    arrived = {str(n): at for at, n, _ in arrivals}
    assert sorted(message for _, message in shown) == sorted(arrived)
    assert all(at - arrived[message] <= 81 for at, message in shown)
    # No line was later than the window, so the order is that of time.
    times = [events[int(message)][0] for _, message in shown]
    assert times == sorted(times)


def test_a_line_is_shown_in_columns() -> None:
    form = lines.Format(["ps-0", "worker-10"], colours=False)
    assert re.fullmatch(
        r"\d\d:\d\d:01\.500 WARNING ps-0       hello", form(Line("2026-01-31T12:00:01.500Z", "WARNING", "ps-0", "hello"))
    )
    assert form(Line("", "INFO", "ps-0", "half")) == "             INFO    ps-0       half"
    error = Line("2026-01-31T12:00:01.500Z", "ERROR", "ps-0", "hello")
    plain, coloured = (lines.Format(["ps-0"], colours=colours)(error) for colours in (False, True))
    assert coloured != plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


class Away(Folder):
    """A bucket that may not answer."""

    away = False

    def read(self, name: str) -> Item | None:
        if self.away:
            raise StoreError("no answer within 30 s")
        return super().read(name)


class NoHosts:
    """A cluster of whose hosts none answers."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = replace(inventory, poll_seconds=0.02)

    def connection(self, name: str) -> None:
        raise HostError(name, "does not answer")


def test_a_queued_job_is_followed_from_its_place_in_the_queue(inventory: Inventory, tmp_path: Path) -> None:
    host = ["master-0"]
    store = Away(tmp_path)
    ledger = Ledger(store)
    put_job(ledger, JobRecord("job02", wants={"master-0": host}))
    entries = [Entry("job00", host, held=True), Entry("job01", host, priority=1), Entry("job02", host)]
    ledger.change_queue(lambda _: Queue(entries))
    for entry in entries[:2]:
        put_job(ledger, JobRecord(entry.jobId, JobState.RUNNING, hosts=host))
    seen: list[str] = []
    for event in Follower(NoHosts(inventory), ledger, JobRecord("job02"), host, None).events():  # type: ignore[arg-type]
        assert not isinstance(event, Line)
        seen.append(event.text if isinstance(event, Note) else event.state)
        if seen[-1] == "job02 is QUEUED behind job00, job01":
            time.sleep(0.2)  # it is said once
            ledger.change_queue(lambda queue: queue.without(entries[0]))
        elif seen[-1] == "job02 is QUEUED behind job01":
            # As whoever gave the hosts back was killed before they were given away: whoever looks at the queue does it.
            ledger.change_queue(lambda _: Queue([entries[2]]))
            until = time.monotonic() + 10
            while ledger.queue().holder("master-0") is None:
                assert time.monotonic() < until
                time.sleep(0.01)
            put_job(ledger, JobRecord("job02", JobState.PREPARING, hosts=host))
        elif seen[-1] == "PREPARING":
            store.away = True
        elif "does not answer (" in seen[-1]:
            time.sleep(0.1)
            store.away = False
        elif seen[-1] == "the bucket answers again":
            put_job(ledger, JobRecord("job02", JobState.SUCCEEDED, hosts=host))
    assert seen.count("master-0 does not answer; trying again") == 1
    seen.remove("master-0 does not answer; trying again")
    assert sorted(seen[:2]) == ["QUEUED", "job02 is QUEUED behind job00, job01"]
    assert seen[2:] == [
        "job02 is QUEUED behind job01",
        "PREPARING",
        "the bucket does not answer (no answer within 30 s); the job goes on, trying again",
        "the bucket answers again",
        "SUCCEEDED",
        "SUCCEEDED",
    ]


def test_the_last_lines_of_a_job_are_waited_for(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has stopped is waited for no longer, one of which nothing is heard only for a while."""
    monkeypatch.setattr("ops.logs.follow._OTHERS_SECONDS", 0.6)
    monkeypatch.setattr("ops.logs.follow._DRAIN_SECONDS", 0.1)
    ledger = Ledger(Folder(tmp_path))
    record = JobRecord("job01", JobState.FAILED, hosts=["master-0"])
    put_job(ledger, record)
    took = []
    for state in (ReplicaState.RUNNING, ReplicaState.EXITED):
        ledger.write_replica("job01", ReplicaRecord("master-0", state), ledger.replica_version("job01", "master-0"))
        began = time.monotonic()
        list(Follower(NoHosts(inventory), ledger, record, ["master-0"], None).events())  # type: ignore[arg-type]
        took.append(time.monotonic() - began)
    assert took[0] >= 0.6
    assert took[1] < took[0] - 0.2
