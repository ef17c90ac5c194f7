"""A trainer's output in the log and in what the agent reports of it, and the signals of a stop, with a fake process."""

from __future__ import annotations

import math
import os
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from hosts.agent import log as log_module
from hosts.agent import trainer as trainer_module
from hosts.agent.log import Log, format_time
from hosts.agent.process import Child, ProgramSpec
from hosts.agent.replica_rules import Exit
from hosts.agent.trainer import TAIL_CHARACTERS, TAIL_LINES, Trainer
from jobs.chunks import ChunkFolder, ChunkReader
from jobs.firsterror import FirstError
from jobs.progress import JobProgress

NOW = 1769860800.0
STARTUP_MESSAGE = "I0000 00:00:1795315086.015852     267 port.cc:153] oneDNN custom operations are on. You may see"


class FakeProcess:
    """A process whose output the test writes, and which ends when the test sets its exit."""

    pid = 7

    def __init__(self, output: int) -> None:
        self.output = os.dup(output)
        self.exit: Exit | None = None
        self.calls: list[str] = []

    def stop(self, seconds: float) -> None:
        self.calls.append(f"stop {seconds:g}")

    def signal(self, number: signal.Signals) -> None:
        self.calls.append(number.name)

    def ended(self) -> bool:
        return self.exit is not None

    def reap(self) -> Exit:
        self.calls.append("reap")
        assert self.exit is not None
        return self.exit


