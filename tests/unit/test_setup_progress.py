"""Progress of set-up: lines off a terminal, one line that is redrawn on it, and the end of a failure."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from setup_scripts import SETUP, load
from waiting import limit, wait_for

PROGRAM = SETUP / "progress.py"


@pytest.fixture(scope="module")
def progress() -> ModuleType:
    return load("progress")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def command(tmp_path: Path, script: str, *flags: str) -> list[str]:
    return [sys.executable, str(PROGRAM), "image", "--log", str(tmp_path / "log" / "x"), *flags, "--", "sh", "-c", script]


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit(), check=False)


def start(argv: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal; return it, and the end at which what it draws is read."""
    ours, theirs = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("SETUP_TOGETHER", "COLUMNS")}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"})
    os.close(theirs)
    return process, ours


def read(terminal: int) -> bytes:
    """Read what is drawn next; nothing once all programs on the terminal have ended."""
    with contextlib.suppress(OSError):
        return os.read(terminal, 1 << 16)
    return b""


def test_a_line_a_minute_off_a_terminal(progress: ModuleType) -> None:
    clock, out = Clock(), io.StringIO()
    counted = progress.CommandProgress("image", r"TASK \[(.*)\]", 4, clock)
    display = progress.Display(counted, out, 60)
    for second in range(0, 130, 5):
        clock.now = second
        counted.take(f"TASK [part {second}] ***\n" if second in (5, 70) else "changed\n")
        display.show()
    display.close()
    assert out.getvalue().splitlines() == ["image: 1 of 4, part 5, 1 min 0 s", "image: 2 of 4, part 70, 2 min 0 s"]


@pytest.mark.parametrize(
    ("together", "terminal", "term", "seconds"),
    [
        ("", True, "xterm", None),
        ("", True, "dumb", 60),
        ("", False, "xterm", 60),
        ("0.5", True, "xterm", 0.5),
    ],
)
def test_where_lines_are_redrawn(
    progress: ModuleType, monkeypatch: pytest.MonkeyPatch, together: str, terminal: bool, term: str, seconds: float | None
) -> None:
    monkeypatch.setenv("SETUP_TOGETHER", together)
    monkeypatch.setenv("TERM", term)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    assert progress.choose_seconds(out) == seconds


def test_the_output_is_in_the_log_and_what_is_quick_writes_nothing(tmp_path: Path) -> None:
    ran = run(command(tmp_path, "echo one; echo two >&2"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert (tmp_path / "log" / "x").read_text() == "one\ntwo\n"


def test_what_fails_writes_its_end(tmp_path: Path) -> None:
    ran = run(command(tmp_path, "seq 100; echo why >&2; exit 3"))
    assert ran.returncode == 3
    assert ran.stderr.splitlines()[0] == "77"
    why, failed = ran.stderr.splitlines()[-2:]
    assert why == "why"
    assert re.fullmatch(rf"image: \d+ s: failed, see {tmp_path}/log/x", failed)


def test_a_command_that_is_missing(progress: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.run(["/nonexistent", "x"], progress.CommandProgress("image", None, 0, Clock()), tmp_path / "x") == 127
    assert capsys.readouterr() == ("", "image: 0 s: cannot run /nonexistent: No such file or directory\n")


@pytest.mark.parametrize(("code", "failed"), [(0, []), (3, ["image: 0 s: failed"])])
@pytest.mark.parametrize(
    ("log", "why"), [("/dev/full", "No space left on device"), ("/dev", "Is a directory"), ("/dev/null/x", "File exists")]
)
def test_a_log_that_cannot_be_written(
    progress: ModuleType, capsys: pytest.CaptureFixture[str], log: str, why: str, code: int, failed: list[str]
) -> None:
    """A command that writes more than fits into a pipe comes to its end all the same."""
    script = f"yes x | head -c 1000000; exit {code}"
    assert progress.run(["sh", "-c", script], progress.CommandProgress("image", None, 0, Clock()), Path(log)) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "x"]
    assert lines == [*failed, f"image: 0 s: the log {log} cannot be written: {why}"]


def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    """A daemon that holds the output ends when the test says so, after the program has ended."""
    os.mkfifo(fifo := tmp_path / "fifo")
    ran = run(command(tmp_path, f"echo done; cat {fifo} &"))
    fifo.write_text("end")  # opens only if the daemon still reads
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "log" / "x").read_text() == "done\n"


@pytest.mark.parametrize("by_parent", [False, True], ids=["by SIGTERM", "as its script is gone"])
def test_the_command_ends_too(tmp_path: Path, by_parent: bool) -> None:
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    argv = command(tmp_path, f"trap 'touch {stopped}; exit' TERM; touch {ready}; while :; do sleep 0.1; done")
    if by_parent:
        argv = ["sh", "-c", '"$@" & wait', "sh", *argv]
    process = subprocess.Popen(argv)
    wait_for(ready.exists, "the command runs")
    process.terminate()
    wait_for(stopped.exists, "the command was ended")
    process.wait(limit())


def test_one_line_of_a_terminal_is_redrawn(tmp_path: Path) -> None:
    """The command ends when the test has seen its progress."""
    script = f"echo 'TASK [part 1]'; while [ ! -e {tmp_path}/seen ]; do sleep 0.05; done"
    process, terminal = start(command(tmp_path, script, "--match", r"TASK \[(.*)\]", "--total", "2"))
    drawn = b""
    while b"\rimage: 1 of 2, part 1, " not in drawn:
        data = read(terminal)
        assert data, drawn
        drawn += data
    (tmp_path / "seen").touch()
    while data := read(terminal):
        drawn += data
    os.close(terminal)
    assert process.wait(limit()) == 0
    assert b"\n" not in drawn
    assert drawn.endswith(b"\r\x1b[K")


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


@pytest.mark.parametrize("code", [0, 3])
def test_parts_side_by_side_on_a_terminal(tmp_path: Path, code: int) -> None:
    """Errors stay above, the exit code is the command's, and a daemon that holds the pipes is not waited for."""
    os.mkfifo(fifo := tmp_path / "fifo")
    script = f"echo venv: $SETUP_TOGETHER; echo venv: made; echo bad >&2; cat {fifo} & exit {code}"
    process, terminal = start([sys.executable, str(PROGRAM), "--board", "--", "sh", "-c", script])
    drawn = b"".join(iter(lambda: read(terminal), b""))
    os.close(terminal)
    fifo.write_text("end")
    assert process.wait(limit()) == code
    assert b"bad\r\n" in drawn
    assert drawn.endswith(b"venv: made\r\n")
