"""Check the screen of a job: from events to frames, without a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from test_terminal import Stream

from jobs.chunks import LogFilter
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.states import JobState, ReplicaState
from ops import client, terminal
from ops.logs.follow import TICK, Event, Note, ReplicaRecords, WaitReason
from ops.logs.lines import LogLine
from ops.screen import job as module
from ops.screen.job import LINES_KEPT, LINES_LEFT, JobScreen
from ops.screen.render import Frame, Screen, cut, format_cell, join_lines, layout_columns, print_frame, sanitize
from ops.screen.series import CAPACITY, CountRate, Series, bar, progress_line, sparkline

ROOT = Path(__file__).resolve().parents[2]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
RUNNING = JobRecord("job01", JobState.RUNNING, startTime="2026-01-31T12:00:00.000Z", steps=200)


def line(seconds: float, message: str, replica: str = "master-0", severity: str = "INFO") -> LogLine:
    moment = datetime.fromtimestamp(NOON + seconds, UTC).isoformat(timespec="milliseconds")
    return LogLine(moment.replace("+00:00", "Z"), severity, replica, message)


def styles(text: Text) -> dict[str, str]:
    """Return the style of each styled part of a line."""
    return {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}


def rows(frame: Frame) -> list[str]:
    return [line.plain for line in frame]


@pytest.fixture
def screen() -> JobScreen:
    return JobScreen(RUNNING, ["master-0", "worker-0"])


def test_the_frame_of_a_running_job(screen: JobScreen) -> None:
    for second in range(11):
        text = f"Train [master/0], step {10 * second + 1}: loss: {2 - second / 10:.3f}, accuracy: 0.{second:03} (1.0 sec)"
        screen.add(line(second, text), NOON + second)
    screen.add(line(10.5, "Eval, step 100: loss: 0.900, accuracy: 0.700", severity="ERROR"), NOON + 11)
    usage = Usage(7.0, 1.25, 512_300_000)
    replicas = [
        ReplicaRecord("master-0", ReplicaState.RUNNING, usage=usage),
        ReplicaRecord("worker-0", ReplicaState.RUNNING, restarts=2),
        ReplicaRecord("stranger"),
    ]
    screen.add(ReplicaRecords({replica.name: replica for replica in replicas}), NOON + 11)
    frame_rows = rows(screen.frame(NOON + 12, 15))
    assert frame_rows[:10] == [
        "job01  RUNNING  12.0 s",
        "step     101 of 200  ━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 50%  9.9 s to go",
        "steps/s  10      ██████████  10 on average",
        "loss     1.000   █▇▇▆▅▅▄▃▂▂▁",
        "accuracy 0.010   ▁▂▂▃▄▅▅▆▇▇█",
        "eval     loss 0.900, accuracy 0.700 at step 100",
        "",
        "REPLICA   STATE    STEPS/S  LAST LINE  RESTARTS   CPU    MEMORY",
        "master-0  RUNNING       10  1.5 s ago         0  125%  512.3 MB",
        "worker-0  RUNNING        -          -         2     -         -",
    ]
    assert (frame_rows[10], len(frame_rows)) == ("", 15)
    assert frame_rows[-1].endswith("ERROR   master-0  Eval, step 100: loss: 0.900, accuracy: 0.700")
    assert styles(screen.frame(NOON + 12, 15)[-1])["Eval, step 100: loss: 0.900, accuracy: 0.700"] == "red"
    title, _, speed, *_, master, worker = screen.frame(NOON + 12, 15)[:10]
    assert styles(title) == {"job01": "bold", "RUNNING": "blue"}
    assert styles(speed) == {"██████████": "cyan"}
    assert (styles(master).get("0"), styles(worker)["2"]) == (None, "yellow")


def test_a_replicas_own_rate_is_shown(screen: JobScreen) -> None:
    for second in range(3):
        message = f"Train [worker/0], step {100 * second}: loss: 1.0 (1.0 sec) 100.0 global steps/s, 25.5 local steps/s"
        screen.add(line(second, message, "worker-0"), NOON + second)
        rate = "25.5" if second else "-"  # one step alone has no rate
        row = rows(screen.frame(NOON + second + 1, 40))[-3 - second]
        assert row.split() == ["worker-0", "-", rate, "1.0", "s", "ago", "-", "-", "-"]
    assert rows(screen.frame(NOON + 50, 40))[-5].split() == ["worker-0", "-", "-", "48.0", "s", "ago", "-", "-", "-"]


def test_the_frame_of_a_queued_job() -> None:
    queued = replace(RUNNING, state=JobState.QUEUED, startTime=None, createTime="2026-01-31T11:59:00.000Z")
    screen = JobScreen(queued, [])
    screen.add(line(0, "hello", ""), NOON)
    assert [row[13:] for row in rows(screen.frame(NOON, 20))[2:]] == ["INFO      hello"], "without a replica"
    screen = JobScreen(queued, ["master-0"])
    screen.add(Note("job01 is QUEUED behind job00"), NOON)
    frame_rows = rows(screen.frame(NOON, 20))
    assert frame_rows[:5] == [
        "job01  QUEUED  1 min 0 s",
        "",
        "REPLICA   STATE  STEPS/S  LAST LINE  RESTARTS  CPU  MEMORY",
        "master-0  -            -          -         -    -       -",
        "",
    ]
    assert frame_rows[5].endswith(":00.000 job01 is QUEUED behind job00")


SPEED = "steps/s  1       ██████████  1 on average"


@pytest.mark.parametrize(
    ("steps", "template", "expected"),
    [
        (None, "step {}", ["step     11", SPEED]),
        (None, "step {}/50", ["step     11 of 50  ━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 22%  39.0 s to go", SPEED]),
        (100, "Epoch {}/20", ["epoch    11 of 20  ━━━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 55%  9.0 s to go"]),
        (100, "Epoch {}/5", ["epoch    11 of 5  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 220%"]),
        (5, "step {}", ["step     11", SPEED]),
        (11, "step {}", ["step     11 of 11  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100%", SPEED]),
    ],
)
def test_the_remaining_time_is_estimated(steps: int | None, template: str, expected: list[str]) -> None:
    screen = JobScreen(replace(RUNNING, steps=steps), ["master-0"])
    for second in range(11):
        screen.add(line(second, template.format(second + 1)), NOON + second)
    frame_rows = rows(screen.frame(NOON + 10, 20))
    assert frame_rows[1 : frame_rows.index("")] == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["step 5", "Epoch 1/10"], ["step     5 of 200  ━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 2%"]),
        (["Epoch 1/10", "step 5"], ["step     5 of 10  ━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 50%"]),
        (["Epoch 1/10", "Eval, step 7"], ["epoch    1 of 10  ━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 10%"]),
        (
            ["Eval, step 8: loss: 0.5"],
            ["step     8 of 200  ━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 4%", "eval     loss 0.5 at step 8"],
        ),
        (["Eval: accuracy: 0.5"], ["eval     accuracy 0.5"]),
        (["Eval Epoch 1/10 loss: 0.9"], ["eval     loss 0.9 at epoch 1"]),
        (
            ["Eval Epoch 1/10 loss: 0.9", "Epoch 2/10"],
            ["epoch    2 of 10  ━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 20%", "eval     loss 0.9 at epoch 1"],
        ),
        (["Eval: accuracy: 0.5", "Eval, step 8"], ["step     8 of 200  ━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 4%"]),
        (["loss: 0.5"], ["loss     0.5     ▄"]),
        (["nothing to read"], []),
    ],
)
def test_steps_epochs_and_evaluations_are_told_apart(screen: JobScreen, messages: list[str], expected: list[str]) -> None:
    for message in messages:
        screen.add(line(0, message), NOON)
    frame_rows = rows(screen.frame(NOON, 20))
    assert frame_rows[1 : frame_rows.index("")] == expected


def test_the_last_line_of_a_replica_has_an_age(screen: JobScreen) -> None:
    def ages(now: float) -> list[str]:
        return [row[26:35] for row in rows(screen.frame(now, 40))[3:5]]

    screen.add(line(5, "late"), NOON + 5)
    screen.add(line(2, "earlier, by another clock"), NOON + 5)
    screen.add(replace(line(0, "without a time", "worker-0"), time=""), NOON + 4)
    screen.add(line(9, "of a replica that is not shown", "ps-0"), NOON + 5)
    assert ages(NOON + 6) == ["1.0 s ago", "2.0 s ago"]
    assert ages(NOON + 4.5) == ["0.0 s ago", "0.5 s ago"], "a clock that is slow"


def test_a_waiting_job_shows_what_it_waits_for(screen: JobScreen) -> None:
    for event in (TICK, WaitReason("waiting for worker-0 to end"), WaitReason(""), Note("a\x1b[31m b")):
        screen.add(event, NOON)
    notes = screen.frame(NOON - 9, 40)[6:]
    assert [row.plain[13:] for row in notes] == ["waiting for worker-0 to end", "a b"]
    assert {str(row.style) for row in notes} == {"dim"}
    assert rows(screen.frame(NOON - 9, 40))[0] == "job01  RUNNING  0.0 s", "a clock that is slow"


@pytest.mark.parametrize(
    ("rate", "expected"), [(None, "-"), (0.2346, "0.235"), (18.72, "18.7"), (99.9, "99.9"), (1234.4, "1234")]
)
def test_rates_have_three_digits(rate: float | None, expected: str) -> None:
    assert module._rate(rate) == expected


def test_the_trials_of_a_tuning_job_are_shown() -> None:
    tuned = replace(RUNNING, trainingInput={"hyperparameters": {"goal": "MINIMIZE"}})
    screen = JobScreen(tuned, ["master-0", "worker-0"])
    heads = "REPLICA   STATE  TRIAL  LAST LINE  RESTARTS  CPU  MEMORY"
    none = [f"{name}  -          -          -         -    -       -" for name in ("master-0", "worker-0")]
    assert rows(screen.frame(NOON, 30)) == ["job01  RUNNING  0.0 s", "", heads, *none]
    messages = [
        ("master-0", "Trial 1 of 4: --x=1"),
        ("worker-0", "Trial 2 of 4, again (lost): --x=2"),
        ("master-0", "Trial 1 SUCCEEDED: loss 0.5 at step 10"),
        ("master-0", "Trial 3 of 4: --x=3"),
        ("master-0", "step 7"),
        ("worker-0", "error: trial 2 FAILED: x"),
        ("master-0", "Trial 3 SUCCEEDED: loss 0.25 at step 9"),
        ("master-0", "Trial 4 of 4: --x=4"),
        ("worker-0", "Trial 9 SUCCEEDED: loss nan at step 9"),
        ("worker-0", "Trial 8 SUCCEEDED: loss word at step 9"),
    ]
    shown = []
    for second, (replica, message) in enumerate(messages):
        screen.add(line(second, message, replica), NOON + second)
        frame_rows = rows(screen.frame(NOON + second + 1, 30))
        table = frame_rows.index(heads)
        shown.append((frame_rows[1 : table - 1], [row.split()[2] for row in frame_rows[table + 1 : table + 3]]))
    begun = "trials   0 of 4  ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 0%"
    one = "trials   1 of 4  ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25%  6.0 s to go"
    two = "trials   2 of 4  ━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 50%  5.0 s to go"
    three = "trials   3 of 4  ━━━━━━━━━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌ 75%  2.0 s to go"
    first_best = ["loss     ▄", "best     0.5, trial 1: --x=1"]
    best = ["loss     █▁", "best     0.25, trial 3: --x=3"]
    assert shown == [
        ([begun], ["1", "-"]),
        ([begun], ["1", "2"]),
        ([one, *first_best], ["-", "2"]),
        ([one, *first_best], ["3", "2"]),
        ([one, *first_best], ["3", "2"]),
        ([two, *first_best], ["3", "-"]),
        ([three, *best], ["-", "-"]),
        ([three, *best], ["4", "-"]),
        (["trials   4 of 4  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100%", *best], ["4", "-"]),
        (["trials   5 of 5  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100%", *best], ["4", "-"]),
    ]
    screen.add(replace(tuned, state=JobState.SUCCEEDED, endTime="2026-01-31T12:00:11.000Z"), NOON + 11)
    frame = screen.final_frame(NOON + 99)
    assert rows(frame)[: len(best) + 8] == [
        "job01  SUCCEEDED  11.0 s",
        "trials   5 of 5  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100%",
        *best,
        "",
        heads,
        *none,
        "",
        *rows(frame)[9:10],
    ]
    assert [row[13:] for row in rows(frame)[9:]] == [f"INFO    {name}  {message}" for name, message in messages]
    assert str(frame[3].style) == "bold"


def test_a_silent_or_an_ended_job_has_no_estimate(screen: JobScreen) -> None:
    for second in range(11):
        screen.add(line(second, f"step {second}"), NOON + second)
    assert "to go" in rows(screen.frame(NOON + 45, 20))[1]
    frame_rows = rows(screen.frame(NOON + 60, 20))
    assert "to go" not in frame_rows[1]
    assert frame_rows[2].startswith("steps/s  -       █")
    screen.add(replace(RUNNING, state=JobState.CANCELLED, endTime="2026-01-31T12:00:11.000Z"), NOON + 11)
    frame_rows = rows(screen.frame(NOON + 11, 20))
    assert (frame_rows[0], frame_rows[1][-5:]) == ("job01  CANCELLED  11.0 s", "╌╌ 5%")
    assert frame_rows[2].startswith("steps/s  1       █")


def test_a_restart_from_a_checkpoint_lowers_the_step(screen: JobScreen) -> None:
    screen.add(line(0, "step 50", "worker-0"), NOON)
    screen.add(line(1, "step 40", "master-0"), NOON + 1)
    assert "step     50 of 200" in rows(screen.frame(NOON, 20))[1], "an older step of another replica"
    screen.add(line(2, "step 30", "worker-0"), NOON + 2)
    assert "step     30 of 200" in rows(screen.frame(NOON, 20))[1]


def test_lost_and_failed_replicas_are_shown(screen: JobScreen) -> None:
    screen.add(ReplicaRecords({"worker-0": ReplicaRecord("worker-0", ReplicaState.RUNNING)}), NOON)
    screen.add(replace(RUNNING, lostReplicas=["worker-0"]), NOON)
    assert rows(screen.frame(NOON, 20))[-1].startswith("worker-0  LOST")
    exited: list[dict[str, Any]] = [
        {"name": "master-0", "state": "EXITED", "exitCode": 143, "restarts": 0},
        {"name": "worker-0", "state": "EXITED", "exitCode": 3, "restarts": 1},
    ]
    failed = JobRecord("job01", JobState.FAILED, startTime=RUNNING.startTime, endTime="2026-01-31T12:00:09.000Z")
    screen.add(replace(failed, replicas=exited, errorMessage="it \x1b[31mfailed\nmore"), NOON)
    *head, master, worker = screen.frame(NOON, 20)
    assert rows(head)[:2] == ["job01  FAILED  9.0 s", "it failed"]
    assert styles(master)["EXITED 143"] == "dim"
    assert styles(worker)["EXITED 3"] == "red"
    assert worker.plain.split() == ["worker-0", "EXITED", "3", "-", "-", "1", "-", "-"]


@pytest.mark.parametrize(
    ("state", "code", "job", "expected", "style"),
    [
        (ReplicaState.EXITED, 0, JobState.RUNNING, "EXITED", "dim"),
        (ReplicaState.EXITED, 143, JobState.RUNNING, "EXITED 143", "red"),
        (ReplicaState.EXITED, 143, JobState.FAILED, "EXITED 143", "dim"),
        (ReplicaState.RUNNING, 1, JobState.RUNNING, "RUNNING", "blue"),
        (ReplicaState.PREPARING, None, JobState.RUNNING, "PREPARING", ""),
    ],
)
def test_the_state_of_a_replica_has_its_exit_code(
    state: ReplicaState, code: int | None, job: JobState, expected: str, style: str
) -> None:
    cell = module._replica_state(replace(RUNNING, state=job), ReplicaRecord("master-0", state, exitCode=code))
    assert (cell.plain, str(cell.style)) == (expected, style)


def test_the_steps_of_a_job_may_change(screen: JobScreen) -> None:
    screen.add(line(0, "step 5"), NOON)
    for steps, expected in ((None, "5 of 200"), (400, "5 of 400")):
        screen.add(replace(RUNNING, steps=steps), NOON)
        assert rows(screen.frame(NOON, 20))[1].startswith(f"step     {expected}  ")


@pytest.mark.parametrize(
    ("lines", "table", "log"),
    [
        (-1, 0, 0), (0, 0, 0), (1, 0, 0), (4, 0, 0), (5, 0, 0), (6, 0, 1), (7, 0, 2), (11, 0, 3), (12, 2, 3), (13, 3, 3),
        (41, 31, 3), (42, 32, 3), (43, 32, 3),
    ],
)  # fmt: skip
def test_a_small_terminal_shows_the_head_then_lines_then_the_table(lines: int, table: int, log: int) -> None:
    names = ["master-0", *(f"worker-{n}" for n in range(30))]
    screen = JobScreen(replace(RUNNING, lostReplicas=["worker-29"]), names)
    screen.add(ReplicaRecords({name: ReplicaRecord(name, ReplicaState.RUNNING) for name in names[11:]}), NOON)
    for second in range(3):
        screen.add(line(second, f"step {second}: loss: 1.0", names[second]), NOON + second)
    frame_rows = rows(screen.frame(NOON + 3, lines))
    assert len(frame_rows) <= max(lines, 1)
    head = [
        "job01  RUNNING  3.0 s",
        "step     2 of 200  ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 1%  3 min 18 s to go",
        "steps/s  1       ██  1 on average",
        "loss     1.0     ▄▄▄",
    ][: max(lines, 1)]
    assert frame_rows[:4] == head
    parts = "\n".join(frame_rows[4:]).strip("\n").split("\n\n")
    assert [len(part.splitlines()) for part in parts if part] == [count for count in (table, log) if count]
    if table == 2:
        assert parts[0].splitlines()[-1] == "and 31 more: 11 without a report, 20 RUNNING"
    if table == 3:
        assert parts[0].splitlines()[-1] == "and 30 more: 10 without a report, 20 RUNNING"
    if log:
        assert [row[13:] for row in frame_rows[-log:]] == [
            f"INFO    {name:<9}  step {second}: loss: 1.0" for second, name in enumerate(names[:3])
        ][-log:]


def test_the_final_frame_has_all_warnings_and_the_last_lines(screen: JobScreen) -> None:
    screen.add(line(0, "beware", severity="WARNING"), NOON)
    screen.add(Note("the bucket answers again"), NOON)
    for second in range(100):
        screen.add(line(second, f"word {second}"), NOON)
    frame_rows = rows(screen.final_frame(NOON + 1))
    assert frame_rows[0] == "job01  RUNNING  1.0 s"
    log = frame_rows[frame_rows.index("") :][5:]
    assert log[0] == f"{102 - 2 - LINES_LEFT} lines not shown here: fab logs job01 --lines all"
    assert [row.rpartition("  ")[2] for row in log[1:2]] == ["beware"]
    assert log[2].endswith("the bucket answers again")
    assert [row.rpartition(" ")[2] for row in log[3:]] == [str(n) for n in range(80, 100)]


def test_the_screens_memory_is_bounded(screen: JobScreen) -> None:
    for second in range(5000):
        screen.add(line(second / 10, "step 1 " + "x" * 5000, severity="ERROR"), NOON)
    kept_lines = [kept_line for _, kept_line in (*screen._newest, *screen._warnings)]
    assert len(kept_lines) == 2 * LINES_KEPT
    assert max(len(kept_line.message) for kept_line in kept_lines) == 1000
    assert len(screen._step_rate.rates.values) <= CAPACITY


@given(st.text())
def test_sanitized_text_is_printable(text: str) -> None:
    safe_text = sanitize(text)
    assert safe_text.isprintable()
    assert len(safe_text) <= 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\tb\rc\nd\x00e\u202ef\u200bg", "a    b␍c d␀e\\u202ef·g"),
        ("[red]Train[/red] [link=x]é 漢", "[red]Train[/red] [link=x]é 漢"),
    ],
)
def test_escape_sequences_are_removed_or_shown(text: str, expected: str) -> None:
    assert sanitize(text) == expected


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([1.0, 1.0], 5, "▄▄"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
    ],
)
def test_sparklines(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_a_long_series_keeps_its_shape() -> None:
    series = Series(8)
    for value in [*range(100), float("nan"), float("inf")]:
        series.add(value)
    assert series.values == [7.5, 23.5, 39.5, 55.5, 71.5, 87.5, 97.5]
    assert sparkline([9.9, 10.0], 5, least=0.0) == "██", "from zero on, small changes do not show"


def test_recent_and_mean_step_rates() -> None:
    step_rate = CountRate()
    assert (step_rate.rate(0), step_rate.mean, step_rate.seconds_to(10, 0)) == (None, None, None)
    for second in range(101):
        step_rate.add_point(float(second), second if second < 50 else 50 + 4 * (second - 50), float(second))
    assert (step_rate.rate(100.0), step_rate.mean, step_rate.seconds_to(258, 100.0)) == (4.0, 2.5, 2.0)
    step_rate.add_point(101.0, 3, 101.0)
    assert step_rate.count == 250
    assert step_rate.seconds_to(3, 101.0) == 0.0
    assert (step_rate.rate(140.0), step_rate.rate(141.0), step_rate.seconds_to(258, 141.0)) == (4.0, None, None)


def test_a_recent_rate_is_that_of_the_last_20_seconds() -> None:
    step_rate = CountRate()
    for second in range(31):
        step_rate.add_point(float(second), 10 * second * second, float(second))
        step_rate.add_point(second + 0.1, 10 * second * second + 1, second + 0.1)  # too soon after the last
        step_rate.add_point(second + 0.5, 10 * second * second + 5, second + 0.5)
    assert step_rate.rate(30.5) == (9005 - 1000) / (30.5 - 10)
    assert (step_rate.mean, step_rate.count) == (9005 / 30.5, 9005)
    assert step_rate.rates.values[:3] == [10.0, 10.0, 18.0]
    assert len(step_rate.rates.values) == 31, "one a second"


@pytest.mark.parametrize(
    ("final", "maximum", "expected"),
    [
        (False, 40, "steps    10 of 40  ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25%  3.0 s to go"),
        (True, 40, "steps    10 of 40  ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25%"),
        (False, None, "steps    10"),
        (False, 0, "steps    10"),
    ],
)
def test_progress_has_a_share_and_the_time_left(final: bool, maximum: int | None, expected: str) -> None:
    step_rate = CountRate()
    for second in range(2):
        step_rate.add_point(float(second), 10 * second, float(second))
    assert progress_line("steps", step_rate, maximum, final, 1.0).plain == expected
    for count, most, share in ((29, 50, "58%"), (1999, 2000, "99%"), (2000, 2000, "100%")):
        step_rate.add_point(2.0, count, 2.0)
        assert progress_line("steps", step_rate, most, True, 2.0).plain.split()[-1] == share, "rounded down"
    assert (bar(0.5, 4), bar(-1, 4), bar(7, 4)) == ("━━╌╌", "╌╌╌╌", "━━━━")


class Terminal:
    """A screen that records what is drawn."""

    lines = 24

    def __init__(self) -> None:
        self.drawn: list[Frame] = []

    def show(self, frame: Frame) -> None:
        self.drawn.append(frame)


def test_the_screen_is_drawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch, screen: JobScreen) -> None:
    clock = 0.5
    monkeypatch.setattr(module.time, "monotonic", lambda: clock)
    monkeypatch.setattr(module.time, "time", lambda: NOON + clock)
    final = replace(RUNNING, state=JobState.SUCCEEDED)

    def events() -> Iterator[Event]:
        nonlocal clock
        for _ in range(10_000):
            clock += 0.001
            yield line(0, "step 1")
        yield from (TICK, Note("noted"), ReplicaRecords({}), RUNNING, final)

    fake_terminal = Terminal()
    assert module._show(events(), screen, fake_terminal) is final  # type: ignore[arg-type]
    assert len(fake_terminal.drawn) == 40
    assert rows(fake_terminal.drawn[0])[0] == "job01  RUNNING  0.5 s"
    final_rows = rows(screen.final_frame(NOON))
    assert [row for row in final_rows if "noted" in row]
    assert (final_rows[0].split()[:2], final_rows[1].split()[:2]) == (["job01", "SUCCEEDED"], ["step", "1"])
    assert len([row for row in final_rows if row.endswith("master-0  step 1")]) == LINES_LEFT - 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_followed_job_leaves_its_last_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: bool
) -> None:
    final = replace(RUNNING, state=JobState.SUCCEEDED, endTime="2026-01-31T12:00:09.000Z")
    followers: list[tuple[tuple[object, ...], dict[str, object]]] = []

    class FakeFollower:
        def __init__(self, *arguments: object, **options: object) -> None:
            followers.append((arguments, options))

        def events(self) -> Iterator[Event]:
            yield final
            if interrupted:
                raise KeyboardInterrupt

    class FakeScreen(Terminal):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            capsys.readouterr()

    monkeypatch.setattr(client, "Follower", FakeFollower)
    monkeypatch.setattr(module, "Screen", FakeScreen)
    cluster: Any = SimpleNamespace(fleet="fleet", ledger="ledger")
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            module.follow(cluster, RUNNING, ["master-0"], LogFilter(5))
    else:
        assert module.follow(cluster, RUNNING, ["master-0"], LogFilter(5)) is final
    assert followers == [(("fleet", "ledger", RUNNING, ["master-0"], LogFilter(5), True), {})]
    assert capsys.readouterr().out.splitlines() == [
        "job01  SUCCEEDED  9.0 s",
        "",
        "REPLICA   STATE  STEPS/S  LAST LINE  RESTARTS  CPU  MEMORY",
        "master-0  -            -          -         -    -       -",
        "",
    ]


def test_the_screen_is_the_whole_terminal_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> str:
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    out, err = Stream(True), Stream(True)
    for name, value in {"TERM": "xterm", "COLUMNS": "20", "LINES": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    threads = set(threading.enumerate())
    with Screen() as screen:
        assert (sys.stdout, sys.stderr, screen.lines) == (out, err, 3)
        assert not set(threading.enumerate()) - threads
        assert written() == "\x1b[?1049h\x1b[H\x1b[?25l"
        screen.show([Text("one"), Text("x" * 30)])
        assert written() == f"\x1b[H{'one':<20}\n{'x' * 19}…\n{'':<20}"
        screen.show([Text(each) for each in "abcd"])
        assert written() == f"\x1b[H{'a':<20}\n{'b':<20}\n{'c':<20}"
    assert written() == "\x1b[?25h\x1b[?1049l"
    assert err.getvalue() == ""


@pytest.mark.parametrize(
    ("most", "expected"),
    [(5, "0 1 2 3 4"), (4, "0 1 2 and 2 more jobs"), (2, "0 and 4 more jobs"), (1, "0"), (0, ""), (-1, "")],
)
def test_a_cut_table_counts_the_rest(most: int, expected: str) -> None:
    assert " ".join(rows(cut([Text(str(n)) for n in range(5)], most, "jobs"))) == expected


@pytest.mark.parametrize(
    ("value", "expected", "style"), [(None, "-", "dim"), ("", "-", "dim"), (0, "0", "red"), ("a\x1b[1mb", "ab", "red")]
)
def test_cells_without_a_value_are_a_dash(value: object, expected: str, style: str) -> None:
    cell = format_cell(value, "red")
    assert (cell.plain, str(cell.style)) == (expected, style)


def test_printed_frames_have_full_lines_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = layout_columns(("HEAD", "RIGHT"), [(Text("[bold]x[/bold]"), Text("1"))], {"RIGHT"})
    print_frame([Text.assemble("[red]a[/red] :smile: ", ("b" * 300, "red")), Text(), *table])
    assert capsys.readouterr().out.splitlines() == [
        "[red]a[/red] :smile: " + "b" * 300,
        "",
        "HEAD            RIGHT",
        "[bold]x[/bold]      1",
    ]


def test_columns_use_the_display_width() -> None:
    cells = [[Text(text) for text in row] for row in (("漢字", "5"), ("a", "12345"))]
    assert rows(layout_columns(("A", "BC"), cells, {"BC"})) == ["A        BC", "漢字      5", "a     12345"]
    cells = [[Text("漢字"), Text("5")], [Text("a"), Text("12345")]]
    assert rows(layout_columns(("A", "BC"), cells)) == ["A     BC", "漢字  5", "a     12345"], "without blanks at the end"


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abcdef", 6, "abcdef"), ("abcdef", 5, "abcd…"), ("abc def", 1, "…"), ("漢字x", 4, "漢 …"), ("", 3, "")],
)
def test_a_too_long_line_is_truncated(text: str, width: int, expected: str) -> None:
    console = Console(file=io.StringIO(), width=width)
    lines = console.render_lines(join_lines([Text.assemble((text[:3], "red"), text[3:]), Text("z")]), pad=False)
    assert ["".join(segment.text for segment in line) for line in lines] == [expected, "z"]


@pytest.mark.parametrize(
    ("stdout", "stderr", "term", "encoding", "supported"),
    [
        (True, True, "xterm", "utf-8", True),
        (False, True, "xterm", "utf-8", False),
        (True, False, "xterm", "utf-8", False),
        (True, True, "dumb", "utf-8", False),
        (True, True, "", "utf-8", False),
        (True, True, "xterm", "latin-1", False),
    ],
)
def test_a_screen_needs_a_terminal_and_utf_8(
    monkeypatch: pytest.MonkeyPatch, stdout: bool, stderr: bool, term: str, encoding: str, supported: bool
) -> None:
    monkeypatch.setattr(Stream, "encoding", encoding)
    monkeypatch.setattr(sys, "stdout", Stream(stdout))
    monkeypatch.setattr(sys, "stderr", Stream(stderr))
    monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM", raising=False)
    assert terminal.supports_screen() is supported


def test_plain_output_does_not_import_rich() -> None:
    code = "import sys; import ops.screen.logs, ops.logs.follow, ops.submit.runner, ops.terminal; print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
