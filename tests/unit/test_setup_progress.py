"""What set-up says while something takes long: lines outside a terminal, a bar on one, and the end of what failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "setup" / "progress.py"
SAYS = 'for n in 1 2 3; do echo "TASK [part $n] ***"; sleep 0.9; done'


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
