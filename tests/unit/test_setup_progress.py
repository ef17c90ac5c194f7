"""What set-up says while something takes long: lines outside a terminal, a bar on one, and the end of what failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "setup" / "progress.py"
SAYS = 'for n in 1 2 3; do echo "TASK [part $n] ***"; sleep 1.5; done'


def command(tmp_path: Path, script: str, *flags: str) -> list[str]:
    return [sys.executable, str(PROGRAM), "image", "--log", str(tmp_path / "log" / "x"), *flags, "--", "sh", "-c", script]


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_how_far_it_is_in_lines(tmp_path: Path) -> None:
    ran = run(command(tmp_path, SAYS, "--match", r"TASK \[(.*)\]", "--total", "4"))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(r"(image: \d of 4, part \d, \d+ s\n)+", ran.stdout)
    assert (tmp_path / "log" / "x").read_text().count("TASK") == 3


def test_what_is_quick_says_nothing(tmp_path: Path) -> None:
    ran = run(command(tmp_path, "echo hidden"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_fails_says_how(tmp_path: Path) -> None:
    ran = run(command(tmp_path, "seq 100; echo why >&2; exit 3"))
    assert ran.returncode == 3
    assert ran.stderr.splitlines()[0] == "77"
    why, failed = ran.stderr.splitlines()[-2:]
    assert why == "why"
    assert re.fullmatch(rf"image: \d+ s: failed, see {tmp_path}/log/x", failed)


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    ran = run([sys.executable, str(PROGRAM), "image", "--log", str(tmp_path / "x"), "--", "/nonexistent", "x"])
    assert (ran.returncode, ran.stderr) == (127, "image: 0 s: cannot run /nonexistent: No such file or directory\n")


@pytest.mark.parametrize(("code", "failed"), [(0, []), (3, ["image: 0 s: failed"])])
@pytest.mark.parametrize(
    ("log", "why"), [("/dev/full", "No space left on device"), ("/dev", "Is a directory"), ("/dev/null/x", "File exists")]
)
def test_a_log_that_cannot_be_written(log: str, why: str, code: int, failed: list[str]) -> None:
    """A command that says more than fits into a pipe comes to its end all the same."""
    script = f"yes x | head -c 1000000; exit {code}"
    ran = run([sys.executable, str(PROGRAM), "image", "--log", log, "--", "sh", "-c", script])
    assert ran.returncode == code
    assert [re.sub(r"\d s", "0 s", line) for line in ran.stderr.splitlines() if line != "x"] == [
        *failed,
        f"image: 0 s: the log {log} cannot be written: {why}",
    ]


def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    leaves = command(tmp_path, "echo done; sleep 30 & echo $!")
    ran = subprocess.run(leaves, capture_output=True, text=True, timeout=20, check=False)
    done, left = (tmp_path / "log" / "x").read_text().splitlines()
    os.kill(int(left), signal.SIGKILL)
    assert (ran.returncode, ran.stderr, done) == (0, "", "done")


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    argv = command(tmp_path, SAYS, "--match", r"TASK \[(.*)\]", "--total", "3")
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    drawn = b""
    try:
        while data := os.read(ours, 1 << 16):
            drawn += data
    except OSError:  # it has ended
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    assert b"1 of 3, part 1" in drawn
    assert b"3 of 3, part 3" in drawn
    assert "━".encode() in drawn
