"""A job's files outside an empty JOB_DIR: found without following links, copied within limits."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from launcherhost import Host
from waiting import wait_for

from hosts.agent import keep_unsaved, unsaved
from hosts.agent.keep_unsaved import LimitError, LocalFolder, Search, UnsavedFile, keep, open_file
from hosts.agent.process import Child, ProgramSpec, RunningProgram, StartProgram
from hosts.agent.replica_rules import Exit
from hosts.agent.supervisor import Assignment
from hosts.agent.unsaved import JobFolders
from jobs import paths
from jobs.folder_bucket import FolderBucket
from jobs.records import HostConfig, Plan, UnsavedFiles

LONG = 60.0


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write a package with one file and the mark that it is complete, and a JOB_DIR."""
    folder = tmp_path / "state/package"
    folder.mkdir(parents=True)
    (folder / "task.py").write_text("packaged")
    (tmp_path / "state/package.sha256").write_text("0")
    (tmp_path / "bucket/jobs/job01/output").mkdir(parents=True)
    wait_for_newer_ctime(tmp_path / "state/package.sha256")
    return folder


def wait_for_newer_ctime(mark: Path) -> None:
    """Wait until files that are written from now on are newer than this one."""
    probe = mark.with_name("probe")
    wait_for(lambda: probe.write_text("") == 0 and probe.stat().st_ctime_ns > mark.stat().st_ctime_ns, "the clock of files")
    probe.unlink()


def unpack_time(package: Path) -> int:
    return package.with_name("package.sha256").stat().st_ctime_ns


def output(package: Path) -> Path:
    return package.parents[1] / "bucket/jobs/job01/output"


def keep_files(package: Path, *more: tuple[str, str], seconds: float = LONG) -> dict[str, Any]:
    return keep(str(output(package)), "master-0", unpack_time(package), [(str(package), ""), *more], seconds)


def test_files_that_a_job_wrote_elsewhere_are_kept_without_its_package(package: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    caches = (
        home / ".keras/keras.json",
        package / "__pycache__/task.pyc",
        package / "c/x",
        package / "__autograph_generated_file1.py",
    )
    for path in (package / "model/model.txt", home / "notes", home / "deep/.own/x", *caches):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    (package / "c/CACHEDIR.TAG").touch()
    (package / "run.sh").write_text("")
    (package / "run.sh").chmod(0o755)
    report = keep_files(package, (str(tmp_path / "home"), "home/"), (str(tmp_path / "none"), "tmp/"))
    assert report["kept"] == ["run.sh", "home/deep/.own/x", "home/notes", "model/model.txt"]
    assert (report["keptFiles"], report["keptBytes"], report["leftOut"]) == (4, 21, [])
    saved = output(package) / paths.UNSAVED_FOLDER / "master-0"
    assert sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()) == sorted(report["kept"])
    assert (saved / "model/model.txt").read_text() == "weights"
    assert keep_files(package) == keep_files(package), "a second run overwrites the first"


def test_a_job_with_output_has_other_files_named_and_not_copied(package: Path) -> None:
    (package / "scratch").write_text("x")
    (package / "large").write_text("xx")
    (output(package) / "deep").mkdir()
    (output(package) / "deep/model").write_text("x")
    report = keep_files(package)
    assert (report["jobDirEmpty"], report["kept"], report["leftOut"], report["leftOutFiles"]) == (
        False,
        [],
        ["large (2 B)", "scratch (1 B)"],
        2,
    )
    assert not (output(package) / paths.UNSAVED_FOLDER).exists()
    (package / "large").unlink()
    assert LocalFolder(str(output(package))).wrote(Search(time.time_ns() + 10**12, time.monotonic() + LONG)) is False
    (output(package) / "deep/model").rename(package / "model")
    (output(package) / "left").mkdir()
    (output(package) / "left/of-another").write_text("x")
    report = keep_files(package)
    assert (report["jobDirEmpty"], report["kept"]) == (True, ["model", "scratch"])


def test_a_pipe_in_the_place_of_a_copy_is_not_waited_for(package: Path) -> None:
    (package / "model").write_text("x")
    (saved := output(package) / paths.UNSAVED_FOLDER / "master-0").mkdir(parents=True)
    os.mkfifo(saved / "model")
    assert keep_files(package)["leftOut"] == ["model (No such device or address)"]


