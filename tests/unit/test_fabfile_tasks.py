"""The command line of `fab`: its list, its help, its errors for invalid calls, and its imports."""

from __future__ import annotations

import gc
import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import fabric
import pytest
from callfab import ROOT, call_fab
from google.auth.exceptions import DefaultCredentialsError
from invoke import Collection, Result, UnexpectedExit
from waiting import limit

import fabfile
from infra.scale_tiers import SpecError
from jobs.bucket import BucketError, Conflict
from jobs.chunks import LogFilter
from jobs.serialization import RecordError
from ops.cli import commandline, start, task
from ops.errors import DETACHED, HostError, OpsError, UsageError, explain
from ops.models.batch import BatchOptions
from ops.plan.plan import PlanRequest
from ops.submit.config import JobFlags

Fab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fab(tmp_path: Path) -> Fab:
    """Call fab without a stack, in a home with an invalid SSH configuration."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Match nonsense\n  \0\n")
    return partial(call_fab, HOME=str(tmp_path), PULUMI_STACK="nowhere")


@pytest.mark.parametrize("argv", [["--list"], []])
def test_the_list_of_commands(fab: Fab, argv: list[str]) -> None:
    result = fab(*argv)
    assert result.returncode == 0
    listed = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(listed) == TASKS
    titles = [line for line in result.stdout.splitlines() if line and line[0] != " "]
    assert titles == ["Jobs:", "Results of jobs:", "Served models:", "Inputs of jobs:", "The cluster:"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nope", "jobs"], "error: there is no flag --nope before the command; fab --help lists the valid ones\n"),
        (["nope"], "there is no command 'nope'; valid are bundle, cancel, connect, cost, data"),
        (["render", "job01"], "fab render was replaced by: fab train --dry-run"),
        (["trian"], "there is no command 'trian'; did you mean train?; valid are"),
        (["plan", "--until", "accuracy"], "--until 'accuracy' is not of the form METRIC=VALUE"),
        (["plan", "--until", "loss=0.2", "--replicas", "1"], "--replicas '1': at least two different numbers"),
        (["plan", "--until-seconds", "9"], "--until-seconds needs a target: give --until"),
        (["logs", "all", "--what"], "fab logs has no flag --what; fab logs --help lists the valid ones"),
        (["logs", "--folow"], "fab logs has no flag --folow; did you mean --follow?"),
        (["train", "--max-steps", "300"], "an argument of the trainer goes behind --, as in: fab train … -- --max-steps …"),
        (
            ["plan", "--script", "a.py"],
            "fab plan has no flag --script: it runs a module that prints Train lines, as the library",
        ),
        (["train", "--prioritty", "3"], "fab train has no flag --prioritty; did you mean --priority?"),
        (
            ["train", "--region=us-central1"],
            "fab train has no flag --region: not needed, as the stack defines where hosts are; an argument of the trainer goes",
        ),
        (["train", "--async"], "fab train has no flag --async: fab train and fab predict --batch have --no-follow"),
        (["train", "--stream-logs"], "no flag --stream-logs: fab train follows the logs by default; an argument"),
        (["train", "--worker-count", "2"], "no flag --worker-count: --replicas worker=N takes N workers"),
        (["train", "--parameter-server-image-uri=x"], "image-uri: --runtime gives a job its own packages, and --command"),
        (["predict", "--batch-size", "9"], "no flag --batch-size: not needed, as instances are batched by themselves; fab"),
        (["describe", "job01", "job02"], "fab describe takes no further argument 'job02': see fab describe --help"),
        (["nope", "--help"], "there is no command 'nope'"),
        (["logs", "--stack", "elsewhere", "worker"], "stack 'elsewhere' (--stack, PULUMI_STACK) does not exist here"),
        (["--stack"], "--stack needs a value"),
        (["jobs", "--project", "/nowhere"], "/nowhere is no checkout of scaletier: it does not have scaletier's Pulumi.yaml"),
        (["jobs", "--stack", "elsewhere"], "stack 'elsewhere' (--stack, PULUMI_STACK) does not exist here"),
        (["logs"], "stack 'nowhere' (--stack, PULUMI_STACK) does not exist here"),
        (["logs", "all", "--lines"], "--lines needs a value"),
        (["logs", "all", "--job"], "--job needs a value"),
        (["train", "--job", "job01", "--priority"], "--priority needs a value"),
        (["--help", "nope"], "there is no command 'nope'"),
        (
            ["train", "--job", "job01", "--args", "--follow --job x"],
            "stack 'nowhere' (--stack, PULUMI_STACK) does not exist here",
        ),
        (["shell", "master-0", "--", "df", "-h"], "stack 'nowhere' (--stack, PULUMI_STACK) does not exist here"),
        (["report", "job01", "job02"], "stack 'nowhere' (--stack, PULUMI_STACK) does not exist here"),
        (["report", *"abcdefgh"], "fab report takes no further argument 'h': see fab report --help"),
        (["jobs"], "Run: make stack STACK=nowhere && pulumi up --stack nowhere"),
    ],
)
def test_an_invalid_call_is_one_line_and_exit_code_2(fab: Fab, argv: list[str], message: str) -> None:
    result = fab(*argv)
    assert result.returncode == 2
    assert message in result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("asking Pulumi ")]  # printed if that takes long
    assert [line.partition(": ")[0] for line in lines] == ["error"]
    assert result.stdout == ""


NO_FLAGS = JobFlags(more_args=[], labels=[], env=[], secret=[])
CALLS: list[tuple[str, str, tuple[object, ...]]] = [
    ("hosts", "show.hosts.hosts", ("cluster", False)),
    ("hosts --json", "show.hosts.hosts", ("cluster", True)),
    ("connect", "cluster.inventory.connect", (False,)),
    ("connect --json", "cluster.inventory.connect", (True,)),
    ("doctor", "show.doctor.doctor", (False, False)),
    ("doctor --fix --json", "show.doctor.doctor", (True, True)),
    ("top", "show.top.top", ("cluster", False, False)),
    ("top --once --json", "show.top.top", ("cluster", True, True)),
    ("cost", "show.cost.cost", ("cluster", False)),
    ("cost --json", "show.cost.cost", ("cluster", True)),
    ("shell", "cluster.shell.shell", ("inventory", None, [])),
    ("shell worker-2 -- df -h", "cluster.shell.shell", ("inventory", "worker-2", ["df", "-h"])),
    ("data", "submit.data.data", ("cluster", None, None, None, False, False)),
    ("data put a b --yes --json", "submit.data.data", ("cluster", "put", "a", "b", True, True)),
    ("runtimes", "submit.runtimes.runtimes", ("cluster", None, None, False, False)),
    ("runtimes rm a --yes --json", "submit.runtimes.runtimes", ("cluster", "rm", "a", True, True)),
    ("jobs", "show.jobs.jobs", ("cluster", None, None, False)),
    ("jobs --filter a --limit 5 --json", "show.jobs.jobs", ("cluster", "a", "5", True)),
    ("describe", "show.jobs.describe", ("cluster", None, False)),
    ("describe a --json", "show.jobs.describe", ("cluster", "a", True)),
    ("logs", "screen.logs.show_logs", ("cluster", None, None, LogFilter(100), False, False, False)),
    (
        "logs worker a --follow --lines 5 --grep x --severity ERROR --plain --json",
        "screen.logs.show_logs",
        ("cluster", "worker", "a", LogFilter(5, severity="ERROR", pattern="x"), True, True, True),
    ),
    ("wait", "submit.end.wait", ("cluster", None, False)),
    ("wait a --json", "submit.end.wait", ("cluster", "a", True)),
    ("cancel", "submit.end.cancel", ("cluster", None, False)),
    ("cancel a --json", "submit.end.cancel", ("cluster", "a", True)),
    ("reproduce", "submit.reproduce.reproduce", ("cluster", None, None, True, False)),
    ("reproduce a --job b --no-follow --json", "submit.reproduce.reproduce", ("cluster", "a", "b", False, True)),
    ("plan --job a", "plan.planned.compare_with_plan", ("cluster", "a", False)),
    ("plan --job a --json", "plan.planned.compare_with_plan", ("cluster", "a", True)),
    ("plan", "plan.plan.plan", (PlanRequest(None, None, None, None, [], 60.0, None, None), False)),
    (
        "plan --package a --module b --config c --args d --seconds 7 --parameters-mb 2.5 --env A=1 --env-file f --json -- e",
        "plan.plan.plan",
        (PlanRequest("a", "b", "c", " d", ["e"], 7.0, 2.5, None, ("A=1",), "f"), True),
    ),
    ("delete", "submit.end.delete", ("cluster", None, False, False)),
    ("delete a --yes --json", "submit.end.delete", ("cluster", "a", True, True)),
    ("prune", "submit.end.prune", ("cluster", None, False, False)),
    ("prune --keep 3 --yes --json", "submit.end.prune", ("cluster", "3", True, True)),
    ("train", "submit.runner.train", ("cluster", NO_FLAGS, None, True, True, False, False)),
    (
        "train a --package b --no-queue --no-follow --json --plain --start-hosts -- c",
        "submit.runner.train",
        ("cluster", replace(NO_FLAGS, job_id="a", start_hosts=True, more_args=["c"]), "b", False, False, True, True),
    ),
    ("train --dry-run", "submit.runner.dry_run", ("cluster", NO_FLAGS, None, False)),
    ("train a --package b --dry-run --json", "submit.runner.dry_run", ("cluster", replace(NO_FLAGS, job_id="a"), "b", True)),
    ("deploy", "models.deploy.deploy", ("cluster", None, None, None, None, False)),
    ("deploy --model a --version b --job c --origin d --json", "models.deploy.deploy", ("cluster", *"abcd", True)),
    ("models", "models.versions.models", ("cluster", False)),
    ("models --json", "models.versions.models", ("cluster", True)),
    ("versions", "models.versions.versions", ("cluster", None, False)),
    ("versions a --json", "models.versions.versions", ("cluster", "a", True)),
    ("set-default", "models.versions.set_default", ("cluster", None, None, False)),
    ("set-default a b --json", "models.versions.set_default", ("cluster", "a", "b", True)),
    ("undeploy", "models.versions.undeploy", ("cluster", None, None, False)),
    ("undeploy a b --json", "models.versions.undeploy", ("cluster", "a", "b", True)),
    ("delete-version", "models.versions.delete_version", ("cluster", None, None, False, False)),
    ("delete-version a b --yes --json", "models.versions.delete_version", ("cluster", "a", "b", True, True)),
    ("predict", "models.predict.predict", ("cluster", None, None, None, None, False)),
    ("predict a --version b --json-instances c --signature d --json", "models.predict.predict", ("cluster", *"abcd", True)),
    ("predict --batch", "models.batch.batch", ("cluster", BatchOptions(None, None, None, None), True, False)),
    (
        "predict a --batch --version b --input c --output d --signature e --job f --replicas 2 --no-follow --json",
        "models.batch.batch",
        ("cluster", BatchOptions("a", "b", "c", "d", "e", "f", "2"), False, True),
    ),
    ("serve", "models.serve.serve", ("cluster", None, None)),
    ("serve a --port 7", "models.serve.serve", ("cluster", "a", "7")),
    ("get", "show.fetch.get", ("cluster", None, None, None, False)),
    ("get a b c --json", "show.fetch.get", ("cluster", "a", "b", "c", True)),
    ("export", "models.export.export", ("cluster", None, None, False)),
    ("export a b --json", "models.export.export", ("cluster", "a", "b", True)),
    ("report", "report.command.report", ("cluster", [], None, False)),
    ("report a b --output c --json", "report.command.report", ("cluster", ["a", "b"], "c", True)),
    ("bundle", "report.bundle.bundle", ("cluster", None, None, False, False)),
    ("bundle a b --force --json", "report.bundle.bundle", ("cluster", "a", "b", True, True)),
    ("tensorboard", "models.tensorboard.tensorboard", ("cluster", None, False, None)),
    ("tensorboard a --all --port 7", "models.tensorboard.tensorboard", ("cluster", "a", True, "7")),
]


TASKS = sorted({line.split()[0] for line, _, _ in CALLS})


@pytest.mark.parametrize(("line", "function", "arguments"), CALLS)
def test_a_task_calls_one_function_with_its_flags(fab: Fab, line: str, function: str, arguments: tuple[object, ...]) -> None:
    with (
        mock.patch("ops.cluster.cluster.ClusterClient.load", lambda: "cluster"),
        mock.patch("ops.cluster.inventory.load", lambda: "inventory"),
        mock.patch("ops.cluster.cluster.connect_early") as connect_early,
        mock.patch(f"ops.{function}", return_value=3) as called,
    ):
        result = fab(*line.split())
    assert connect_early.called == (function == "submit.runner.train")
    assert (result.returncode, result.stderr) == (3, "")
    called.assert_called_once_with(*arguments)


@pytest.mark.parametrize("flags", ["--input a", "--output a", "--job a", "--replicas 2", "--no-follow"])
def test_a_flag_of_batches_needs_batch(fab: Fab, flags: str) -> None:
    result = fab("predict", *flags.split())
    message = f"error: {flags.split()[0]} is valid only with --batch: fab predict --batch --input PATTERN --output PATH\n"
    assert (result.returncode, result.stderr) == (2, message)


@pytest.mark.parametrize(
    "argv", [["--help", "logs"], ["logs", "--help"], ["logs", "-h"], ["logs", "master-0", "--help"], ["-h", "logs"]]
)
def test_a_task_s_help_is_printed_wherever_help_is_asked_for(fab: Fab, argv: list[str]) -> None:
    result = fab(*argv)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: fab logs [REPLICA] [JOB] [--flags]\n")
    assert "show lines as they come" in result.stdout


def test_the_usage_shows_a_repeatable_argument(fab: Fab) -> None:
    assert fab("report", "--help").stdout.startswith("Usage: fab report [JOB …] [--flags]\n")


def test_the_general_help(fab: Fab) -> None:
    result = fab("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: fab [--stack NAME] COMMAND [ARGUMENTS] [--flags] [-- …]\n\nJobs:\n\n")
    assert [task for task in TASKS if f"  {task} " not in result.stdout] == []
    flags = result.stdout.partition("  fab COMMAND --help shows the rest. Before or after a command:\n\n")[2]
    assert [line.split()[:2] for line in flags.splitlines() if line.startswith("  -")] == [
        ["--debug", "Enable"],
        ["-h,", "--help=NAME"],
        ["-l,", "--list=NAME"],
        ["-V,", "--version"],
        ["--stack=NAME", "stack"],
        ["--project=NAME", "checkout"],
    ]
    assert "Enable debug output." in flags


def test_the_version_is_scaletier_s(fab: Fab) -> None:
    assert fab("--version").stdout.startswith(f"scaletier {version('scaletier')} (Fabric ")


def test_fab_runs_in_any_folder(tmp_path: Path) -> None:
    environ = {**os.environ, "PULUMI_STACK": "nowhere"}
    line = [Path(sys.executable).with_name("fab"), "jobs"]
    result = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=limit(), check=False)
    assert (result.returncode, "stack 'nowhere' (--stack, PULUMI_STACK) does not exist here" in result.stderr) == (2, True)
    (tmp_path / "state").mkdir()
    (tmp_path / "Pulumi.yaml").write_text("name: scaletier\nruntime: python\nbackend: {url: file://./state}\n")
    result = subprocess.run(
        [*line, "--project", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=limit(), check=False
    )
    assert (result.returncode, "error: no stack is up here: run pulumi up (" in result.stderr) == (2, True)


def test_a_short_flag_means_the_same_for_all_commands() -> None:
    meanings: dict[str, set[str]] = {}
    for context in Collection.from_module(fabfile).to_contexts():
        for arg in context.args.values():
            for name in arg.nicknames:
                meanings.setdefault(name, set()).add(arg.name)
    assert meanings == {"j": {"job"}, "f": {"follow"}, "n": {"lines"}}


COLLECTION = Collection.from_module(fabfile)
CONTEXTS = {context.name: context for context in COLLECTION.to_contexts()}
POSITIONALS = {name: COLLECTION[name].positionals for name in CONTEXTS}
CORE = commandline.flags_with_values(commandline.CommandLine().initial_context)
VALUED = {name: commandline.flags_with_values(context) | CORE for name, context in CONTEXTS.items()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("logs", "logs"),
        ("logs worker", "logs --replica=worker"),
        ("logs worker job01", "logs --replica=worker --job=job01"),
        ("logs --lines 5 worker", "logs --lines 5 --replica=worker"),
        ("logs -j job01 worker --json", "logs -j job01 --replica=worker --json"),
        ("logs --follow -n 5 worker", "logs --follow -n 5 --replica=worker"),
        ("logs -fn 20 worker", "logs -fn 20 --replica=worker"),
        ("train --secret-file f job01", "train --secret-file f --job=job01"),
        ("logs --stack e2e worker", "logs --stack e2e --replica=worker"),
        ("logs --lines=5 jobs", "logs --lines=5 --replica=jobs"),
        ("jobs what", "jobs what"),
    ],
)
def test_positional_arguments_become_flags(line: str, expected: str) -> None:
    assert commandline.expand_positionals(line.split(), POSITIONALS, VALUED) == expected.split()


EXAMPLES = {name: commandline.examples(COLLECTION[name]) for name in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_every_flag_has_help_and_the_help_ends_with_examples(fab: Fab, task: str) -> None:
    result = fab("--help", task)
    assert result.returncode == 0
    output = result.stdout
    flags = [line for line in output.splitlines() if line.startswith("  -")]
    assert all(len(flag.split("  ")) > 2 for flag in flags), flags
    examples = "".join(f"  {example}\n" for example in EXAMPLES[task])
    assert EXAMPLES[task]
    assert output.endswith(f"\nExamples:\n\n{examples}")
    assert output.count(EXAMPLES[task][0] + "\n") == 1, "the examples are printed once"


@pytest.mark.parametrize(("task", "line"), [(task, line) for task, lines in EXAMPLES.items() for line in lines])
def test_examples_are_valid_command_lines(task: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse each example with the program itself, without running it."""
    words = shlex.split(line.partition(" < ")[0], comments=True)
    monkeypatch.setattr(sys, "argv", words)
    program = commandline.CommandLine(name="scaletier", executor_class=fabric.Executor, config_class=fabric.Config)
    program.create_config()
    program.parse_core(words)
    program.parse_collection()
    program.parse_tasks()
    (context,) = program.tasks
    assert context.name == task
    set_flags = {arg.name for arg in context.args.values() if arg.got_value}
    rest = words.index("--") if "--" in words else len(words)
    assert bool(set_flags) == (rest > 2), "every argument is parsed"
    assert rest == len(words) or COLLECTION[task].rest


