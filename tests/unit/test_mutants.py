"""The tool that changes lines: which tests it runs for a line, and what it takes for caught. Pytest is a fake."""

from __future__ import annotations

import sqlite3
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
