"""Progress of set-up: lines without a terminal, one redrawn line on it, and the last lines of a failure."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from setup_scripts import SETUP, load
from shared_fakes import Clock
from waiting import limit, wait_for

PROGRAM = SETUP / "progress.py"


@pytest.fixture(scope="module")
def progress() -> ModuleType:
    return load("progress")


def make_command(tmp_path: Path, script: str, *flags: str) -> list[str]:
    return [sys.executable, str(PROGRAM), "image", "--log", str(tmp_path / "log" / "x"), *flags, "--", "sh", "-c", script]


def run_command(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit(), check=False)


def start_on_terminal(argv: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a pseudo-terminal; return it and the end for reading its output."""
    terminal_end, program_end = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("SETUP_LINE_SECONDS", "COLUMNS")}
    process = subprocess.Popen(
        argv, stdin=program_end, stdout=program_end, stderr=program_end, env={**environment, "TERM": "xterm"}
    )
    os.close(program_end)
    return process, terminal_end


def read(terminal: int) -> bytes:
    """Read the next output; empty once all programs on the terminal have ended."""
    with contextlib.suppress(OSError):
        return os.read(terminal, 1 << 16)
    return b""


def test_without_a_terminal_there_is_a_line_a_minute(progress: ModuleType) -> None:
    clock, out = Clock(0.0), io.StringIO()
    progress_counter = progress.CommandProgress("image", r"TASK \[(.*)\]", 4, clock)
    display = progress.Display(progress_counter, out, 60)
    for second in range(0, 130, 5):
        clock.now = second
        progress_counter.take(f"TASK [part {second}] ***\n" if second in (5, 70) else "changed\n")
        display.show()
    display.close()
    assert out.getvalue().splitlines() == ["image: 1 of 4, part 5, 1 min 0 s", "image: 2 of 4, part 70, 2 min 0 s"]


@pytest.mark.parametrize(
    ("line_seconds", "terminal", "term", "seconds"),
    [("", True, "xterm", None), ("", True, "dumb", 60), ("", False, "xterm", 60), ("0.5", True, "xterm", 0.5)],
)
def test_lines_are_redrawn_on_suitable_terminals(
    progress: ModuleType, monkeypatch: pytest.MonkeyPatch, line_seconds: str, terminal: bool, term: str, seconds: float | None
) -> None:
    monkeypatch.setenv("SETUP_LINE_SECONDS", line_seconds)
    monkeypatch.setenv("TERM", term)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    assert progress.choose_seconds(out) == seconds


def test_output_goes_to_the_log_and_a_quick_command_prints_nothing(tmp_path: Path) -> None:
    result = run_command(make_command(tmp_path, "echo one; echo two >&2"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "log" / "x").read_text() == "one\ntwo\n"


def test_a_failed_command_prints_its_last_lines(tmp_path: Path) -> None:
    result = run_command(make_command(tmp_path, "seq 100; echo why >&2; exit 3"))
    assert result.returncode == 3
    assert result.stderr.splitlines()[0] == "77"
    last_line, summary = result.stderr.splitlines()[-2:]
    assert last_line == "why"
    assert re.fullmatch(rf"image: \d+ s: failed, see {tmp_path}/log/x", summary)


def test_a_missing_command_is_one_line(progress: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = tmp_path / "missing"
    assert progress.run([str(command), "x"], progress.CommandProgress("image", None, 0, Clock(0.0)), tmp_path / "x") == 127
    assert capsys.readouterr() == ("", f"image: 0 s: cannot run {command}: No such file or directory\n")


@pytest.mark.parametrize(("code", "failed"), [(0, []), (3, ["image: 0 s: failed"])])
@pytest.mark.parametrize(
    ("log", "reason"), [("/dev/full", "No space left on device"), ("/dev", "Is a directory"), ("/dev/null/x", "File exists")]
)
def test_an_unwritable_log_does_not_stop_the_command(
    progress: ModuleType, capsys: pytest.CaptureFixture[str], log: str, reason: str, code: int, failed: list[str]
) -> None:
    """A command that writes more than a pipe's capacity still ends."""
    script = f"yes x | head -c 1000000; exit {code}"
    assert progress.run(["sh", "-c", script], progress.CommandProgress("image", None, 0, Clock(0.0)), Path(log)) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "x"]
    assert lines == [*failed, f"image: 0 s: the log {log} cannot be written: {reason}"]


def test_background_processes_of_a_command_are_not_awaited(tmp_path: Path) -> None:
    """A daemon that keeps the output open is ended by the test, after the program has ended."""
    os.mkfifo(fifo := tmp_path / "fifo")
    result = run_command(make_command(tmp_path, f"echo done; cat {fifo} &"))
    fifo.write_text("end")  # opens only if the daemon still reads
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "log" / "x").read_text() == "done\n"