@pytest.mark.parametrize("line", ["jobs logs all", "logs a b jobs", "hosts --json train"])
def test_two_commands_in_one_call_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"one command at a time: fab \w+, and then fab \w+"):
        commandline.expand_positionals(line.split(), POSITIONALS, VALUED)


@pytest.mark.parametrize(
    ("line", "task"),
    [
        ("help", ""),
        ("help train", "train"),
        ("train help", "train"),
        ("train --job x -h", "train"),
        ("train --job help", None),
        ("train --follow", None),
        ("shell w -- help --help", None),
    ],
)
def test_the_task_whose_help_is_asked_for(line: str, task: str | None) -> None:
    assert commandline.help_command(line.split()) == task


def test_completion_is_that_of_invoke(fab: Fab) -> None:
    assert fab("--complete", "--", "fab", "to").stdout.split() == TASKS
    assert {"--no-follow", "--dry-run"} <= {*fab("--complete", "--", "fab", "train", "--").stdout.split()}
    assert "complete -F _complete_fab -o default fab\n" in fab("--print-completion-script", "bash").stdout
    unsupported = fab("--print-completion-script", "tcsh")
    assert (unsupported.returncode, unsupported.stderr.count("\n")) == (2, 1)
    assert unsupported.stderr.startswith('error: Completion for shell "tcsh" not supported (options are: ')


