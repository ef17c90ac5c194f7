"""`scaletier` from any folder: the checkout it chooses, and that this one's own program runs."""

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


def call(here: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "SCALETIER_PROJECT"}
    environ = {**clean, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", _CALL, *argv]
    return subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, check=False)


def test_which_checkout_is_meant(project: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "Pulumi.yaml").write_text("name: somebody-else\n")
    deep = project / "deep" / "down"
    assert checkout.find(["jobs"], deep, {}) == project
    assert checkout.find(["jobs"], other, {}) is None
    assert checkout.find(["jobs", "--project", "work"], tmp_path, {"SCALETIER_PROJECT": "/nowhere"}) == project
    assert checkout.find(["--project=work", "jobs"], tmp_path, {}) == project
    assert checkout.find(["jobs"], tmp_path, {"SCALETIER_PROJECT": str(project)}) == project
    assert checkout.find(["train", "--", "--project", "mine"], deep, {}) == project, "that is the trainer's"


def test_the_program_of_the_checkout_runs_where_one_is(project: Path) -> None:
    done = call(project / "deep", "train", "job01", "--", "a b", "")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.split("|") == [str(project / "deep"), str(project / ".venv/bin"), "train", "job01", "--", "a b", "", ""]


def test_outside_of_any_it_says_what_to_do(project: Path, tmp_path: Path) -> None:
    lost = call(tmp_path, "jobs")
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == "error: there is no checkout of scaletier here or above: cd into one, or name it by --project DIR\n"
    wrong = call(tmp_path, "jobs", "--project", str(tmp_path))
    assert (wrong.returncode, "is no checkout of scaletier" in wrong.stderr) == (2, True)
    (project / ".venv/bin/scaletier").unlink()
    bare = call(project, "jobs")
    assert (bare.returncode, bare.stderr) == (2, f"error: the checkout {project} is not set up: run make setup there\n")


def test_help_and_version_are_said_anywhere(tmp_path: Path) -> None:
    assert call(tmp_path, "--version").stdout.startswith("scaletier ")
    assert "Usage: scaletier" in call(tmp_path, "--help").stdout


def test_a_copy_of_a_checkout_with_its_venv_does_not_run_itself_for_ever(project: Path) -> None:
    """Its script starts the Python of the original, whose prefix is another."""
    script = f'#!/bin/sh\nexec {sys.executable} -c "{_CALL}" "$@"\n'
    (project / ".venv/bin/scaletier").write_text(script)
    assert call(project, "--version").stdout.startswith("scaletier ")


def test_a_program_that_does_not_run_and_a_folder_that_is_gone(project: Path, tmp_path: Path) -> None:
    (project / ".venv/bin/scaletier").write_text("#!/nowhere/python\n")
    moved = call(project, "jobs")
    assert (moved.returncode, "does not run (No such file or directory): was" in moved.stderr) == (2, True)
    (gone := tmp_path / "gone").mkdir()
    command = f"import os; os.rmdir('{gone}'); {_CALL}"
    done = subprocess.run(
        [sys.executable, "-c", command, "jobs"], cwd=gone, env={**os.environ, "PYTHONPATH": str(ROOT)}, **_TEXT
    )
    assert (done.returncode, done.stderr.startswith("error: the folder that this is called in is gone")) == (2, True)