class Started:
    """A trainer with its fake process, its clock and its log."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, stop_signal_to: str = "main") -> None:
        self.now = 100.0
        self.log = Log(folder, "job01", "master-0")
        run = ProgramSpec("job01", ["x"], folder, env or {}, stop_signal_to=stop_signal_to)
        self.trainer = Trainer(run, self.log, self.start)

    def start(self, run: ProgramSpec, output: int) -> FakeProcess:
        self.process = FakeProcess(output)
        return self.process

    def prints(self, *lines: str) -> None:
        os.write(self.process.output, "".join(f"{line}\n" for line in lines).encode())

    def ends(self, status: int = 0, left: int = 0) -> Exit | None:
        with suppress(OSError):
            os.close(self.process.output)
        self.process.exit = Exit(status, processes_left=left)
        return self.trainer.poll()

    def logged(self) -> list[str]:
        self.log.roll()
        return [entry.line.decode() for entry in ChunkReader(ChunkFolder(self.log.path)).entries()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    time = SimpleNamespace(time=lambda: NOW, monotonic=lambda: now[0])
    monkeypatch.setattr(trainer_module, "time", time)
    monkeypatch.setattr(log_module, "time", time)
    return now


def line(severity: str, message: str) -> str:
    text = message.replace('"', '\\"')
    return f'{{"time": "{format_time(NOW)}", "severity": "{severity}", "replica": "master-0", "message": "{text}"}}'


def test_a_trainer_s_output_is_logged_and_searched_for_errors_and_progress(tmp_path: Path, clock: list[float]) -> None:
    started = Started(tmp_path, {"TF_CPP_MIN_LOG_LEVEL": "2"})
    trainer = started.trainer
    assert (trainer.pid, trainer.lines, trainer.tail, trainer.first_error, trainer.progress) == (7, 0, "", None, None)
    reports = ['{"scaletier.progress": {"step": 5, "totalSteps": 9}}', '{"scaletier.progress": {"step": -1}}']
    printed = ["one", *reports, "ERROR:root:no such column", "x" * (TAIL_CHARACTERS + 9)]
    started.prints("zero", STARTUP_MESSAGE, *printed)
    wait_for(lambda: trainer.lines == 6, "the lines")
    assert trainer.poll() is None
    end = started.ends(3)
    assert (end, started.process.calls) == (Exit(3), ["reap"])
    assert trainer.tail.split("\n") == ["zero", *printed[:-1], "x" * TAIL_CHARACTERS]
    assert trainer.first_error == FirstError(format_time(NOW), "ERROR:root:no such column")
    assert trainer.progress == JobProgress(5, 9, time=format_time(NOW))
    complaint = "invalid progress reports are ignored: step is -1. Valid: a whole number from 0 to 9007199254740992"
    assert started.logged() == [
        *(line("INFO", text) for text in ("zero", *printed[:3])),
        line("ERROR", printed[3]),
        line("INFO", printed[4]),
        line("WARNING", complaint),
    ]


def test_a_clock_that_is_set_back_delays_no_line(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(tmp_path)
    os.write(started.process.output, b"begins\n\r1 of 9\r2 of 9")
    wait_for(lambda: started.trainer.lines == 1, "the first line")
    monkeypatch.setattr(trainer_module.time, "time", lambda: NOW - 86400)
    clock[0] += 6.0
    os.write(started.process.output, b"\r3 of 9\r4 of 9")
    wait_for(lambda: started.trainer.lines == 2, "the progress bar", 10.0)
    started.ends()
    assert started.trainer.tail.split("\n") == ["begins", "3 of 9", "4 of 9"]


def test_a_program_of_another_user_can_open_its_output_again_by_name(tmp_path: Path) -> None:
    started = Started(tmp_path)
    assert stat.S_IMODE(os.fstat(started.process.output).st_mode) == 0o622, "to write, and to nobody else to read"
    by_name = Path(f"/proc/self/fd/{started.process.output}")
    by_name.write_text("warn\n")
    assert started.ends() == Exit(0)
    assert started.trainer.tail == "warn"


def test_the_tail_has_the_last_lines_and_remarks_are_logged_at_a_lower_level(tmp_path: Path) -> None:
    started = Started(tmp_path)
    started.prints(STARTUP_MESSAGE, *(f"line {n}" for n in range(30)))
    os.write(started.process.output, b"no end")
    assert started.ends() == Exit(0)
    assert started.trainer.tail.split("\n") == [*(f"line {n}" for n in range(31 - TAIL_LINES, 30)), "no end"]
    assert started.trainer.lines == 32
    assert STARTUP_MESSAGE in started.logged()[0]


@pytest.mark.parametrize(("stops", "left", "verb"), [(False, 2, "were"), (False, 1, "was"), (True, 2, "were")])
def test_processes_that_a_program_left_are_reported_unless_it_was_stopped(
    tmp_path: Path, clock: list[float], stops: bool, left: int, verb: str
) -> None:
    started = Started(tmp_path)
    if stops:
        started.trainer.stop(9.0)
    assert started.ends(left=left) == Exit(0, processes_left=left)
    running = f"{left} of its processes still ran when the program ended with 0, and {verb} ended"
    warning = line("WARNING", f"{running}: it must wait for what it starts in the background")
    assert started.logged() == ([] if stops else [warning])


def test_processes_that_a_killed_program_left_are_not_reported(tmp_path: Path, clock: list[float]) -> None:
    started = Started(tmp_path)
    assert started.ends(-signal.SIGTERM, left=2) == Exit(-15, processes_left=2)
    assert started.logged() == []


@pytest.mark.parametrize("stop_signal_to", ["main", "all"])
def test_a_stop_signals_the_first_process_then_the_rest_and_kills_last(
    tmp_path: Path, clock: list[float], stop_signal_to: str
) -> None:
    started = Started(tmp_path, stop_signal_to=stop_signal_to)
    trainer, calls = started.trainer, started.process.calls
    assert (trainer.stopping, trainer.due()) == (False, math.inf)
    trainer.stop(10.0)
    trainer.stop(1.0)
    assert (trainer.stopping, calls) == (True, ["stop 10"])
    assert trainer.due() == (8.0 if stop_signal_to == "main" else 10.0)
    clock[0] = 107.9
    assert trainer.poll() is None
    assert trainer.due() == pytest.approx(0.1 if stop_signal_to == "main" else 2.1)
    clock[0] = 108.0
    for _ in range(2):
        assert trainer.poll() is None
    rest = ["SIGTERM"] if stop_signal_to == "main" else []
    assert (calls, trainer.due()) == (["stop 10", *rest], 2.0)
    clock[0] = 110.0
    assert trainer.poll() is None
    assert (calls, trainer.due()) == (["stop 10", *rest, "SIGKILL"], 0.1)
    assert trainer.poll() is None
    assert started.ends(-9) == Exit(-9)
    assert started.logged() == [line("WARNING", "the program had not ended 10 s after SIGTERM, and was killed")]


def test_a_program_that_no_signal_ends_is_given_up(tmp_path: Path, clock: list[float]) -> None:
    started = Started(tmp_path)
    started.prints("waiting for a disk")
    wait_for(lambda: started.trainer.lines == 1, "the line")
    started.trainer.stop(10.0)
    for clock[0] in (110.0, 169.9):
        assert started.trainer.poll() is None
    clock[0] = 170.0
    assert started.trainer.poll() == Exit(-9)
    assert "reap" not in started.process.calls, "it would wait for the end"
    assert started.logged()[2:] == [
        line(
            "ERROR",
            "the program (pid 7) has not ended 60 s after SIGKILL, and is given up: the kernel waits for a disk or another "
            "device",
        )
    ]


def test_a_program_that_ended_in_its_last_moment_was_not_killed(tmp_path: Path, clock: list[float]) -> None:
    started = Started(tmp_path)
    started.trainer.stop(10.0)
    clock[0] = 110.0
    assert started.ends(143) == Exit(143)
    assert started.logged() == []


def open_pipes() -> set[str]:
    names = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.add(str(path.readlink()))
    return {name for name in names if name.startswith("pipe:")}


def test_no_pipe_stays_open_after_a_trainer_s_end_or_a_failed_start(tmp_path: Path) -> None:
    def refuse(run: ProgramSpec, output: int) -> FakeProcess:
        raise FileNotFoundError(2, "No such file or directory")

    before = open_pipes()
    with pytest.raises(FileNotFoundError):
        Trainer(ProgramSpec("job01", ["x"], tmp_path, {}), Log(tmp_path, "job01", "master-0"), refuse)
    assert open_pipes() - before == set()
    Started(tmp_path).ends()
    assert open_pipes() - before == set()


def test_a_process_that_left_the_session_and_writes_on_does_not_delay_the_end(tmp_path: Path) -> None:
    started, over = Started(tmp_path), threading.Event()
    escaped = os.dup(started.process.output)

    def write() -> None:
        with suppress(OSError):
            while not over.is_set():
                os.write(escaped, b"x" * 60_000 + b"\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert started.ends() == Exit(0)
    finally:
        over.set()
        writer.join()
        os.close(escaped)


def test_a_child_reads_its_input_and_what_it_leaves_is_killed(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"]}
    for argv, stdin, printed in ((["cat"], b"abc", b"abc"), (["sh", "-c", "cat; echo no; sleep 600 & exit 3"], b"", b"no\n")):
        pipe, output = os.pipe()
        child = Child(ProgramSpec("job01", argv, tmp_path, env, stdin=stdin), output)
        os.close(output)
        wait_for(child.ended, "its end")
        end = child.reap()
        assert (end.status, end.out_of_memory) == (3 if b"no" in printed else 0, False)
        with os.fdopen(pipe, "rb") as file:
            assert file.read() == printed, "no process holds the pipe"


def test_a_stop_of_a_program_that_has_just_ended_leaves_its_exit_to_be_read(tmp_path: Path) -> None:
    read, output = os.pipe()
    child = Child(ProgramSpec("job01", ["/bin/false"], tmp_path, {}), output)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.stop(5.0)
    assert child.ended()
    assert child.reap().status == 1
    os.close(read)
    os.close(output)