def test_a_closed_pipe_is_no_error(fab: Fab) -> None:
    line = f"{Path(sys.executable).with_name('fab')} --help | head -1"
    result = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=limit(), check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_listing_the_tasks_imports_no_slow_modules() -> None:
    code = "import sys, fabric.main; before = set(sys.modules); import fabfile; print(*sorted(set(sys.modules) - before))"
    code += "; assert not sys.dont_write_bytecode"  # as invoke would have it
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    others = {name for name in result.stdout.split() if not name.startswith("ops.cli")}
    assert others <= {"fabfile", "gc", "infra", "infra.templates", "ops", "ops.errors"}


@pytest.mark.parametrize("module", ["ops.screen.logs", "ops.show.jobs", "ops.submit.end"])
def test_reading_a_log_or_a_job_imports_no_slow_modules(module: str) -> None:
    code = f"import sys, fabric.main; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in result.stdout.split()}
    assert not packages & {"fsspec", "jinja2", "pydantic", "pulumi", "rich", "tensorflow", "yaml"}


def test_arguments_after_two_dashes() -> None:
    assert commandline.after_dashes(["fab", "train", "--", "--a", "b c", "--"]) == ["--a", "b c", "--"]
    assert commandline.after_dashes(["fab", "train"]) == []


def test_the_value_of_args_is_never_parsed_as_a_flag() -> None:
    tokens = ["train", "--job", "x", "--args", "--json", "--args=--follow", "--labels", "a=b"]
    protected = ["train", "--job", "x", "--args", " --json", "--args", " --follow", "--labels", "a=b"]
    assert commandline.protect_args(tokens) == protected


