"""Check programs: a module, a script or a command; the checks before the start, and the hosts' command."""

from __future__ import annotations

import re
import shlex
import zipapp
from pathlib import Path

import pytest

from hosts.agent.supervisor import Assignment
from infra.inventory import Inventory
from jobs import paths
from jobs.folder_bucket import FolderBucket
from jobs.records import Plan
from ops.errors import UsageError
from ops.package import package
from ops.submit import manifest, program, reproduce, train
from ops.submit.config import JobFlags, build_job
from ops.submit.job_plan import plan
from ops.submit.program import JobProgram

_SCRIPT = "import os\nimport helper\nimport parts.one\nfrom parts import two\nimport numpy\nknows = '--job-dir'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write scripts and executables that are no package, as in a user's working directory."""
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
    (root / "t.ipynb").write_text("{}")
    (tmp_path / "outside.py").write_text("")
    return root


def make_plan(inventory: Inventory, job_program: JobProgram, *args: str, **flags: str) -> Plan:
    source = job_program.source
    job_flags = JobFlags("j", more_args=args, **flags)  # type: ignore[arg-type]
    return plan(
        inventory, build_job(job_flags, inventory, source.name, source.files, job_program.command, job_program.folder), ""
    )


def start_of(job_plan: Plan) -> tuple[Path, list[str]]:
    """Return where a replica starts a program, and its command."""
    job = Assignment(job_plan, "master-0", Path("package") / job_plan.folder, {}, "/venv/python", object())  # type: ignore[arg-type]
    return job.directory, job.argv


def test_a_script_runs_in_its_folder(inventory: Inventory, folder: Path) -> None:
    job_program = program.find(str(folder), None, "train.py", None)
    assert set(job_program.source.files) >= {"work/train.py", "work/parts/one.py", "work/data.txt"}
    job_plan = make_plan(inventory, job_program, "--x", "1")
    job_dir_args = ["--job-dir", "/bucket/jobs/j/output"]  # the script has this flag
    assert start_of(job_plan) == (Path("package/work"), ["python", "train.py", "--x", "1", *job_dir_args])
    assert (job_plan.module, job_plan.command) == ("", ["python", "train.py"])
    built = package.build(job_program.source, "", job_program.script)
    assert built.imports == {"numpy": "work/train.py:5", "pandas": "work/helper.py:1"}
    unpacked = package.unpack(built.archive, "work", set(built.files), "", job_program.script)
    assert (unpacked.imports, unpacked.executables) == (built.imports, built.executables)
    assert program.find(str(folder), None, str(folder / "train.py"), None) == job_program, "the same by an absolute path"


@pytest.mark.parametrize("alone", [True, False])
def test_a_script_whose_name_begins_like_an_option_is_a_path(folder: Path, alone: bool) -> None:
    (folder / "-x.py").write_text("import json\n")
    package_folder, script = (None, str(folder / "-x.py")) if alone else (str(folder), "./-x.py")
    job_program = program.find(package_folder, None, script, None)
    assert job_program.command == ("python", "./-x.py")
    assert job_program.script and job_program.script.endswith("/-x.py")


def test_job_dir_is_passed_only_if_the_script_itself_knows_it(inventory: Inventory, folder: Path) -> None:
    job_program = program.find(str(folder), None, "helper.py", None)
    assert start_of(make_plan(inventory, job_program))[1] == ["python", "helper.py"]
    files = job_program.source.files
    assert program.files_defining_flags(job_program.folder, job_program.command, files) == {
        "work/helper.py": files["work/helper.py"]
    }
    assert program.files_defining_flags("", (), files) == files
    job = build_job(JobFlags("j"), inventory, "work", files, job_program.command, job_program.folder)
    built = package.build(job_program.source, "", job_program.script)
    reproduced = reproduce.build_job(inventory, manifest.manifest(inventory, job, built), "j2", built)
    assert (job.job_dir_flag, reproduced.job_dir_flag, reproduced.command) == (None, None, ("python", "helper.py"))
    assert program.files_defining_flags(job_program.folder, ("./run.sh",), files) is None


