"""A job's files on its host: its package, its secrets, its trainer's environment, and the removal of other jobs' files."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hosts.agent.cgroup import processors
from hosts.agent.job_files import JobFiles, threads
from hosts.agent.launcher_client import SOCKET
from jobs import paths
from jobs.bucket import BucketError
from jobs.folder import FolderBucket
from jobs.ledger import Ledger
from jobs.records import HostFile, Plan, Task

PLAN = Plan("job01", ["master-0", "ps-0"], "m", [], {"ps-0": Task("{}")}, "abc")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the folder of a host's files, with the pushed package of job01; the bucket is beside it."""
    (tmp_path / "bucket/jobs/job01").mkdir(parents=True)
    (tmp_path / "state/jobs/job01").mkdir(parents=True)
    (tmp_path / "state/jobs/job01/package.sha256").write_text("abc\n")
    return tmp_path / "state"


def job_files(state: Path, environ: dict[str, str] | None = None, launcher: Any = None) -> JobFiles:
    store = FolderBucket(state.parent / "bucket")
    return JobFiles(HostFile("ps-0", "/bucket"), state, Ledger(store), store, environ or {}, launcher)


def environment(state: Path, plan: Plan = PLAN, environ: dict[str, str] | None = None, launcher: Any = None) -> dict[str, str]:
    return dict(job_files(state, environ, launcher).prepare(plan, "ps-0").environment)


def with_environment(**variables: str) -> Plan:
    return replace(PLAN, tasks={"ps-0": Task('{"task": {}}', variables)})