def test_an_old_flag_name_is_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert commandline.rename_flags(["train", "--wake", "--args", " --wake"]) == ["train", "--start-hosts", "--args", " --wake"]
    assert capsys.readouterr().err == "--wake is called --start-hosts now\n"
    assert commandline.rename_flags(["shell", "--replica=worker-0"]) == ["shell", "--host=worker-0"]
    assert capsys.readouterr().err == "--replica is called --host now\n"
    assert commandline.rename_flags(["logs", "--replica", "worker-0"]) == ["logs", "--replica", "worker-0"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("bad\n  call"), "error: bad call\n", 2),
        (OpsError("failed"), "error: failed\n", 1),
        (SpecError("no\nsuch tier"), "error: no such tier\n", 2),
        (
            UnexpectedExit(Result(command="true", exited=9)),  # type: ignore[no-untyped-call]
            "error: the connection failed (Encountered a bad command exit code! Command: 'true' Exit code: 9 "
            "Stdout: already printed Stderr: already printed): try again, then pulumi up\n",
            1,
        ),
        (OSError("odd"), "error: odd\n", 1),
        (HostError("ps-0", "does not answer"), "error: ps-0 does not answer\n", 1),
        (FileNotFoundError(2, "No such file or directory", "/x"), "error: /x: No such file or directory\n", 1),
        (KeyboardInterrupt(), "stopped\n", DETACHED),
        (BucketError("gs://b did not answer within 20 s"), "error: the bucket fails: gs://b did not answer within 20 s\n", 1),
        (BucketError(28, "/bucket: No space left"), "error: the bucket fails: /bucket: No space left\n", 1),
        (RecordError("the queue is no\nJSON"), "error: a record in the bucket cannot be read: the queue is no JSON\n", 1),
        (
            Conflict("cluster/queue.json"),
            "error: cluster/queue.json was changed by another writer again and again: try again\n",
            1,
        ),
        (EOFError(), "error: the connection failed (EOFError): try again, then pulumi up\n", 1),
        (
            ZeroDivisionError("x"),
            "error: this is a bug of scaletier, ZeroDivisionError: x (SCALETIER_DEBUG=1 shows where)\n",
            1,
        ),
    ],
)
def test_errors_have_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, line: str, code: int
) -> None:
    @task.command
    def body() -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        body()
    assert (caught.value.code, capsys.readouterr().err) == (code, line)