def test_job_dir_is_not_passed_for_another_entry_point_or_a_test_of_the_package() -> None:
    files = {
        "mine/__init__.py": b"",
        "mine/train.py": b"def main():\n    from . import flags\n",
        "mine/flags.py": b"'--job-dir'\n",
        "mine/evaluate.py": b"import argparse\n",
        "mine/tests/test_train.py": b"'--job-dir'\n",
    }

    def sources(module: str, **changes: bytes) -> set[str]:
        return {
            *(program.files_defining_flags("", (), {**files, **{f"mine/{k}.py": v for k, v in changes.items()}}, module) or ())
        }

    assert sources("mine.train") == {"mine/__init__.py", "mine/train.py", "mine/flags.py"}
    assert sources("mine.evaluate") == {"mine/__init__.py", "mine/evaluate.py"}
    assert sources("mine", __main__=b"from mine import train\n") >= {"mine/__main__.py", "mine/flags.py"}
    for start in (b"import importlib\n", b"exec(open('x.py').read())\n", b"for module in pkgutil.iter_modules(path): pass\n"):
        assert sources("mine.evaluate", evaluate=start) == {*files}, "it may start any of them"
    assert sources("mine.nope") == {*files}


def test_a_jobs_pythonpath_has_further_folders_for_imports(inventory: Inventory, folder: Path) -> None:
    (folder / "train.py").write_text("import one, numpy")
    for env, needed in (("A=parts", {"one", "numpy"}), ("PYTHONPATH=parts", {"numpy"})):
        submission = train.prepare(inventory, JobFlags("j", script="train.py", env=[env]), str(folder))
        assert submission.package.imports.keys() == needed
        content = manifest.manifest(inventory, submission.job, submission.package)
        bucket = FolderBucket(folder.parent)
        (folder.parent / paths.folder("j")).mkdir(parents=True, exist_ok=True)
        bucket.upload(paths.package("j"), submission.package.archive)
        assert reproduce.read_package(bucket, "j", content).imports.keys() == needed


@pytest.mark.parametrize("python", ["python", "python3"])
def test_a_command_of_either_name_of_python_is_one_of_its_script(inventory: Inventory, folder: Path, python: str) -> None:
    job_program = program.find(str(folder), None, None, f"{python} train.py")
    job_plan = make_plan(inventory, job_program)
    assert start_of(job_plan)[1] == [python, "train.py", "--job-dir", "/bucket/jobs/j/output"]
    assert "numpy" in package.build(job_program.source, "", job_program.script).imports


def test_a_script_without_a_package_is_sent_alone(inventory: Inventory, folder: Path) -> None:
    job_program = program.find(None, None, str(folder / "helper.py"), None)
    assert list(job_program.source.files) == ["helper/helper.py"]
    assert start_of(make_plan(inventory, job_program)) == (Path("package/helper"), ["python", "helper.py"])
    train_only = program.find(None, None, str(folder / "train.py"), None)
    message = (
        f"train.py:2 imports helper, which is beside it here, and a script is sent alone: --package {folder} --script train.py"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)} sends the folder$"):
        package.build(train_only.source, "", train_only.script)
    broken = program.find(None, None, str(folder / "old.py"), None)
    with pytest.raises(UsageError, match=rf"^{folder}/old\.py:1 does not compile"):
        package.build(broken.source, "", broken.script)


def test_a_command_is_of_the_folder_or_of_the_hosts(inventory: Inventory, folder: Path) -> None:
    job_program = program.find(str(folder), None, None, "./run.sh 'two words'")
    assert start_of(make_plan(inventory, job_program, "last")) == (Path("package/work"), ["./run.sh", "two words", "last"])
    assert job_program.source.executables == {"work/run.sh"}
    assert package.build(job_program.source, "", job_program.script).imports == {}
    host_program = program.find(None, None, None, "hostname -I")
    assert (host_program.source.name, host_program.source.files) == ("hostname", {})
    assert start_of(make_plan(inventory, host_program)) == (Path("package"), ["hostname", "-I"])
    python = program.find(None, None, None, "python -c 1")
    assert (python.script, package.build(python.source, "", python.script).files) == (None, {})