def open_below(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(path.readlink()))
    return [link for link in links if link.startswith(str(folder))]


def test_no_folder_stays_open(package: Path, tmp_path: Path) -> None:
    (package / "a/b").mkdir(parents=True)
    (package / "a/b/model").write_text("x")
    assert keep_files(package)["kept"] == ["a/b/model"]
    with open_file(UnsavedFile(str(package), ("a", "b", "model"), "x", 1)) as file:
        assert open_below(tmp_path) == [str(package / "a/b/model")]
        assert file.read() == b"x"
    assert open_below(tmp_path) == []


def test_links_are_not_followed_and_only_files_are_read(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("secret")
    (package / "link").symlink_to(tmp_path / "secret/key")
    (package / "folder").symlink_to(tmp_path / "secret")
    (package / "round").symlink_to(package)
    os.mkfifo(package / "pipe")
    report = keep_files(package)
    assert (report["keptFiles"], report["leftOutFiles"]) == (0, 0)
    assert keep(str(output(package)), "m", 0, [(str(package / "folder"), "")], LONG)["keptFiles"] == 0


def test_a_file_that_becomes_a_link_between_search_and_copy_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("secret")
    (package / "folder").symlink_to(tmp_path / "secret")
    (package / "key").symlink_to(tmp_path / "secret/key")
    os.mkfifo(package / "pipe")
    for path in (("folder", "key"), ("key",), ("pipe",)):
        with pytest.raises(OSError) as error:
            open_file(UnsavedFile(str(package), path, "x", 6))
        assert open_below(tmp_path) == [], error


def test_beyond_the_limit_the_smallest_files_are_kept_and_the_largest_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("a", 40), ("b", 50), ("c", 60), ("d", 1_500_000)):
        (package / name).write_bytes(bytes(size))
    monkeypatch.setattr(keep_unsaved, "MOST_BYTES", 100)
    report = keep_files(package)
    assert (report["kept"], report["leftOut"], report["leftOutFiles"]) == (["a", "b"], ["d (1.5 MB)", "c (60 B)"], 2)
    monkeypatch.setattr(keep_unsaved, "MOST_FILES", 1)
    assert keep_files(package)["kept"] == ["a"]


def test_hostile_names_are_harmless(package: Path) -> None:
    for name in (b"\xff", b"n" * 255, b"new\nline", b"..."):
        Path(os.fsdecode(bytes(package) + b"/" + name)).write_bytes(b"x")
    report = keep_files(package)
    assert report["kept"] == ["...", "new\nline", "n" * (keep_unsaved.LONGEST - 1) + "…"]
    assert report["leftOut"] == ["\ufffd (UnicodeEncodeError)"]
    UnsavedFiles.from_dict(json.loads(json.dumps(report)))


def test_the_search_of_a_huge_tree_has_limits(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, error in ((1, None), (0, "there are more than 0 files and folders")):
        monkeypatch.setattr(keep_unsaved, "_ENTRIES", limit)
        assert keep_files(package).get("error") == error
    monkeypatch.undo()
    deep = package.joinpath(*"x" * 40)
    deep.mkdir(parents=True)
    (deep / "model").write_text("x")
    assert keep_files(package)["error"] == "folders are nested deeper than 32"
    monkeypatch.setattr(keep_unsaved, "_ENTRIES", 10)
    assert keep_files(package)["error"] == "there are more than 10 files and folders"
    assert keep_files(package, seconds=-1.0)["error"] == "it took too long"


def test_an_output_that_cannot_be_searched_whole_is_not_empty(package: Path) -> None:
    (package / "model").write_text("x")
    output(package).joinpath(*"x" * 40).mkdir(parents=True)
    report = keep_files(package)
    assert report == {
        "jobDirEmpty": False,
        "kept": [],
        "keptFiles": 0,
        "keptBytes": 0,
        "leftOut": ["model (1 B)"],
        "leftOutFiles": 1,
    }


def test_a_copy_that_takes_too_long_leaves_no_half_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "bb"):
        (package / name).write_text(name)
    calls: list[float] = []

    def check_time(deadline: float) -> None:
        calls.append(deadline)
        if len(calls) > 4:  # of the three files in the package, and of the first copy
            raise LimitError("it took too long")

    monkeypatch.setattr(keep_unsaved, "check_time", check_time)
    report = keep_files(package)
    assert report == {
        "jobDirEmpty": True,
        "error": "it took too long",
        "kept": [],
        "keptFiles": 0,
        "keptBytes": 0,
        "leftOut": ["bb (it took too long)", "a (it took too long)"],
        "leftOutFiles": 2,
    }
    assert list((output(package) / "left/master-0").iterdir()) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_230_000, "1.2 MB"),
        (1e9, "1.0 GB"),
        (1e12, "1.0 TB"),
        (1e16, "10000.0 TB"),
    ],
)
def test_sizes_are_in_decimal_units(count: float, text: str) -> None:
    assert keep_unsaved.size(count) == text


