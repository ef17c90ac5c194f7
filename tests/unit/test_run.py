"""The run of tests by phases: signals reach pytest, a second run is refused, and child processes end."""

from __future__ import annotations

import contextlib
import errno
import gc
import getpass
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import pytest
import run
from interrupts import postponed
from run import Outcome
from shards import SHARDS, Shard
from waiting import limit, wait_for


class _Child:
    """A fake of pytest's process."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Lock:
    monkeypatch.setattr(run, "CACHE", tmp_path)
    return run.Lock("make test")


def test_files_of_another_user_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(run, "CACHE", tmp_path)
    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(SystemExit) as refused:
        run.Lock("make test")
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} belongs to another user")


def test_a_signal_interrupts_pytest_once_if_the_output_is_closed(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        phases, child = run.Run(lock), _Child()
        phases._children.append(cast("subprocess.Popen[bytes]", child))
        for _ in range(2):
            phases.interrupt(signal.SIGTERM, None)
    assert child.signals == [signal.SIGINT]
    assert phases.signal == signal.SIGTERM


def test_a_signal_during_a_print_leaves_the_rest_of_the_output(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to print in a handler if the line that it interrupts waits for a reader, such as `less`."""
    lines: list[str] = []

    def write(text: str) -> None:
        lines.append(text)
        if phases.signal == 0:
            phases.interrupt(signal.SIGINT, None)
        elif "cleaning up" in text:
            raise RuntimeError("reentrant call")

    phases = run.Run(lock)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    for text in ("one", "summary"):
        run.say(text)
    assert phases.signal == signal.SIGINT
    assert [line for line in lines if line.isalpha()] == ["one", "summary"]


def test_a_second_run_of_a_checkout_is_refused_by_name(lock: run.Lock, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run.Lock("make test-all")
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: another test run of this checkout is active: make test, since ")
    assert line.endswith(f"or end it by `kill -INT {os.getpid()}`")


def test_a_surviving_pytest_of_a_killed_run_is_named() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    text = json.dumps({"what": "make test", "since": "10:00:00", "processes": [ended.pid, os.getpid()]})
    assert run.describe_holder(text) == f"make test, since 10:00:00. Wait for it, or end it by `kill -INT {os.getpid()}`"
    of_an_earlier_run = json.dumps({"what": "make test", "since": "09:00:00", "processes": [ended.pid]})
    for text in ("", of_an_earlier_run):
        assert run.describe_holder(text) == "it starts just now. Wait for it"


def test_busy_loops_end_with_the_process_that_started_them() -> None:
    parent = "import os, run, sys\nwith run.busy_loops(1) as loops:\n    print(loops[0].pid, flush=True)\n    os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": str(Path(run.__file__).parent)}
    result = subprocess.run(
        [sys.executable, "-c", parent], env=environment, capture_output=True, text=True, timeout=limit(), check=True
    )
    stat = Path("/proc", result.stdout.strip(), "stat")
    wait_for(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "the loop has ended")


@pytest.mark.parametrize("full", ["root", "temporary", None])
def test_too_little_space_is_reported_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, full: str | None
) -> None:
    folders = {"root": tmp_path / "root", "temporary": tmp_path / "temporary"}
    least = {folders["root"]: run._LEAST_GIB, folders["temporary"]: run._LEAST_TEMPORARY_GIB}
    monkeypatch.setattr(run, "ROOT", folders["root"])
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(folders["temporary"]))
    missing = 2**29 if full else 0
    monkeypatch.setattr(
        "shutil.disk_usage",
        lambda path: SimpleNamespace(free=least[path] * 2**30 - (missing if path == folders.get(full or "") else 0)),
    )
    if full is None:
        run.check_disk()
        return
    with pytest.raises(SystemExit) as refused:
        run.check_disk()
    assert refused.value.code == 2
    needed = least[folders[full]]
    problem = f"{needed - 0.5:.1f} GiB of disk are free in {folders[full]}, and the tests need {needed}: make room first"
    assert problem in capsys.readouterr().err


def test_a_space_in_the_temporary_folder_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: "/my files")
    with pytest.raises(SystemExit):
        run.check_disk()
    assert capsys.readouterr().err.startswith("error: TMPDIR is invalid: /my files has a space")


