"""The tool that changes lines: which tests it runs for a line, and what it takes for caught. Pytest is a fake."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

import mutants
import pytest
from coverage.numbits import nums_to_numbits


def test_the_tests_of_a_line_have_their_whole_names(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "coverage") as database:
        database.executescript(
            "create table file (id, path); create table context (id, context);"
            "create table line_bits (file_id, context_id, numbits);"
        )
        database.execute("insert into file values (1, ?)", (str(mutants.ROOT / "jobs/nothing.py"),))
        for number, (context, lines) in enumerate({"a.py::test[x|y]|run": {1, 2}, "b.py::test|setup": {2}, "": {1}}.items()):
            database.execute("insert into context values (?, ?)", (number, context))
            database.execute("insert into line_bits values (1, ?, ?)", (number, nums_to_numbits(lines)))
    mutant = mutants.Mutant("jobs/nothing.py", 1, "", "")
    assert mutants.tests_of(mutant, tmp_path / "coverage") == ["a.py::test[x|y]"]


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("exit 0", "SURVIVED"),
        ("exit 5", "SURVIVED"),
        ("exit 1", "caught"),
        ("grep -q True module.py && exit 0; exit 4", "caught"),
    ],
)
def test_a_mutant_is_caught_by_an_exit_code(tmp_path: Path, script: str, outcome: str) -> None:
    (tmp_path / "module.py").write_text("x = True\n")
    mutant = mutants.Mutant("module.py", 1, "x = True", "x = False")
    assert mutants.judge(tmp_path, mutant, [["sh", "-c", script]]) == outcome
    assert (tmp_path / "module.py").read_text() == "x = True\n"


def test_a_test_that_pytest_does_not_find_ends_the_tool(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = True\n")
    mutant = mutants.Mutant("module.py", 1, "x = True", "x = False")
    with pytest.raises(SystemExit) as ended:
        mutants.judge(tmp_path, mutant, [["sh", "-c", "echo not found: a.py::test >&2; exit 4"]])
    assert ended.value.code == "pytest rejects the tests of module.py:1: not found: a.py::test"
    assert (tmp_path / "module.py").read_text() == "x = True\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository whose tests pass, and log that they ran; mypy fails if there is a file `untyped`."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text(".cache/\n/bin/\nignored.py\nran\n")
    (tmp_path / "jobs").mkdir()
    for name in ("module.py", "ignored.py", "__main__.py"):
        (tmp_path / "jobs" / name).write_text("x = True\n")
    for name, script in {"pytest": 'echo tests >>ran; : >"$COVERAGE_FILE"', "mypy": "[ ! -e untyped ]"}.items():
        (program := tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    for name, path in {"ROOT": "", "BIN": "bin", "CACHE": ".cache/mutants"}.items():
        monkeypatch.setattr(mutants, name, tmp_path / path)
    return tmp_path


def test_coverage_is_recorded_again_if_a_file_has_changed(tree: Path) -> None:
    for _ in range(2):
        mutants.coverage()
    assert (tree / "ran").read_text().splitlines() == ["tests"]
    (tree / "jobs/module.py").write_text("x = False\n")
    mutants.coverage()
    assert (tree / "ran").read_text().splitlines() == ["tests"] * 2


def test_a_tree_that_fails_without_a_mutant_ends_the_tool(tree: Path) -> None:
    (tree / "untyped").touch()
    with pytest.raises(SystemExit, match="mypy fails without a mutant"):
        mutants.coverage()
    assert not (tree / "ran").exists()


def test_modules_that_are_not_committed_are_changed_too(tree: Path) -> None:
    (mutant,) = mutants.draw(10, 1)
    assert (mutant.path, mutant.after) == ("jobs/module.py", "x = (False)")
    assert (mutants.copy_tree(0) / mutant.path).exists()