def test_the_program_prints_its_report_and_runs_at_a_low_priority(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "model").write_text("x")
    options = {"jobDir": str(output(package)), "replica": "ps-0", "since": unpack_time(package), "seconds": LONG}
    options |= {"wrote": False, "folders": [[str(package), "a/"]]}
    nice: list[int] = []
    monkeypatch.setattr(keep_unsaved.os, "nice", nice.append)
    for wrote in (True, False):
        monkeypatch.setattr(sys, "argv", ["keep_unsaved.py", json.dumps(options | {"wrote": wrote})])
        keep_unsaved.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["leftOut"], report["kept"]) for report in printed] == [(["a/model (1 B)"], []), ([], ["a/model"])]
    assert nice == [10, 10]


def test_a_copy_that_cannot_be_written_is_reported(package: Path) -> None:
    (package / "model").write_text("x")
    (output(package) / "left").write_text("no folder")
    report = keep_files(package)
    assert (report["kept"], report["leftOut"]) == ([], ["model (Not a directory)"])


def test_a_bucket_s_url_is_written_through_fsspec(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{package}/output"
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (package / "model").write_text("weights")
    assert keep(url, "ps-0", unpack_time(package), [(str(package), "")], LONG)["kept"] == ["model"]
    assert sys.path[-1] == f"/opt/venv/lib/python3.{sys.version_info.minor}/site-packages"
    files = fsspec.filesystem("memory")
    assert files.cat_file(f"{package}/output/left/ps-0/model") == b"weights"
    assert keep(url, "ps-0", unpack_time(package), [(str(package), "")], LONG)["keptFiles"] == 1
    files.pipe_file(f"{package}/output/model-7/data", b"x")
    report = keep(url, "ps-0", unpack_time(package), [(str(package), "")], LONG)
    assert (report["jobDirEmpty"], report["leftOut"]) == (False, ["model (7 B)"])


class MessageLog(list[str]):
    def write_message(self, message: str, severity: str = "INFO") -> None:
        self.append(message)


def collect(package: Path, start: StartProgram, python: str = sys.executable, **env: str) -> tuple[UnsavedFiles, list[str]]:
    messages, bucket = MessageLog(), package.parents[1] / "bucket"
    unsaved_files = search(
        package, {"JOB_DIR": str(output(package)), **env}, str(bucket), FolderBucket(bucket), start, messages, python
    )
    return unsaved_files, messages


def search(
    package: Path,
    env: dict[str, str],
    bucket: str,
    files: Any,
    start: StartProgram,
    messages: MessageLog,
    python: str = sys.executable,
    host_paths: Sequence[Path] = (),
) -> UnsavedFiles:
    assignment = Assignment(Plan("job01", ["master-0"], "task", [], {}), "master-0", package, env, python, messages)
    folders = JobFolders(package, package.with_name("package.sha256"), {}, host_paths)
    task = unsaved.start_search(assignment, folders, HostConfig("master-0", bucket, python=python), files, start)
    return wait_for(lambda: task.result, "what was left")


def test_the_agent_runs_a_separate_program_for_the_search(package: Path) -> None:
    (package / "model").write_text("x")
    unsaved_files, messages = collect(package, Child, LD_LIBRARY_PATH="/none", PYTHONPATH="/none", PYTHONSTARTUP="/none")
    assert unsaved_files == UnsavedFiles(True, ["model"], 1, 1)
    assert messages == [
        "the job wrote nothing to JOB_DIR; the files that it wrote elsewhere are kept in JOB_DIR/left/master-0: model"
    ]


def test_files_outside_an_output_that_is_not_empty_are_named(package: Path) -> None:
    (package / "model").write_text("x")
    (output(package) / "small").write_text("x")
    assert collect(package, Child) == (
        UnsavedFiles(leftOut=["model (1 B)"], leftOutFiles=1),
        ["the job wrote outside JOB_DIR; not kept: model (1 B)"],
    )
    (package / "model").unlink()
    assert collect(package, Child) == (UnsavedFiles(), [])


def needs_search(package: Path, job_dir: str = "", files: Any = None, host_paths: Sequence[Path] = ()) -> bool:
    """Return True if a program is started for the search."""
    calls: list[str] = []

    def start(run: ProgramSpec, _output: int) -> RunningProgram:
        calls.append(run.argv[0])
        raise OSError("it is not started")

    env = {"JOB_DIR": job_dir or str(output(package))}
    search(package, env, "gs://bucket", files, start, MessageLog(), host_paths=host_paths)
    return bool(calls)


def test_a_job_that_wrote_nothing_needs_no_search(package: Path, tmp_path: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__/task.pyc").write_text("x")
    (package / "empty").mkdir()
    (home := tmp_path / "home").mkdir()
    os.utime(home, ns=(0, 0))
    assert not needs_search(package, host_paths=[home])
    assert collect(package, Child, str(tmp_path / "none")) == (UnsavedFiles(jobDirEmpty=True), [])
    (output(package) / "model").write_text("x")
    assert collect(package, Child, str(tmp_path / "none")) == (UnsavedFiles(), [])
    gs, has_output = "gs://bucket/jobs/job01/output", SimpleNamespace(sizes=lambda _: {"model": 1})
    assert not needs_search(package, gs, has_output)
    assert needs_search(package, gs, SimpleNamespace(sizes=lambda _: {})), "its client tells whether JOB_DIR is empty"
    assert needs_search(package, "gs://other/output", has_output)


def refuse_scan(folder: str) -> None:
    raise PermissionError(13, "Permission denied", folder)


def test_of_a_folder_with_any_number_of_files_only_some_are_listed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = os.scandir(package)
    monkeypatch.setattr(unsaved, "_MOST_ENTRIES", 5)
    folders = JobFolders(package, package.with_name("package.sha256"), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda _: bounded_scan(entry, 6))
        assert not unsaved._is_untouched(folders, unpack_time(package))


@contextmanager
def bounded_scan(entry: object, most: int) -> Iterator[Iterator[object]]:
    """Yield an iterator that fails after some entries, as its folder may have any number."""

    def entries() -> Iterator[object]:
        yield from [entry] * most
        raise AssertionError("more are listed than the limit")

    yield entries()


def test_a_job_that_may_have_written_a_file_is_searched(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home := tmp_path / "home").mkdir()
    assert needs_search(package, host_paths=[home]), "something was written there, and may be gone"
    assert needs_search(package, host_paths=[tmp_path / "none"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse_scan)
        assert needs_search(package), "a folder that the agent may not read"
    monkeypatch.setattr(unsaved, "_MOST_ENTRIES", 0)
    assert needs_search(package)
    monkeypatch.undo()
    assert not needs_search(package)
    (package / "below").mkdir()
    (package / "below/task.py").write_text("x")
    assert needs_search(package)


def test_an_output_in_the_cluster_s_bucket_is_read_by_the_agent(package: Path) -> None:
    """The search program would need its own client, which takes seconds to import."""
    (package / "model").write_text("x")
    gs = {"JOB_DIR": "gs://bucket/jobs/job01/output"}
    files: Any = SimpleNamespace(sizes=lambda name: {"model": 1} if name == "jobs/job01/output" else {})
    assert search(package, gs, "gs://bucket", files, Child, MessageLog()).leftOut == ["model (1 B)"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "host")
    yield host
    host.close()


def test_the_launcher_starts_the_search_like_a_trainer(host: Host) -> None:
    (host.package / "came").write_text("")
    mark = host.package.with_name("package.sha256")
    mark.write_text("0")
    wait_for_newer_ctime(mark)
    (host.package / "model").write_text("x")
    (host.bucket / "jobs/job01/output").mkdir(parents=True)
    env = {"JOB_DIR": str(host.bucket / "jobs/job01/output"), "PATH": os.environ["PATH"]}
    unsaved_files = search(host.package, env, str(host.bucket), FolderBucket(host.bucket), host.launcher, MessageLog())
    assert unsaved_files.kept == ["model"]
    assert f'BindPaths="{env["JOB_DIR"]}":"{env["JOB_DIR"]}"' in host.systemd_run_calls


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "it printed nothing"),
        ("echo oh; echo no", "no"),
        ("echo '[1]'", "[1]"),
        ("""echo '{"kept": 5}'""", "the list of unsaved files.kept must be a list, not 5"),
        ("sleep 600 & echo no", "no"),
        ("yes", "it printed too much"),
        ("exec >&- 2>&-; exit 1", "it printed nothing"),
    ],
)
def test_a_search_without_a_report_is_an_error_of_one_line(package: Path, tmp_path: Path, script: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (package / "model").write_text("x")
    unsaved_files, messages = collect(package, Child, str(python), PATH=os.environ["PATH"])
    assert unsaved_files == UnsavedFiles(error=f"files outside JOB_DIR were not searched for: {reason}")
    assert messages == [unsaved_files.error]


def test_a_search_that_cannot_start_or_does_not_end_blocks_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "model").write_text("x")
    unsaved_files, _ = collect(package, Child, str(tmp_path / "none"))
    assert unsaved_files.error == "files outside JOB_DIR were not searched for: No such file or directory"
    for name in ("SEARCH_TIMEOUT", "_START_SECONDS"):
        monkeypatch.setattr(unsaved, name, 0.1)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    unsaved_files, _ = collect(package, Child, str(python), PATH=os.environ["PATH"])
    assert unsaved_files.error == "files outside JOB_DIR were not searched for: it took too long"