def put_package(state: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Plan:
    """Write a package to the bucket, and return its plan."""
    archive = state.parent / "bucket" / paths.package("job01")
    with tarfile.open(archive, "w:gz") as tar:
        for entry, content in members:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return replace(PLAN, packageSha256=hashlib.sha256(archive.read_bytes()).hexdigest())


def test_the_environment_of_the_trainer(state: Path) -> None:
    package = f"{state}/jobs/job01/package"
    rest = {"TF_CONFIG": '{"task": {}}', "PYTHONUNBUFFERED": "1"} | threads(processors())
    rest |= {"PATH": "/opt/scaletier/venv/bin:/bin:/usr/bin", "SCALETIER_STOP_FILE": str(state / "stop")}
    assert environment(state, with_environment()) == {"PYTHONPATH": package} | rest
    environ = {"PYTHONPATH": "/opt/scaletier", "TYPE": "ps", "HOME": "/h", "NOTIFY_SOCKET": "/run/x", "JOURNAL_STREAM": "8:1"}
    plan = with_environment(TYPE="mine", PYTHONPATH="/theirs")
    assert environment(state, plan, environ) == {"HOME": "/h", "TYPE": "mine", "PYTHONPATH": f"{package}:/theirs"} | rest
    assert environment(state, environ={"PATH": "/usr/local/bin"})["PATH"] == "/opt/scaletier/venv/bin:/usr/local/bin"
    environment(state, with_environment(JOB_DIR=f"{state}/a/output"))
    assert (state / "a/output").is_dir()


def test_a_host_expands_variables_in_arguments_and_environment(state: Path) -> None:
    plan = with_environment(JOB_DIR=f"{state}/out", INDEX="3", LOGS="${JOB_DIR}/logs", PATTERN="$HOME-$${x}")
    assignment = job_files(state).prepare(replace(plan, args=["--out", "$JOB_DIR/$INDEX"]), "ps-0")
    assert assignment.argv[-2:] == ["--out", f"{state}/out/3"]
    assert assignment.environment["LOGS"] == f"{state}/out/logs"
    assert assignment.environment["PATTERN"] == "$HOME-${x}"
    assert assignment.directory == state / "jobs/job01/package"


class FakeLauncher:
    """A launcher that records its requests."""

    def __init__(self) -> None:
        self.warm_calls, self.kept_jobs = 0, [["nothing"]]

    def warm(self) -> None:
        self.warm_calls += 1

    def tidy(self, keep: list[str]) -> None:
        self.kept_jobs.append(keep)


def test_a_trainer_of_another_user_has_its_own_home_and_none_of_the_agent_s_environment(state: Path) -> None:
    agent_environ = {
        "HOME": "/h",
        "USER": "replica",
        "LOGNAME": "replica",
        "SHELL": "/x",
        SOCKET: "/run/l.sock",
        "LANG": "C.UTF-8",
    }
    launcher = FakeLauncher()
    files = job_files(state, agent_environ, launcher)
    environ = files.prepare(with_environment(A="b"), "ps-0").environment
    home = f"{state}/jobs/job01/home"
    trainer_environ = {"HOME": home, "USER": "trainer", "LOGNAME": "trainer", "LANG": "C.UTF-8", "A": "b"}
    assert {name: environ.get(name) for name in (*agent_environ, "A")} == dict.fromkeys(agent_environ) | trainer_environ
    assert launcher.warm_calls == 1
    assert files._job
    folders = [("home/", home), ("tmp/", "/tmp"), ("var/tmp/", "/var/tmp")]
    assert files._job.folders.folders[1:] == [(top, prefix) for prefix, top in folders], (
        "all folders that a trainer may write to"
    )
    assert environment(state, with_environment(HOME="/mine"), agent_environ, launcher)["HOME"] == "/mine"


def test_leftover_files_of_other_jobs_are_removed_by_the_launcher(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    files = job_files(tmp_path, launcher=launcher)
    files.tidy([])
    (tmp_path / "jobs/job01").mkdir(parents=True)
    files.tidy(["job01", "job02"])
    assert launcher.kept_jobs == [["nothing"]]
    files.tidy(["job02"])
    assert launcher.kept_jobs == [["nothing"], ["job02"]]
    (tmp_path / "jobs/job01").rmdir()
    for number, name in enumerate(("fetched/job01", "trials/trial-0abc"), 3):
        (tmp_path / name).mkdir(parents=True)
        files.tidy(["job02"])
        assert len(launcher.kept_jobs) == number, name
        (tmp_path / name).rmdir()
    files.tidy(["job02"])
    assert len(launcher.kept_jobs) == 4


def test_only_the_trainer_of_a_job_gets_its_secrets(state: Path) -> None:
    (state / "secrets").mkdir()
    for name in ("job01", "job02"):
        (state / "secrets" / f"{name}.json").write_text(f'{{"TOKEN": "of {name}, $JOB_ID"}}')
    plan, files = replace(with_environment(TOKEN="no", JOB_ID="x"), secrets=["TOKEN"]), job_files(state)
    assert files.prepare(plan, "ps-0").environment["TOKEN"] == "of job01, $JOB_ID", "without expansion"
    files.tidy(["job01"])
    assert [path.name for path in (state / "secrets").iterdir()] == ["job01.json"]
    files.tidy([])
    assert list((state / "secrets").iterdir()) == []
    with pytest.raises(BucketError, match="the secrets of job01 are not on this host"):
        files.prepare(plan, "ps-0")
    (state / "secrets").rmdir()
    files.tidy([])


def test_an_agent_removes_folders_of_any_depth(state: Path) -> None:
    plan = put_package(state)
    fetched = state / "fetched"
    try:
        for name in ("job00/package", "job01/package", "job01/.package"):
            subprocess.run(["mkdir", "-p", fetched / name / "/".join("d" * 1200)], check=True)
        job_files(state).prepare(plan, "ps-0")
        assert sorted(path.name for path in (fetched / "job01").rglob("*")) == ["package", "package.sha256"]
    finally:
        subprocess.run(["rm", "-rf", fetched], check=True)


@pytest.mark.parametrize("member", ["../evil.py", "/evil.py", "link"])
def test_a_package_with_a_member_outside_its_folder_is_refused(state: Path, member: str) -> None:
    entry = tarfile.TarInfo(member)
    entry.type, entry.linkname = (tarfile.SYMTYPE, "/etc") if member == "link" else (tarfile.REGTYPE, "")
    plan = put_package(state, (entry, b""))
    with pytest.raises(BucketError, match=rf"holds '{member}', which is no file of a package"):
        job_files(state).prepare(plan, "ps-0")
    assert not list(state.parent.rglob("evil.py"))
    assert not (state / "fetched/job01/package").exists()


def test_a_package_with_another_hash_than_the_plan_s_is_refused(state: Path) -> None:
    plan = replace(put_package(state, (tarfile.TarInfo("task.py"), b"")), packageSha256="0" * 64)
    with pytest.raises(BucketError, match=r"package\.tar\.gz is damaged: sha256 [0-9a-f]{16}…, not 0{16}…"):
        job_files(state).prepare(plan, "ps-0")
    assert not list(state.parent.rglob("task.py"))


@pytest.mark.parametrize("obstacle", ["logs", "fetched", "task"])
def test_files_that_cannot_be_written_raise_a_bucket_error(state: Path, obstacle: str) -> None:
    plan = put_package(state, (tarfile.TarInfo("task.py"), b""))
    if obstacle == "task":
        plan = replace(plan, tasks={})
    else:
        (state / obstacle).write_text("a file")
    with pytest.raises(BucketError, match="cannot be laid out here"):
        job_files(state).prepare(plan, "ps-0")


@pytest.mark.parametrize(
    ("quota", "limit", "inter"), [("max 100000", 10**6, 2), ("150000 100000", 2, 2), ("10000 100000", 1, 2), ("", 10**6, 2)]
)
def test_the_cpu_quota_limits_processors_and_threads(tmp_path: Path, quota: str, limit: int, inter: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    count = processors(tmp_path / "cpu.max")
    assert count == min(len(os.sched_getaffinity(0)), limit)
    assert threads(count)["TF_NUM_INTEROP_THREADS"] == str(max(inter, count))
    assert threads(count)["OMP_NUM_THREADS"] == threads(count)["TF_NUM_INTRAOP_THREADS"] == str(count)