def test_a_signal_ends_a_command_like_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    handlers = list[Any]()

    @task.command
    def body() -> int:
        handlers.extend(signal.getsignal(number) for number in numbers)
        handlers[0](signal.SIGTERM, None)
        return 0

    try:
        with pytest.raises(SystemExit) as caught:
            body()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (caught.value.code, capsys.readouterr().err) == (DETACHED, "stopped\n")
    assert handlers == [task._interrupt] * 2


def test_with_debugging_an_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @task.command
    def body() -> int:
        raise error

    monkeypatch.setenv("SCALETIER_DEBUG", "1")
    for error in (UsageError("bad"), SystemExit(7)):
        with pytest.raises(type(error)) as caught:
            body()
        assert caught.value is error


class Pipe(io.StringIO):
    """A stdout whose reader has closed it."""

    def fileno(self) -> int:
        return 77


@pytest.mark.parametrize("main", ["start", "task"])
def test_a_command_ends_well_if_its_reader_is_gone(monkeypatch: pytest.MonkeyPatch, main: str) -> None:
    opened, copied = list[tuple[object, ...]](), list[tuple[int, int]]()
    threshold = gc.get_threshold()

    def fail() -> int:
        raise BrokenPipeError

    monkeypatch.setattr("ops.cli.commandline.main", fail)
    monkeypatch.setattr(sys, "stdout", Pipe())
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lambda *arguments: opened.append(arguments) or 5)
        patched.setattr(os, "dup2", lambda *fds: copied.append(fds))
        start.run() if main == "start" else task.command(fail)()
    gc.set_threshold(*threshold)
    assert (opened, copied) == ([(os.devnull, os.O_WRONLY)], [(5, 77)])


def test_ctrl_c_during_the_imports_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    threshold, thresholds = gc.get_threshold(), list[int]()

    def fail() -> None:
        thresholds.append(gc.get_threshold()[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.cli.commandline.main", fail)
    with pytest.raises(SystemExit) as caught:
        start.run()
    gc.set_threshold(*threshold)
    assert (caught.value.code, capsys.readouterr(), thresholds) == (DETACHED, ("", "stopped\n"), [200_000])


def test_errors_of_google_s_libraries_are_explained() -> None:
    error, bucket = DefaultCredentialsError("gone"), BucketError("gs://b: gone")  # type: ignore[no-untyped-call]
    bucket.__cause__ = error
    for each in (error, bucket):
        assert explain(each) == ("no Google credentials (gone): run `gcloud auth application-default login`", 1)


def test_a_command_exits_with_its_body_s_result() -> None:
    assert task.command(lambda: None)() is None  # type: ignore[func-returns-value]
    with pytest.raises(SystemExit) as caught:
        task.command(lambda: 1)()
    assert caught.value.code == 1