def test_a_single_file_runs_in_a_folder_of_its_name(
    inventory: Inventory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    job_program = program.find(None, None, None, "work/run.sh x")
    assert (list(job_program.source.files), job_program.source.executables) == (["run/run.sh"], {"run/run.sh"})
    assert start_of(make_plan(inventory, job_program)) == (Path("package/run"), ["./run.sh", "x"])


def test_the_default_is_the_folder_trainer_or_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.find(None, None, None, None) == program.find(str(program.SHIPPED), None, None, None)
    note = "there is no package trainer in this folder: it is the shipped one that runs\n"
    assert capsys.readouterr().err == note
    for name in ("trainer", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    assert list(program.find(None, None, None, None).source.files) == ["trainer/__init__.py"]
    (tmp_path / "trainer/__init__.py").unlink()
    (tmp_path / "trainer").rmdir()
    module = program.find("mine", "mine.task", None, None)
    assert (list(module.source.files), module.folder, module.script) == (["mine/__init__.py"], "", None)
    assert program.find(None, None, None, "hostname -I").folder == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command",
    [
        *("python train.py", "python -X faulthandler train.py", "bash ./run.sh x", "bash data.txt"),
        *("torchrun --nproc-per-node 1 train.py", "timeout 9 python train.py"),
    ],
)
def test_a_command_without_a_package_names_no_local_script(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(
        UsageError, match=r"^--command names the file \S+, and without --package no file is sent: add --package \.$"
    ):
        program.find(None, None, None, command)
    assert program.find(".", None, None, command).command == tuple(command.split())
    assert program.find(None, None, None, "python gone.py").command == ("python", "gone.py")


@pytest.mark.parametrize(
    ("package_folder", "command", "message"),
    [
        ("parts", "python parts/one.py", "names the file parts/one.py, and runs in parts, which lacks it: write one.py"),
        ("parts", "bash run.sh", "names the file run.sh, and runs in parts, which lacks it: give --package the folder of it"),
        (".", "python -O ignored.py", "names the file ignored.py, which is left out of packages: take it out of the ignore "),
        (None, "python -m http.server", None),
        (None, "nvidia-smi -f data.txt", None),
        (None, "curl -o run.sh http://master-0/", None),
        (None, f"python -c '{'x = 1; ' * 99}print(1)'", None),
        (None, f"bash -ec '{'true && ' * 99}exec python train.py'", None),
        ("parts", "python one.py", None),
        ("parts", "python -m one", None),
        ("parts", "python -m parts.one", None),
        (".", "python -m parts.one", None),
        (".", "python parts/one.py run.sh", None),
    ],
)
def test_a_command_s_script_is_found_from_the_package(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package_folder: str | None,
    command: str,
    message: str | None,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "ignored.py").touch()
    (folder / ".scaletierignore").write_text("ignored.py\n")
    if message is None:
        assert program.find(package_folder, None, None, command).command == tuple(shlex.split(command))
        assert capsys.readouterr().err == ""
        return
    with pytest.raises(UsageError, match=f"^--command {re.escape(message)}"):
        program.find(package_folder, None, None, command)


@pytest.mark.parametrize(
    ("package_folder", "module", "message"),
    [
        (None, "parts.one", "not sent: unless the hosts have it, --module parts.one --package parts instead"),
        (None, "train", "not sent: unless the hosts have it, --script train.py instead"),
        ("parts", "train", "not in parts: unless the hosts have it, it will fail"),
    ],
)
def test_a_module_that_is_not_sent_is_noted_as_hosts_may_have_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package_folder: str,
    module: str,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert program.find(package_folder, None, None, f"python -m {module}").command == ("python", "-m", module)
    assert capsys.readouterr().err == f"--command runs the module {module}, which is {message}\n"


def test_a_script_has_any_first_line_if_its_name_is_of_python(folder: Path) -> None:
    (folder / "plain.sh").write_text("echo hi\n")
    with pytest.raises(UsageError, match=r"^--script .*plain\.sh is no Python, by its name: --command \./plain\.sh$"):
        program.find(None, None, str(folder / "plain.sh"), None)
    (folder / "deps.py").write_text("#!/usr/bin/env -S uv run --script\nprint(1)\n")
    assert program.find(str(folder), None, "deps.py", None).command == ("python", "deps.py")


@pytest.mark.parametrize(
    ("command", "literal"),
    [
        ("ls parts/*.py", "parts/*.py"),
        ("cat data.tx? other", "data.tx?"),
        ("ls -l [dr]*", "[dr]*"),
        ("tar xf ~/data.tar", "~/data.tar"),
        ("ls $HOME/x", "$HOME/x"),
        ("cat '' /bucket/data/*.csv", "/bucket/data/*.csv"),
        ("cat 'a b'/x \"c d\" parts/\\\n*.py", "parts/*.py"),
        *(("ls 'parts/*.py'", None), ('ls "parts/*.py"', None), (r"ls parts/\*.py", None), ("sh -c 'ls ~ *'", None)),
        ("python train.py --files=parts/*.py", None),  # a shell leaves it as it is, too
        ("python train.py gone/*.csv http://master-0/?a=[1] a~ x*y", None),
        ("python train.py $JOB_DIR/x ${INDEX} $$HOME '$HOME'", None),
    ],
)
def test_what_a_shell_would_expand_is_noted(
    folder: Path, command: str, literal: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    program.find(str(folder), None, None, command)
    how = "--command \"sh -c '…'\" has it expanded, or put it in quotes if the program expands it"
    note = f"--command runs no shell, so the program gets {literal} as it is: {how}\n"
    assert capsys.readouterr().err == (note if literal else "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"#!/bin/sh\r\necho\r\n", "has the line ends of Windows, with which no host finds its program: dos2unix {}/run.sh"),
        (
            b"echo hi\n",
            'is no program that Linux starts: give it a first line such as #!/bin/sh, or --package {} --command "sh',
        ),
        (b"", "is no program that Linux starts: "),
        (b"#!/bin/sh", None),
        (b"#! /usr/bin/env -S python3 -u\n", None),
        *((b"#!%s/python\n" % each, None) for each in (b"/opt/scaletier/runtimes/a/bin", b"/bucket/data/env/bin", b".")),
        (
            b"#!/usr/local/bin/python3 -u\n",
            "begins with #!/usr/local/bin/python3, which hosts do not have: write #!/usr/bin/env python3",
        ),
        (b"\x7fELF\x02", None),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0\x01", None),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xb7\0\x01", "is built for another processor, and hosts have x86-64"),
    ],
)
def test_a_file_that_no_host_can_start_is_refused(folder: Path, content: bytes, message: str | None) -> None:
    (folder / "run.sh").write_bytes(content)
    if message is None:
        assert program.find(str(folder), None, None, "./run.sh").command == ("./run.sh",)
        return
    with pytest.raises(UsageError, match=f"^--command ./run.sh {re.escape(message.format(folder))}"):
        program.find(str(folder), None, None, "./run.sh")


def test_a_shell_s_script_with_line_ends_of_windows_is_refused(folder: Path) -> None:
    (folder / "run.sh").write_bytes(b"set -e\r\npython train.py\r\n")
    with pytest.raises(
        UsageError, match=r"^--command runs \./run\.sh, which has Windows' line ends, as no shell reads them: "
    ) as error:
        program.find(str(folder), None, None, "bash -e ./run.sh")
    assert str(error.value).endswith(f": dos2unix {folder}/run.sh")
    assert program.find(str(folder), None, None, "sh -c 'cat run.sh'").command[0] == "sh"
    assert program.find(str(folder), None, None, "cat run.sh").command[0] == "cat"
    (folder / "run.sh").write_bytes(b"exec python $1\n")
    (folder / "windows.py").write_bytes(b"import os\r\n")
    assert program.find(str(folder), None, None, "bash run.sh windows.py").command[0] == "bash"


def test_a_script_alone_that_imports_a_file_named_like_a_module_of_python_is_refused(folder: Path) -> None:
    (folder / "one.py").write_text("import io, time, queue\n")
    (folder / "time.py").touch()  # Python has these two in itself, and finds no file of their names
    (folder / "io.py").touch()
    assert package.build(program.find(None, None, str(folder / "one.py"), None).source, "", "one/one.py").imports == {}
    (folder / "queue.py").touch()
    with pytest.raises(UsageError, match=r"^one\.py:1 imports queue, which is beside it here, and a script is sent alone: "):
        package.build(program.find(None, None, str(folder / "one.py"), None).source, "", "one/one.py")


def test_an_archive_of_python_is_a_script(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "__main__.py").write_text("import far\n")
    zipapp.create_archive(folder / "code", folder / "app.pyz", "/usr/bin/env python3")
    for job_program in (
        program.find(None, None, str(folder / "app.pyz"), None),
        program.find(str(folder), None, None, "python app.pyz"),
    ):
        assert package.build(job_program.source, "", job_program.script).imports == {}
        assert job_program.command == ("python", "app.pyz")


def test_a_package_has_the_name_of_the_link_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "parts/__init__.py").touch()
    (folder / "linked").symlink_to("parts")
    assert program.find("linked", None, None, None).source.names == ["linked"]
    assert program.find("./linked/", None, "one.py", None).folder == "linked"


