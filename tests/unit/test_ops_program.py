"""What runs: a module, a script or a command; what is looked at before, and what the hosts are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.records import Plan
from ops.cluster.inventory import Inventory
from ops.errors import UsageError
from ops.package import package
from ops.train import program
from ops.train.config import Flags, build_job
from ops.train.program import Program
from ops.train.render import plan
from replica.supervisor import Assignment

_SCRIPT = "import os\nimport helper\nimport parts.one\nfrom parts import two\nimport numpy\nknows = '--job-dir'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts and programs that are no package, and the user's own working directory."""
    root = tmp_path / "work"
    (root / "parts").mkdir(parents=True)
    (root / "train.py").write_text(_SCRIPT)
    (root / "helper.py").write_text("import json, pandas\n")
    (root / "parts/one.py").write_text("")
    (root / "parts/two.py").write_text("from . import one\n")
    (root / "old.py").write_text("print 'Python 2'\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "data.txt").write_text("x")
    return root


def made(inventory: Inventory, found: Program, *args: str, **flags: str) -> Plan:
    source = found.source
    told = Flags("j", more_args=args, **flags)  # type: ignore[arg-type]
    return plan(inventory, build_job(told, inventory, source.name, source.files, found.command, found.folder), "")


def runs(made: Plan) -> tuple[Path, list[str]]:
    """Where a replica starts what, and how."""
    job = Assignment(made, "master-0", Path("package") / made.folder, {}, "/venv/python", object())  # type: ignore[arg-type]
    return job.directory, job.argv


def test_a_script_of_a_folder(inventory: Inventory, folder: Path) -> None:
    found = program.find(str(folder), None, "train.py", None)
    assert set(found.source.files) >= {"work/train.py", "work/parts/one.py", "work/data.txt"}
    told = made(inventory, found, "--x", "1")
    passed = ["--job-dir", "/bucket/jobs/j/output"]  # as it knows the flag
    assert runs(told) == (Path("package/work"), ["python", "train.py", "--x", "1", *passed])
    assert (told.module, told.command) == ("", ["python", "train.py"])
    built = package.build(found.source, "", found.script)
    assert built.imports == {"numpy": "work/train.py:5", "pandas": "work/helper.py:1"}
    again = package.unpack(built.archive, "work", set(built.files), "", found.script)
    assert (again.imports, again.executables) == (built.imports, built.executables)
    assert program.find(str(folder), None, str(folder / "train.py"), None) == found, "told with its folder"


def test_a_script_alone_is_all_that_goes_to_the_hosts(inventory: Inventory, folder: Path) -> None:
    found = program.find(None, None, str(folder / "helper.py"), None)
    assert list(found.source.files) == ["helper/helper.py"]
    assert runs(made(inventory, found)) == (Path("package/helper"), ["python", "helper.py"])
    alone = program.find(None, None, str(folder / "train.py"), None)
    assert set(package.build(alone.source, "", alone.script).imports) == {"helper", "parts", "numpy"}
    broken = program.find(None, None, str(folder / "old.py"), None)
    with pytest.raises(UsageError, match=r"old/old\.py:1 does not compile"):
        package.build(broken.source, "", broken.script)


def test_a_command_of_a_folder_alone_and_of_the_hosts(inventory: Inventory, folder: Path) -> None:
    found = program.find(str(folder), None, None, "./run.sh 'two words'")
    assert runs(made(inventory, found, "last")) == (Path("package/work"), ["./run.sh", "two words", "last"])
    assert found.source.executables == {"work/run.sh"}
    assert package.build(found.source, "", found.script).imports == {}
    theirs = program.find(None, None, None, "hostname -I")
    assert (theirs.source.name, theirs.source.files) == ("hostname", {})
    assert runs(made(inventory, theirs)) == (Path("package"), ["hostname", "-I"])
    python = program.find(None, None, None, "python -c 1")
    assert (python.script, package.build(python.source, "", python.script).files) == (None, {})


def test_a_file_alone_runs_in_a_folder_of_its_name(inventory: Inventory, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    found = program.find(None, None, None, "work/run.sh x")
    assert (list(found.source.files), found.source.executables) == (["run/run.sh"], {"run/run.sh"})
    assert runs(made(inventory, found)) == (Path("package/run"), ["./run.sh", "x"])


def test_what_is_asked_of_another_program_is_not_passed_as_flags(inventory: Inventory, folder: Path) -> None:
    found = program.find(str(folder), None, None, "./run.sh")
    told = made(inventory, found, job_dir="/bucket/there")
    assert runs(told)[1] == ["./run.sh"]
    assert told.tasks["master-0"].environment["JOB_DIR"] == "/bucket/there"
    job = build_job(Flags("j"), inventory, "work", found.source.files, found.command, found.folder)
    assert job.training_input["command"] == ["./run.sh"]
    assert "pythonModule" not in job.training_input


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"script": "nope.py"}, "there is no file nope.py in {folder}: give --script the path of one"),
        ({"script": "../work/train.py"}, "--script ../work/train.py is not in {folder}: give --package the folder that has it"),
        ({"script": "train.py", "command": "./run.sh"}, "--script and --command both say what runs: leave one of them out"),
        ({"script": "train.py", "module": "m"}, "--module and --script both say what runs"),
        ({"command": " "}, "--command is empty: name a program of the package"),
        ({"command": "'x"}, "--command cannot be split (No closing quotation)"),
        ({"command": "./data.txt x"}, "--command ./data.txt is not executable: chmod +x {folder}/data.txt"),
        ({"command": "./none.sh"}, "there is no file ./none.sh in {folder}"),
        ({"script": "train.py", "folder": "{folder}/none"}, "there is no file train.py in {folder}/none"),
        ({"command": "ls", "folder": "{folder}/none"}, "package {folder}/none does not exist: give --package a directory"),
    ],
)
def test_what_cannot_run(folder: Path, flags: dict[str, str], says: str) -> None:
    given = {"module": None, "script": None, "command": None, "folder": "{folder}"} | flags
    with pytest.raises(UsageError) as error:
        program.find(given.pop("folder").format(folder=folder), **given)  # type: ignore[union-attr,arg-type]
    assert str(error.value).startswith(says.format(folder=folder))