@pytest.mark.parametrize("created", [True, False], ids=["by a test", "by the user"])
def test_a_stack_of_the_same_name_is_refused(
    created: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = '[{"name": "local"}, {"name": "story"}]'
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listed))
    monkeypatch.setattr(run, "MARKS", tmp_path)
    run.check_stacks(["e2e"])
    if created:
        (tmp_path / "story").touch()
        run.check_stacks(["story"])
        return
    with pytest.raises(SystemExit):
        run.check_stacks(["story"])
    assert "`pulumi stack rename --stack story OTHER` keeps yours" in capsys.readouterr().err


def test_stacks_of_a_killed_run_are_removed_first(
    lock: run.Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(run, "MARKS", tmp_path)
    monkeypatch.setattr(run.Run, "phase", lambda _, name, command: commands.append(command) or Outcome(name))
    phases = run.Run(lock)
    run.remove_leftovers(phases, ["story"])
    assert (commands, capsys.readouterr().out) == ([], "")
    for name in ("story", "e2e"):
        (tmp_path / name).touch()
    run.remove_leftovers(phases, ["story"])
    assert commands == [["python", "tests/leftovers.py", "story"]]
    assert capsys.readouterr().out.splitlines() == [
        "stack e2e is left by a killed test run: remove it by `.venv/bin/python tests/leftovers.py e2e`",
        "stack story is left by a killed test run: removed first",
    ]
    assert [outcome.name for outcome in phases.outcomes] == ["leftovers"]


def test_processes_side_by_side_fit_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, gibibytes, expected in ((2, 64, 2), (64, 8, 4), (4, 1, 1)):
        monkeypatch.setattr(run, "available_cpus", lambda processors=processors: processors)
        monkeypatch.setattr(run, "available_memory", lambda gibibytes=gibibytes: gibibytes * 2**30)
        assert run.cores() == expected


def test_make_unit_runs_as_many_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("available_cpus", 64), ("available_memory", 2**35)):
        monkeypatch.setattr(run, name, lambda value=value: value)
    assert request.config.hook.pytest_xdist_auto_num_workers(config=request.config) == run.cores() == 16


def test_busy_loops_are_counted_by_the_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts: list[int] = []

    def busy_loops(count: int) -> contextlib.AbstractContextManager[None]:
        counts.append(count)
        return contextlib.nullcontext()

    for name, value in {
        "check_disk": lambda: None,
        "check_stacks": lambda _: None,
        "test": lambda _: 0,
        "CACHE": tmp_path,
        "MARKS": tmp_path,
    }.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run, "busy_loops", busy_loops)
    monkeypatch.setattr(run, "available_cpus", lambda: 8)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "test", "--load", "2"])
    assert run.main() == 0
    assert counts == [16]