def test_a_program_of_hosts_precedes_a_file_of_its_name(folder: Path) -> None:
    (folder / "ls").write_text("")
    assert program.find(str(folder), None, None, "ls -l").command == ("ls", "-l")
    assert program.find(str(folder), None, None, "parts").command == ("parts",)
    assert program.find(str(folder), None, None, str(folder / "helper.py")).command == (str(folder / "helper.py"),)
    (folder / "tool").write_text("#!/usr/bin/env python3\n")
    assert program.find(str(folder), None, "tool", None).command == ("python", "tool")


def test_a_command_gets_no_job_dir_flag(inventory: Inventory, folder: Path) -> None:
    job_program = program.find(str(folder), None, None, "./run.sh")
    job_plan = make_plan(inventory, job_program, job_dir="/bucket/there")
    assert start_of(job_plan)[1] == ["./run.sh"]
    assert job_plan.tasks["master-0"].environment["JOB_DIR"] == "/bucket/there"
    job = build_job(JobFlags("j"), inventory, "work", job_program.source.files, job_program.command, job_program.folder)
    assert job.training_input["command"] == ["./run.sh"]
    assert "pythonModule" not in job.training_input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"script": "nope.py"}, "there is no file nope.py in {folder}: give --script the path of one"),
        ({"script": "../outside.py"}, "--script ../outside.py is not in {folder}, or is left out of packages: give --package"),
        ({"script": "run.sh"}, "--script run.sh is no Python, by its first line: --command ./run.sh"),
        ({"script": "t.ipynb"}, "--script t.ipynb is a notebook: jupyter nbconvert --to script t.ipynb makes a program of it"),
        ({"command": "run.sh"}, "--command run.sh is no program that hosts have; did you mean ./run.sh?"),
        ({"command": "exec ./run.sh"}, "--command runs no shell, and exec is a shell's: --command \"sh -c '…'\""),
        ({"command": "cd src"}, "--command runs no shell, and cd is a shell's: --command \"sh -c '…'\""),
        ({"command": "ls | wc"}, "--command runs no shell, and | is a shell's: --command \"sh -c '…'\""),
        ({"command": "(ls)"}, "--command runs no shell, and (ls) is a shell's"),
        ({"command": "'' x"}, "--command is empty: name a program of the package"),
        (
            {"command": "python prepare.py\n  python train.py"},
            "--command runs no shell, and a line break is a shell's: --command \"sh -c '…'\", or in single quotes if your "
            "program is to read it; or end a line that goes on with \\",
        ),
        ({"command": "hostname; date"}, "--command runs no shell, and ; is a shell's"),
        ({"command": "echo hi >out.txt"}, "--command runs no shell, and > is a shell's"),
        ({"command": "python t.py 2>&1"}, "--command runs no shell, and >& is a shell's"),
        ({"command": "python t.py|tee log"}, "--command runs no shell, and | is a shell's"),
        ({"command": "echo `nproc`"}, "--command runs no shell, and ` is a shell's"),
        ({"command": "make -j$(nproc)"}, "--command runs no shell, and $( is a shell's"),
        ({"command": 'echo "$(nproc)"'}, "--command runs no shell, and $( is a shell's"),
        ({"command": "bash -c 'ls' >out"}, "--command runs no shell, and > is a shell's"),
        (
            {"command": "A=1 B='x y' python t.py"},
            "--command begins with A=1, which only a shell reads: --env A=1 --env 'B=x y' --command 'python t.py'",
        ),
        ({"script": "train.py", "command": "./run.sh"}, "--script and --command both say what runs: use only one of them"),
        ({"script": "train.py", "module": "m"}, "--module and --script both say what runs"),
        ({"command": " "}, "--command is empty: name a program of the package"),
        ({"command": "'x"}, "--command cannot be split (No closing quotation)"),
        ({"command": "./data.txt x"}, "--command ./data.txt is not executable: chmod +x {folder}/data.txt"),
        ({"command": "./none.sh"}, "there is no file ./none.sh in {folder}"),
        ({"script": "train.py", "folder": "{folder}/none"}, "package {folder}/none does not exist: give --package a directory"),
        ({"command": "ls", "folder": "{folder}/none"}, "package {folder}/none does not exist: give --package a directory"),
    ],
)
def test_an_invalid_program_is_refused(folder: Path, flags: dict[str, str], message: str) -> None:
    arguments = {"module": None, "script": None, "command": None, "folder": "{folder}"} | flags
    with pytest.raises(UsageError) as error:
        program.find(arguments.pop("folder").format(folder=folder), **arguments)  # type: ignore[union-attr,arg-type]
    assert str(error.value).startswith(message.format(folder=folder))


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("python -u train.py", ["python", "-u", "train.py"]),
        ("python -m helper", ["python", "-m", "helper"]),
        ("python nofile.py", ["python", "nofile.py"]),
        ("python", ["python"]),
        ("python ./train.py", ["python", "./train.py"]),
        ("{folder}/run.sh x", ["{folder}/run.sh", "x"]),  # a program on the hosts, by its path
        ("parts/../run.sh", ["./run.sh"]),
    ],
)
def test_a_command_is_split_into_argv(folder: Path, text: str, argv: list[str]) -> None:
    job_program = program.find(str(folder), None, None, text.format(folder=folder))
    assert list(job_program.command) == [word.format(folder=folder) for word in argv]
    assert package.build(job_program.source, "", job_program.script).files == job_program.source.files
    assert (job_program.script == "work/train.py") == (text == "python ./train.py")


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        (r"find . -exec rm {} \;", ["find", ".", "-exec", "rm", "{}", ";"]),
        ("find . -exec rm {} ';'", ["find", ".", "-exec", "rm", "{}", ";"]),
        (r"""echo 'a > b' \`x\` '$(x)' "a; '>' $x" """, ["echo", "a > b", "`x`", "$(x)", "a; '>' $x"]),
        ('bash -c "make -j$(nproc) > log"', ["bash", "-c", "make -j$(nproc) > log"]),
        ("python t.py --x A=1 \\\n --y 2", ["python", "t.py", "--x", "A=1", "--y", "2"]),
        ("\npython t.py\n  --x 'a\nb'\n", ["python", "t.py", "--x", "a\nb"]),
        ("sh -c '\nls\n' x", ["sh", "-c", "\nls\n", "x"]),
        # An escaped dollar: the shell of the script reads it, and no host fills in the variable.
        (r'sh -c "echo \$JOB_DIR \`date\` \" \\\$x" \${JOB_DIR}', ["sh", "-c", 'echo $JOB_DIR `date` " \\$x', "$${JOB_DIR}"]),
        (
            r"""echo "\${JOB_DIR}" \$JOB_ID/x \$HOME '\${TYPE}' "it's \$9" """,
            ["echo", "$${JOB_DIR}", "$$JOB_ID/x", "$HOME", r"\${TYPE}", "it's $9"],
        ),
    ],
)
def test_quoted_shell_characters_are_allowed(text: str, argv: list[str]) -> None:
    assert list(program.find(None, None, None, text).command) == argv


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pyproject.toml", '[project.scripts]\nother-tool = "a:b"\ntool = "mine.cli:main"\n'),
        ("setup.cfg", "[options.entry_points]\nconsole_scripts =\n    tool = mine.cli:main\n"),
        ("setup.py", 'setup(entry_points={"console_scripts": ["tool=mine.cli:main"]})\n'),
    ],
)
def test_a_console_script_of_a_project_is_refused_with_its_module(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(UsageError) as error:
        program.find(str(folder), None, None, "tool --x 1")
    assert str(error.value) == (
        f"--command tool is a script of {file}, which only an installed project has: --module mine.cli builds and runs it, "
        "if mine.cli calls main() as __main__"
    )
    assert program.find(str(folder), None, None, "ool").command == ("ool",)


def test_paths_may_include_the_folder_and_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "link.py").symlink_to("helper.py")
    assert program.find("work", None, "link.py", None).script == "work/link.py"
    assert program.find("work", None, "work/train.py", None).command == ("python", "train.py")
    assert program.find("work", None, None, "work/run.sh x").command == ("./run.sh", "x")
    alone = program.find(None, None, "work/link.py", None)
    assert (alone.command, list(alone.source.files)) == (("python", "link.py"), ["link/link.py"])
    assert package.build(alone.source, "", alone.script).imports == {"pandas": "link.py:1"}
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere/there.py").write_text("")
    (folder / "outside").symlink_to("../elsewhere")
    for path in ("../w/../work/train.py", "../work/train.py"):
        (folder.parent / "w").mkdir(exist_ok=True)
        monkeypatch.chdir(folder.parent / "w")
        assert program.find("../work", None, path, None).command == ("python", "train.py")
    monkeypatch.chdir(folder.parent)
    assert program.find("work", None, "outside/there.py", None).command == ("python", "outside/there.py")


def test_keys_of_stacks_are_not_packaged(folder: Path) -> None:
    for name in (".scaletier/local/id_ed25519", ".pulumi-state/passphrase", ".cache/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("secret")
    assert not [path for path in package.find_folder(folder).files if "/." in path]
