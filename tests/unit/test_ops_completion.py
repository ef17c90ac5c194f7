"""What Tab offers: the words so far on one side, what may come next on the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from callfab import ROOT, call_fab
from opsdata import inventory_json

from ops import completion
from ops.completion import KEPT_IDS, Known, Shape, candidates, job_ids, known, remember

JOB = {"--job": "job", "-j": "job"}
LOGS = JOB | {"--lines": "lines", "--replica": "replica"}
TASKS = {
    "get": Shape(["--json"], JOB, ["job", "path"]),
    "jobs": Shape(["--json", "--limit"], {"--limit": "limit"}),
    "logs": Shape(["--follow", "--job", "--json", "--lines"], LOGS, ["replica", "job"]),
    "train": Shape(["--job", "--resume"], JOB | {"--resume": "resume"}, ["job"]),
}
CORE = Shape(["--help", "--stack"], {"--stack": "stack"})
NAMES = {"job": ["job02", "job01"], "replica": ["master-0", "worker-0", "worker", "all"], "stack": ["local"]}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["get", "jobs", "logs", "train"]),
        ("lo", ["logs"]),
        ("--", ["--help", "--stack"]),
        ("--stack ", ["local"]),
        ("--stack local jo", ["jobs"]),
        ("jobs ", []),
        ("jobs --l", ["--limit"]),
        ("jobs --limit ", []),
        ("nope ", []),
        ("logs", ["logs"]),
        ("logs ", ["master-0", "worker-0", "worker", "all", "job02", "job01"]),
        ("logs w", ["worker-0", "worker"]),
        ("logs worker ", ["job02", "job01"]),
        ("logs worker job01 ", []),
        ("logs --follow m", ["master-0"]),
        ("logs --lines 5 m", ["master-0"]),
        ("logs -j ", ["job02", "job01"]),
        ("logs --job job0", ["job02", "job01"]),
        ("logs --job=job01", ["--job=job01"]),
        ("logs --job = job01", ["job01"]),
        ("logs --job =", ["job02", "job01"]),
        ("logs --job = job01 --j", ["--job", "--json"]),
        ("get ", ["job02", "job01"]),
        ("get job01 ", []),
        ("train ", []),
        ("train --job ", []),
        ("train --resume ", ["job02", "job01"]),
        ("train -- --j", []),
    ],
)
def test_what_comes_next(typed: str, found: list[str]) -> None:
    assert candidates(typed.split(" "), TASKS, CORE, lambda kind: NAMES.get(kind, [])) == found


def test_nothing_at_all_is_the_beginning() -> None:
    assert candidates([], TASKS, CORE, lambda kind: []) == [*TASKS]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for stack in ("one", "two"):
        (folder := tmp_path / ".scaletier" / stack).mkdir(parents=True)
        (folder / "inventory.json").write_text(inventory_json())
    return tmp_path


def test_the_names_that_files_tell(root: Path) -> None:
    remember(root / ".scaletier" / "one", ["job02", "job01", "job02", "$(rm -r /)", "a b"])
    one = Known(root, "one")
    replicas = ["ps-0", "master-0", "worker-0", "worker-1", "evaluator-0", "ps", "master", "worker", "evaluator", "all"]
    assert (one("replica"), one("stack"), one("lines")) == (replicas, ["one", "two"], [])
    assert one("job") == ["job02", "job01", "a", "b"], "no more than a shell may be given"
    assert Known(root, "two")("job") == []
    assert Known(root, "three")("replica") == []
    assert Known(root, None)("replica") == [], "of two stacks none is meant"
    (root / ".scaletier" / "two" / "inventory.json").write_text("{}")
    assert Known(root, "two")("replica") == []
    (root / ".scaletier" / "two" / "inventory.json").unlink()
    assert Known(root, None)("replica") == replicas


def test_which_stack_and_which_project(root: Path, tmp_path: Path) -> None:
    here = tmp_path / "elsewhere"
    for words in (["--stack", "one", "--project", str(root)], ["--stack=one", f"--project={root}"]):
        assert known(words, {}, here)("replica")
    environment = {"PULUMI_STACK": "one", "SCALETIER_PROJECT": str(root)}
    assert known([], environment, here)("replica")
    assert not known([], {"PULUMI_STACK": "one"}, here)("replica")


def test_only_the_newest_ids_are_kept_and_no_failure_is_one(tmp_path: Path) -> None:
    remember(tmp_path, (f"job{n}" for n in range(KEPT_IDS + 50)))
    assert job_ids(tmp_path) == [f"job{n}" for n in range(KEPT_IDS)]
    assert [path.name for path in tmp_path.iterdir()] == [completion.JOB_IDS]
    remember(tmp_path / "gone", ["job01"])
    assert job_ids(tmp_path / "gone") == []


def test_the_real_tasks(root: Path) -> None:
    project = {"SCALETIER_PROJECT": str(root), "PULUMI_STACK": "one"}
    assert call_fab("--complete", "--", "fab", "to", **project).stdout == "top\n"
    assert call_fab("--complete", "--", "fab", "shell", "master", **project).stdout == "master-0\nmaster\n"
    assert "--no-follow\n" in call_fab("--complete", "--", "fab", "train", "--", **project).stdout
    assert call_fab("--complete", "--", "fab", "--st", **project).stdout == "--stack\n"
    none = call_fab("--complete", "--", "fab", "describe", "", SCALETIER_PROJECT=str(root / "none"))
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "")


def test_the_scripts_are_what_a_shell_understands(root: Path) -> None:
    text = call_fab("--print-completion-script", "bash").stdout
    assert text.endswith("complete -F _complete_fab -o default fab\n")
    call = "\n".join((text, "COMP_WORDS=(fab logs worker-); COMP_CWORD=2; _complete_fab; printf '%s|' \"${COMPREPLY[@]}\""))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SCALETIER_PROJECT": str(root), "PULUMI_STACK": "one"}
    ran = subprocess.run(["bash", "-c", call], capture_output=True, text=True, check=True, env=environ, cwd=ROOT)
    assert ran.stdout == "worker-0|worker-1|"
    assert "compdef _complete_fab fab\n" in call_fab("--print-completion-script", "zsh").stdout
    wrong = call_fab("--print-completion-script", "tcsh")
    assert (wrong.returncode, wrong.stderr) == (2, "error: there is no completion for 'tcsh'; valid are bash, zsh\n")