def test_the_tests_use_no_name_and_backend_of_the_shell(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain `su` leaves USER and LOGNAME as they were, and tests give files to the user of that name."""
    for name in ("LOGNAME", "USER", "no_proxy", "NO_PROXY", "KERAS_BACKEND", "KERAS_HOME"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setattr(gc, "disable", lambda: None)
    plugins = {getattr(plugin, "__file__", ""): plugin for plugin in request.config.pluginmanager.get_plugins()}
    conftest = plugins[str(Path(run.__file__).with_name("conftest.py"))]
    conftest.pytest_configure(SimpleNamespace(getini=lambda _: ""))
    assert {os.environ["LOGNAME"], os.environ["USER"], getpass.getuser()} == {pwd.getpwuid(os.getuid()).pw_name}
    assert (os.environ["KERAS_BACKEND"], os.environ["KERAS_HOME"]) == ("tensorflow", os.devnull)


def test_a_full_disk_leaves_no_pytest_behind(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run, "BIN", Path("/bin"))
    monkeypatch.setattr(Path, "write_text", write_text)
    assert run.Run(lock).phase("one", ["true"]).code == 0


def test_a_phase_runs_all_commands_in_sessions_of_their_own_that_hold_the_lock(
    lock: run.Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "BIN", Path("/bin"))
    (tmp_path / "one.xml").write_text(REPORT.format(""))  # of an earlier run
    script = f"cut -d' ' -f6 /proc/$$/stat; echo $$; readlink /proc/$$/fd/{lock.descriptor}"
    with (tmp_path / "log").open("w+b") as log:
        outcome = run.Run(lock).phase("one", ["sh", "-c", "exit 3"], ["sh", "-c", script], log=log)
        log.seek(0)
        session, process, file = log.read().decode().split()
    assert (outcome.code, outcome.seconds) == (3, {})
    assert (session, file) == (process, str((tmp_path / "lock").resolve()))


@pytest.mark.usefixtures("interruptible")
def test_a_signal_while_a_command_starts_reaches_it(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BIN", Path("/bin"))
    phases = run.Run(lock)
    monkeypatch.setattr(run.Lock, "write", lambda *_: setattr(phases, "signal", signal.SIGINT))
    assert phases.phase("one", ["sleep", "600"]).code == -signal.SIGINT


def test_a_signal_ends_lint_and_what_it_has_started_at_once(
    lock: run.Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGINT ends mypy only after half a minute, and the mypy that `names.py` has started gets no signal to one process."""
    os.mkfifo(fifo := tmp_path / "fifo")
    started = f"exec 3>{fifo}\n(sleep 60; echo left >&3) &\ntouch {tmp_path}/ready\nwait\nexit 0"
    (ruff := tmp_path / "ruff").write_text(f"#!/bin/sh\ntrap '' INT\n{started}")
    ruff.chmod(0o755)
    monkeypatch.setattr(run, "BIN", tmp_path)
    phases = run.Run(lock)
    with ThreadPoolExecutor(2) as pool:
        lint, held = pool.submit(phases.lint), pool.submit(fifo.read_bytes)
        wait_for((tmp_path / "ready").exists, "ruff runs")
        phases.interrupt(signal.SIGINT, None)
        lint.result()
        assert held.result() == b""
    assert [(outcome.name, outcome.code) for outcome in phases.outcomes] == [("lint", -signal.SIGKILL)]


def test_no_shard_begins_after_a_signal(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "set_up", lambda _: None)
    monkeypatch.setattr(run.Run, "shards", lambda *_: pytest.fail("a shard was started"))
    phases = run.Run(lock)
    phases.signal = signal.SIGTERM
    assert run.test_all(phases, ["pages", "jobs"]) == 0


def test_a_set_up_that_fails_or_needs_root_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 7))
    run.set_up([SHARDS["jobs"]])
    for user, name, code in ((1000, "storage", 7), (0, "gcp-cluster", 7), (1000, "gcp-cluster", 2)):
        monkeypatch.setattr(run.os, "geteuid", lambda user=user: user)
        with pytest.raises(SystemExit) as ended:
            run.set_up([SHARDS[name]])
        assert ended.value.code == code
    assert capsys.readouterr().err.startswith("error: the emulated Google needs root. Without: make test-all SHARD='here ")


def test_no_tests_are_counted_after_a_signal(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: pytest.fail("pytest was started"))
    phases = run.Run(lock)
    phases.signal = signal.SIGTERM
    assert run.count_all(phases) == (0, [])