@pytest.mark.parametrize(
    ("number", "by_parent"),
    [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
    ids=["by SIGTERM", "by SIGHUP", "as its script is gone"],
)
def test_the_command_ends_with_the_program(tmp_path: Path, number: signal.Signals, by_parent: bool) -> None:
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    argv = make_command(tmp_path, f"trap 'touch {stopped}; exit' TERM; touch {ready}; while :; do sleep 0.1; done")
    if by_parent:
        argv = ["sh", "-c", '"$@" & wait', "sh", *argv]
    process = subprocess.Popen(["env", "--default-signal=HUP", *argv])  # which nohup ignores
    wait_for(ready.exists, "the command runs")
    process.send_signal(number)
    wait_for(stopped.exists, "the command was ended")
    process.wait(limit())


def test_one_line_is_redrawn_on_a_terminal(tmp_path: Path) -> None:
    """The test ends the command after it has read the progress."""
    script = f"echo 'TASK [part 1]'; while [ ! -e {tmp_path}/seen ]; do sleep 0.05; done"
    process, terminal = start_on_terminal(make_command(tmp_path, script, "--match", r"TASK \[(.*)\]", "--total", "2"))
    output = b""
    while b"\rimage: 1 of 2, part 1, " not in output:
        data = read(terminal)
        assert data, output
        output += data
    (tmp_path / "seen").touch()
    while data := read(terminal):
        output += data
    os.close(terminal)
    assert process.wait(limit()) == 0
    assert b"\n" not in output
    assert output.endswith(b"\r\x1b[K")


def test_a_board_has_a_line_for_each_part(progress: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "21")
    out = io.StringIO()
    board = progress.Board(out)
    board.take("venv: installing\n")
    board.take("pulumi: 1 of 1484, github.com/x\n")
    board.draw()
    assert out.getvalue() == "venv: installing\npulumi: 1 of 1484, g\n"
    out.truncate(out.seek(0))
    board.take("venv: installed, 9 s\n")
    board.draw()
    assert out.getvalue() == "\x1b[2A\x1b[Jvenv: installed, 9 s\npulumi: 1 of 1484, g\n"
    out.truncate(out.seek(0))
    board.take("lxd: no room\n", error=True)
    board.draw()
    assert out.getvalue() == "\x1b[2A\x1b[Jlxd: no room\nvenv: installed, 9 s\npulumi: 1 of 1484, g\n"


def test_ctrl_c_ends_parallel_parts_without_further_lines(tmp_path: Path) -> None:
    script = "trap 'echo make: ended >&2; exit 2' TERM; echo venv: made; for i in $(seq 600); do sleep 0.1; done"
    process, terminal = start_on_terminal(
        ["env", "--default-signal=INT", sys.executable, str(PROGRAM), "--board", "--", "sh", "-c", script]
    )
    output = b""
    while b"venv: made\r\n" not in output:
        output += read(terminal)
    process.send_signal(signal.SIGINT)
    output += b"".join(iter(lambda: read(terminal), b""))
    os.close(terminal)
    assert process.wait(limit()) == 130
    assert b"ended" not in output


@pytest.mark.parametrize("code", [0, 3])
def test_parallel_parts_on_a_terminal(tmp_path: Path, code: int) -> None:
    """Errors stay above, the exit code is the command's, and a daemon with open pipes is not awaited."""
    os.mkfifo(fifo := tmp_path / "fifo")
    script = f"echo venv: $SETUP_LINE_SECONDS; echo venv: made; echo bad >&2; cat {fifo} & exit {code}"
    process, terminal = start_on_terminal([sys.executable, str(PROGRAM), "--board", "--", "sh", "-c", script])
    output = b"".join(iter(lambda: read(terminal), b""))
    os.close(terminal)
    fifo.write_text("end")
    assert process.wait(limit()) == code
    assert b"bad\r\n" in output
    assert output.endswith(b"venv: made\r\n")