class Ended:
    """A process that has printed something and ended."""

    pid = 7

    def __init__(self, printed: bytes) -> None:
        self.printed, self.calls = printed, list[str]()

    def __call__(self, run: ProgramSpec, output: int) -> Ended:
        os.write(output, self.printed)
        return self

    def stop(self, seconds: float) -> None:
        raise AssertionError

    def signal(self, number: signal.Signals) -> None:
        self.calls.append(number.name)

    def ended(self) -> bool:
        return True

    def reap(self) -> Exit:
        self.calls.append("reap")
        return Exit(0)


def test_a_hostile_search_s_report_keeps_the_record_small_and_its_processes_are_killed(package: Path) -> None:
    names = ["x" * 450] * 60
    process = Ended(b"noise\n" + json.dumps({"kept": names, "leftOut": names, "error": "y" * 1000}).encode())
    (package / "model").write_text("x")
    unsaved_files, _ = collect(package, process)
    assert unsaved_files == UnsavedFiles(kept=["x" * 400] * 50, leftOut=["x" * 400] * 50, error="y" * 200)
    assert process.calls == ["SIGKILL", "reap"]


@pytest.mark.parametrize(
    ("job_dir", "found"),
    [
        ("gs://mine/jobs/job01/output/", True),
        ("gs://mine/empty", False),
        ("gs://mine", False),
        ("gs://theirs/jobs/job01/output", False),
        ("/mine/jobs/job01/output", False),
    ],
)
def test_only_an_output_in_the_cluster_s_bucket_is_listed(job_dir: str, found: bool) -> None:
    files: Any = SimpleNamespace(sizes=lambda name: {"a": 1} if name == "jobs/job01/output" else {})
    for bucket in ("gs://mine", "gs://mine/", "/mine"):
        assert unsaved._has_google_output(job_dir, bucket, files) is (found and bucket != "/mine")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (UnsavedFiles(), ""),
        (UnsavedFiles(error="it took too long"), "it took too long"),
        (
            UnsavedFiles(True, list("abcdefg"), 9, 1, ["h (1 B)"], 3, "it took too long"),
            "the job wrote nothing to JOB_DIR; the files that it wrote elsewhere are kept in JOB_DIR/left/ps-0: "
            "a, b, c, d, e and 4 more; not kept: h (1 B) and 2 more; it took too long",
        ),
        (UnsavedFiles(leftOut=["h (1 B)"], leftOutFiles=1), "the job wrote outside JOB_DIR; not kept: h (1 B)"),
        (UnsavedFiles(error="two\nlines \x1b[2J"), "two\ufffdlines \ufffd[2J"),
    ],
)
def test_unsaved_files_are_described_in_one_line(files: UnsavedFiles, text: str) -> None:
    assert unsaved.describe(files, "ps-0") == text