def test_shards_whose_collection_a_signal_ends_are_no_errors(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the collecting pytest too."""
    phases = run.Run(lock)

    def interrupted(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        assert not phases.signal, "a further pytest was started"
        phases.signal = signal.SIGINT
        return subprocess.CompletedProcess([], -signal.SIGINT, "tests/unit/test_a.py: 3\n", "")

    monkeypatch.setattr(run.subprocess, "run", interrupted)
    assert run.count_all(phases) == (3, [])


def test_shards_that_cannot_be_collected_fail_the_run(
    lock: run.Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = {"whole": "def test_one(): pass\n\n\ndef test_two(): pass\n", "broken": "import missing_module\n", "none": ""}
    for name, text in texts.items():
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    shards = {name: run.Shard((f"tests/{name}",), cluster=name) for name in texts}
    monkeypatch.setattr(run, "SHARDS", shards | {"more": run.Shard(("tests/whole",), cluster="whole", options=("-k", "two"))})
    monkeypatch.setattr(run.Run, "lint", lambda run: run.outcomes.append(Outcome("lint")))
    monkeypatch.setattr(run.Run, "shards", lambda run, shards: run.outcomes.extend(map(Outcome, shards)))
    phases = run.Run(lock)
    assert run.test(phases) == 3
    assert [outcome.name for outcome in phases.outcomes] == ["lint", "here", "story", "count"]
    assert phases.failed == ["count"]
    output = capfd.readouterr().out
    assert "the tests of broken cannot be collected:" in output
    assert "No module named 'missing_module'" in output
    assert "of none" not in output


def test_make_lint_runs_the_commands_of_make_test(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Sequence[list[str]]] = []
    monkeypatch.setattr(run.Run, "phase", lambda _, name, *commands, **__: phases.append(commands) or Outcome(name))
    run.Run(lock).lint()
    (commands,) = phases
    assert ["python", "tests/names.py"] in commands
    recipe = " && ".join(f"$(BIN)/{' '.join(command)}" for command in commands)
    assert f"\t@{recipe}\n" in (run.ROOT / "Makefile").read_text()


def test_lint_leaves_out_what_set_up_made_without_git_too(tmp_path: Path) -> None:
    shutil.copy(run.ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/made.py").write_text("x  = 1\n")
    assert subprocess.run([run.BIN / "ruff", "format", "--check", "."], cwd=tmp_path).returncode == 0


def test_no_story_begins_after_a_signal(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(run: run.Run, shards: Mapping[str, Shard]) -> None:
        run.outcomes += map(Outcome, shards)
        run.signal = signal.SIGTERM

    monkeypatch.setattr(run.Run, "lint", lambda _: None)
    monkeypatch.setattr(run.Run, "shards", shards)
    phases = run.Run(lock)
    assert run.test(phases) == 0
    assert [outcome.name for outcome in phases.outcomes] == ["here"]


def test_the_summary_has_each_phase_the_slowest_tests_and_the_skipped(lock: run.Lock) -> None:
    phases = run.Run(lock)
    assert run.summary(phases, 0, 0.5).splitlines()[-1] == "0 tests ran in 0.5 min, all passed"
    seconds = {f"test_a.py::test_{number}": float(number) for number in range(12)}
    phases.outcomes = [
        Outcome("here", 0, 1.5, seconds, set(), {"test_a.py::test_other": "no wheel"}),
        Outcome("story", 1, 2.0, {"test_story.py::test_up": 90.0}, {"test_story.py::test_up"}),
    ]
    _, heads, *rows, last = run.summary(phases, 1500, 3.5).splitlines()
    assert last == "13 of 1,500 tests ran in 3.5 min, failed: story; `make test-all` runs the other 1,487 too"
    assert [row.split() for row in (heads, *rows[:2])] == [
        ["shard", "tests", "failed", "skipped", "minutes"],
        ["here", "12", "0", "1", "1.5"],
        ["story", "1", "1", "0", "2.0"],
    ]
    slowest = [f"{number:>7.1f} s test_a.py::test_{number}" for number in range(11, 2, -1)]
    assert rows[2:-1] == [
        *("", "slowest 10", "   90.0 s test_story.py::test_up", *slowest),
        *("", "skipped", "  test_a.py::test_other: no wheel"),
    ]
    phases.signal = signal.SIGINT
    assert run.summary(phases, 0, 3.5).splitlines()[-1] == "13 tests ran in 3.5 min, ended by SIGINT"


@pytest.mark.parametrize(
    ("code", "number", "result"), [(0, 0, 0), (2, 0, 1), (0, signal.SIGINT, 130), (1, signal.SIGTERM, 143)]
)
def test_the_exit_code_says_how_the_run_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, number: int, result: int
) -> None:
    def test(phases: run.Run) -> int:
        phases.outcomes += [Outcome("lint"), Outcome("here", code)]
        phases.signal = number
        return 7

    monkeypatch.setattr(run, "CACHE", tmp_path)
    monkeypatch.setattr(run, "MARKS", tmp_path)
    monkeypatch.setattr(run, "check_disk", lambda: None)
    handled: list[object] = []
    monkeypatch.setattr(run, "check_stacks", lambda _: handled.append("stacks"))
    monkeypatch.setattr(run, "test", test)
    monkeypatch.setattr(run.signal, "signal", lambda number, _: handled.append(number))
    monkeypatch.setattr(run.signal, "getsignal", lambda _: signal.SIG_IGN if code else signal.SIG_DFL)
    monkeypatch.setattr(sys, "argv", ["run.py", "test"])
    assert run.main() == result
    assert "\n0 of 7 tests ran in " in capsys.readouterr().out
    assert (handled[0], handled[-1]) == (signal.SIGINT, "stacks"), "Ctrl-C while Pulumi lists stacks is no traceback"
    assert (signal.SIGHUP in handled) == (not code), "nohup ignores it"


REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_one" time="30"/>
<testcase classname="tests.e2e.test_a" name="test_two" time="12"><skipped message="no wheel"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_three" time="60">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("fault", "code", "codes"), [("", 0, (0, 0)), ("<error/>", 1, (0, 1)), ("<failure/>", 1, (0, 1)), ("", 3, (3, 3))]
)
def test_each_shard_of_a_cluster_has_an_outcome(tmp_path: Path, fault: str, code: int, codes: tuple[int, int]) -> None:
    shards = {name: run.Shard((f"tests/e2e/test_{name}.py",)) for name in ("a", "b")}
    (tmp_path / "report.xml").write_text(REPORT.format(fault))
    phase = Outcome("a b", code, minutes=2.5)
    phase.read(tmp_path / "report.xml")
    first, second = phase.split(shards)
    assert (first.name, [*first.seconds], first.skipped) == (
        "a",
        ["tests/e2e/test_a.py::test_one"],
        {"tests/e2e/test_a.py::test_two": "no wheel"},
    )
    assert (second.name, [*second.seconds], second.skipped) == ("b", ["tests/e2e/test_b.py::test_three"], {})
    assert (first.minutes, second.minutes) == (1.5, 1.0), "the first shard includes the time outside tests"
    assert (first.code, second.code) == codes
    assert (len(first.failed), len(second.failed)) == (0, bool(fault))


def test_a_file_that_cannot_be_imported_fails_its_phase(tmp_path: Path) -> None:
    unimportable = '<testcase classname="" name="tests.e2e.test_c" time="0"><error message="collection failure"/></testcase>'
    (tmp_path / "report.xml").write_text(REPORT.format("").replace("</testsuite>", f"{unimportable}</testsuite>"))
    phase = Outcome("a b", 1)
    phase.read(tmp_path / "report.xml")
    first, second = phase.split({name: run.Shard((f"tests/e2e/test_{name}.py",)) for name in ("a", "b")})
    assert (first.code, len(first.failed), second.code, len(second.failed)) == (1, 1, 0, 0)


def test_shards_of_one_cluster_run_in_one_call_beside_those_of_others(
    lock: run.Lock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], bool]] = []
    all_of_them = threading.Barrier(3, timeout=limit())

    def shards(_: run.Run, shards: Mapping[str, Shard], log: IO[bytes] | None = None) -> None:
        calls.append(([*shards], log is not None))
        if next(iter(shards.values())).cluster:
            all_of_them.wait()
        if log:
            log.write(b"of others\n")

    monkeypatch.setattr(run, "set_up", lambda _: None)
    monkeypatch.setattr(run.Run, "shards", shards)
    run.test_all(run.Run(lock), ["jobs", "security", "gcp-cluster", "pages", "examples"])
    assert calls[0] == (["pages"], False)
    assert sorted(calls[1:]) == [(["examples"], True), (["gcp-cluster"], True), (["jobs", "security"], False)]
    assert capfd.readouterr().out.split() == ["of", "others"] * 2


def test_the_tests_of_a_cluster_get_its_name(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    environments, commands = [], []

    def phase(_: run.Run, name: str, command: Sequence[str], environment: Mapping[str, str], log: None) -> Outcome:
        environments.append(environment)
        commands.append(" ".join(command))
        return Outcome(name)

    monkeypatch.setattr(run.Run, "phase", phase)
    monkeypatch.setattr(run, "cores", lambda: 3)
    run.Run(lock).shards({"here": run.QUICK})
    assert re.fullmatch(r"pytest -n 3 --dist worksteal --junitxml=\S+ -m not full tests/unit .*", commands.pop())
    assert environments.pop() == {}
    for name in ("examples", "storage"):
        run.Run(lock).shards({name: SHARDS[name]})
    assert environments == [{"CLUSTER": SHARDS["examples"].cluster}, SHARDS["storage"].environment]
    assert " -n " not in commands[0], "hosts are shared"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT as `main` does: a background process of a shell ignores it, and its children would, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_clean_up_ends_before_an_interrupt() -> None:
    ended = False
    with pytest.raises(KeyboardInterrupt), postponed():
        signal.raise_signal(signal.SIGINT)
        ended = True
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_parallel_phases_are_all_interrupted_and_named(lock: run.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BIN", Path("/bin"))
    phases, write, alone = run.Run(lock), run.Lock.write, []

    def observed(self: run.Lock, children: Iterable[int]) -> None:
        alone.append(phases._changing.locked())
        write(self, children)

    monkeypatch.setattr(run.Lock, "write", observed)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(phases.phase, name, ["sleep", "600"]) for name in ("one", "two")]

        def holders() -> list[int]:
            processes: list[int] = json.loads((run.CACHE / "holder.json").read_text())["processes"]
            return processes

        wait_for(lambda: len(holders()) == 3, "both have started, and are named")
        assert {*holders()} == {os.getpid(), *(child.pid for child in phases._children)}
        phases.interrupt(signal.SIGINT, None)
        assert [future.result().code for future in futures] == [-signal.SIGINT] * 2
    assert alone == [True, True], "each writes while the other waits"
