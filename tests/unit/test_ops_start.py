"""Check `scaletier` in any folder: the checkout it chooses, and that it runs that checkout's program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.cli import checkout

ROOT = Path(__file__).resolve().parents[2]
_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
_CALL = "import sys; sys.argv[0] = 'scaletier'; from ops.cli.start import scaletier; scaletier()"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a checkout whose program prints how it was called."""
    (program := tmp_path / "work" / ".venv" / "bin" / "scaletier").parent.mkdir(parents=True)
    (tmp_path / "work" / "Pulumi.yaml").write_text("name: scaletier\nruntime: python\n")
    program.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "${PATH%%:*}" "$@"\nexit 7\n')
    program.chmod(0o755)
    (tmp_path / "work" / "deep" / "down").mkdir(parents=True)
    return tmp_path / "work"


def run_scaletier(working_dir: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "SCALETIER_PROJECT"}
    environ = {**clean, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", _CALL, *argv]
    return subprocess.run(command, cwd=working_dir, env=environ, capture_output=True, text=True, check=False)


def test_the_checkout_is_found_by_folder_flag_or_variable(project: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "Pulumi.yaml").write_text("name: somebody-else\n")
    deep = project / "deep" / "down"
    assert checkout.find(["jobs"], deep, {}) == project
    assert checkout.find(["jobs"], other, {}) is None
    assert checkout.find(["jobs", "--project", "work"], tmp_path, {"SCALETIER_PROJECT": "/nowhere"}) == project
    assert checkout.find(["--project=work", "jobs"], tmp_path, {}) == project
    assert checkout.find(["jobs"], tmp_path, {"SCALETIER_PROJECT": str(project)}) == project
    assert checkout.find(["train", "--", "--project", "mine"], deep, {}) == project, "a flag of the trainer"


def test_the_checkouts_own_program_runs(project: Path) -> None:
    result = run_scaletier(project / "deep", "train", "job01", "--", "a b", "")
    assert (result.returncode, result.stderr) == (7, "")
    folders = [str(project / "deep"), str(project / ".venv/bin")]
    assert result.stdout.split("|") == [*folders, "train", "job01", "--", "a b", "", ""]


def test_without_a_checkout_an_error_says_what_to_do(project: Path, tmp_path: Path) -> None:
    outside = run_scaletier(tmp_path, "jobs")
    assert (outside.returncode, outside.stdout) == (2, "")
    message = "error: there is no checkout of scaletier here or above: cd into one, or name it by --project DIR\n"
    assert outside.stderr == message
    invalid = run_scaletier(tmp_path, "jobs", "--project", str(tmp_path))
    assert (invalid.returncode, "is no checkout of scaletier" in invalid.stderr) == (2, True)
    (project / ".venv/bin/scaletier").unlink()
    not_set_up = run_scaletier(project, "jobs")
    message = f"error: the checkout {project} is not set up: run make setup there\n"
    assert (not_set_up.returncode, not_set_up.stderr) == (2, message)


def test_help_and_version_work_anywhere(tmp_path: Path) -> None:
    assert run_scaletier(tmp_path, "--version").stdout.startswith("scaletier ")
    assert "Usage: scaletier" in run_scaletier(tmp_path, "--help").stdout


def test_a_copied_checkout_does_not_run_itself_forever(project: Path) -> None:
    """Let its script start the Python of the original, which has another prefix."""
    script = f'#!/bin/sh\nexec {sys.executable} -c "{_CALL}" "$@"\n'
    (project / ".venv/bin/scaletier").write_text(script)
    assert run_scaletier(project, "--version").stdout.startswith("scaletier ")


def test_a_broken_program_and_a_deleted_folder_are_one_line(project: Path, tmp_path: Path) -> None:
    (project / ".venv/bin/scaletier").write_text("#!/nowhere/python\n")
    broken = run_scaletier(project, "jobs")
    assert (broken.returncode, "does not run (No such file or directory): was" in broken.stderr) == (2, True)
    (deleted := tmp_path / "gone").mkdir()
    command = f"import os; os.rmdir('{deleted}'); {_CALL}"
    result = subprocess.run(
        [sys.executable, "-c", command, "jobs"], cwd=deleted, env={**os.environ, "PYTHONPATH": str(ROOT)}, **_TEXT
    )
    assert (result.returncode, result.stderr.startswith("error: the folder that this is called in is gone")) == (2, True)


def test_commands_start_without_what_only_tests_need() -> None:
    """Other code still gets the real unittest.mock."""
    code = (
        "import sys\nfrom ops.cli import start\nstart._import_invoke()\nimport ops.cli.commandline, ops.submit.runner\n"
        "print({'asyncio', 'unittest', 'packaging', 'urllib.request'} & {*sys.modules})\n"
        "from unittest.mock import Mock\nprint(Mock(return_value='called')())"
    )
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, **_TEXT)
    assert (result.stdout, result.stderr) == ("set()\ncalled\n", "")


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("print('all')", 0, "all\n", ""),
        ("print('all'); sys.exit(7)", 7, "all\n", ""),
        ("sys.exit('why')", 1, "", "why\nlate\n"),
        ("import os; r, w = os.pipe(); os.close(r); sys.stdout = open(w, 'w'); print('to nobody')", 0, "", ""),
        ("sys.stdout = open('/dev/full', 'w'); print('lost')", 1, "", ""),
        ("sys.stdout = open('/dev/full', 'w'); print('lost'); sys.exit(2)", 2, "", ""),
    ],
)
def test_a_command_ends_at_once_and_loses_no_output(body: str, code: int, out: str, err: str) -> None:
    program = (
        "import atexit, sys\nimport ops.cli.commandline\nfrom ops.cli import start\n"
        f"def body():\n    {body}\n"
        "ops.cli.commandline.main = body\n"
        "atexit.register(print, 'late', file=sys.stderr)\n"
        "start.main()"
    )
    result = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, **_TEXT)
    assert (result.returncode, result.stdout, result.stderr) == (code, out, err)
