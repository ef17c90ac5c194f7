"""A job's files on its host: its package, its secrets, its trainer's environment, and the removal of other jobs' files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from test_agent_unsaved import wait_for_newer_ctime
from waiting import limit, wait_for

from hosts.agent import job_files as job_files_module
from hosts.agent import token_broker
from hosts.agent.job_files import JobFiles, threads
from hosts.agent.launcher_client import SOCKET_VARIABLE
from hosts.agent.token_broker import Mint
from jobs import paths
from jobs.bucket import BucketError, Conflict
from jobs.cgroup import available_cpus
from jobs.chunks import ChunkFolder, ChunkReader
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.notification import Notification
from jobs.queue import QueueEntry
from jobs.records import HostConfig, JobRecord, Plan, ReplicaRecord, Task, UnsavedFiles
from jobs.states import JobState
from jobs.study import Study

PLAN = Plan("job01", ["master-0", "ps-0"], "m", [], {"ps-0": Task("{}")}, "abc")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the folder of a host's files, with the pushed package of job01; the bucket is beside it."""
    (tmp_path / "bucket/jobs/job01").mkdir(parents=True)
    (tmp_path / "state/jobs/job01").mkdir(parents=True)
    (tmp_path / "state/jobs/job01/package.sha256").write_text("abc\n")
    return tmp_path / "state"


def job_files(
    state: Path,
    environ: dict[str, str] | None = None,
    launcher: Any = None,
    bucket: str = "/bucket",
    python: str = HostConfig.python,
    mint: Mint = token_broker.mint,
    wake: Callable[[], None] = lambda: None,
) -> JobFiles:
    store = FolderBucket(state.parent / "bucket")
    host = HostConfig("ps-0", bucket, python=python)
    return JobFiles(host, state, Ledger(store), store, environ or {}, launcher, mint, wake)


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
    rest = {"TF_CONFIG": '{"task": {}}', "CLOUD_ML_JOB": "{}", "PYTHONUNBUFFERED": "1"} | threads(available_cpus())
    rest |= {"PATH": "/opt/scaletier/venv/bin:/bin:/usr/bin", "SCALETIER_STOP_FILE": str(state / "stop")}
    assert environment(state, with_environment()) == {"PYTHONPATH": package} | rest
    environ = {"PYTHONPATH": "/opt/scaletier", "TYPE": "ps", "HOME": "/h", "NOTIFY_SOCKET": "/run/x", "JOURNAL_STREAM": "8:1"}
    plan = with_environment(TYPE="mine", PYTHONPATH="/theirs")
    assert environment(state, plan, environ) == {"HOME": "/h", "TYPE": "mine", "PYTHONPATH": f"{package}:/theirs"} | rest
    assert environment(state, environ={"PATH": "/usr/local/bin"})["PATH"] == "/opt/scaletier/venv/bin:/usr/local/bin"
    environment(state, with_environment(JOB_DIR=f"{state}/a/output"))
    assert (state / "a/output").is_dir()


def test_cloud_ml_job_is_the_job_of_tf_config(state: Path) -> None:
    job = {"args": ["--out=${JOB_DIR}/x", '\\$"JOB_DIR', "\udcff"], "job_dir": "/out"}
    plan = replace(PLAN, tasks={"ps-0": Task(json.dumps({"task": {}, "job": job}), {"JOB_DIR": f"{state}/out"})})
    assert json.loads(environment(state, plan)["CLOUD_ML_JOB"]) == job


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
        self.early_connections, self.kept_jobs = 0, [["nothing"]]

    def connect_early(self) -> None:
        self.early_connections += 1

    def tidy(self, keep: list[str]) -> None:
        self.kept_jobs.append(keep)


def test_a_trainer_of_another_user_has_its_own_home_and_none_of_the_agent_s_environment(state: Path) -> None:
    agent_environ = {
        "HOME": "/h",
        "USER": "replica",
        "LOGNAME": "replica",
        "SHELL": "/x",
        SOCKET_VARIABLE: "/run/l.sock",
        "LANG": "C.UTF-8",
    }
    launcher = FakeLauncher()
    files = job_files(state, agent_environ, launcher)
    environ = files.prepare(with_environment(A="b"), "ps-0").environment
    home = f"{state}/jobs/job01/home"
    trainer_environ = {"HOME": home, "USER": "trainer", "LOGNAME": "trainer", "LANG": "C.UTF-8", "A": "b"}
    assert {name: environ.get(name) for name in (*agent_environ, "A")} == dict.fromkeys(agent_environ) | trainer_environ
    assert launcher.early_connections == 1
    assert files._job
    folders = [("home/", home), ("tmp/", "/tmp"), ("var/tmp/", "/var/tmp")]
    assert files._job.folders.folders[1:] == [(top, prefix) for prefix, top in folders], (
        "all folders that a trainer may write to"
    )
    assert environment(state, with_environment(HOME="/mine"), agent_environ, launcher)["HOME"] == "/mine"


def test_leftover_files_of_other_jobs_are_removed_by_the_launcher(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    files = job_files(tmp_path, launcher=launcher)
    files.tidy([], files.secrets())
    (tmp_path / "jobs/job01").mkdir(parents=True)
    files.tidy(["job01", "job02"], files.secrets())
    assert launcher.kept_jobs == [["nothing"]]
    files.tidy(["job02"], files.secrets())
    assert launcher.kept_jobs == [["nothing"], ["job02"]]
    (tmp_path / "jobs/job01").rmdir()
    for number, name in enumerate(("fetched/job01", "trials/trial-0abc"), 3):
        (tmp_path / name).mkdir(parents=True)
        files.tidy(["job02"], files.secrets())
        assert len(launcher.kept_jobs) == number, name
        (tmp_path / name).rmdir()
    files.tidy(["job02"], files.secrets())
    assert len(launcher.kept_jobs) == 4


def test_only_the_trainer_of_a_job_gets_its_secrets(state: Path) -> None:
    (state / "secrets").mkdir()
    for name in ("job01", "job02"):
        (state / "secrets" / f"{name}.json").write_text(f'{{"TOKEN": "of {name}, $JOB_ID"}}')
    plan, files = replace(with_environment(TOKEN="no", JOB_ID="x"), secrets=["TOKEN"]), job_files(state)
    assert files.prepare(plan, "ps-0").environment["TOKEN"] == "of job01, $JOB_ID", "without expansion"
    files.tidy(["job01"], files.secrets())
    assert [path.name for path in (state / "secrets").iterdir()] == ["job01.json"]
    files.tidy([], files.secrets())
    assert list((state / "secrets").iterdir()) == []
    with pytest.raises(BucketError, match="the secrets of job01 are not on this host"):
        files.prepare(plan, "ps-0")
    listed = files.secrets()
    (state / "secrets/job03.json").touch()
    files.tidy([], listed)
    assert [path.name for path in files.secrets()] == ["job03.json"], "it came after the queue was read"
    (state / "secrets/job03.json").unlink()
    (state / "secrets").rmdir()
    files.tidy([], files.secrets())


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


def test_a_package_from_the_bucket_is_laid_out_once(state: Path) -> None:
    folder = tarfile.TarInfo("deep")
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    plan = put_package(state, (tarfile.TarInfo("task.py"), b"one"), (folder, b""), (tarfile.TarInfo("deep/er.py"), b"two"))
    package = state / "fetched/job01/package"
    assert job_files(state).prepare(plan, "ps-0").directory == package
    assert {path.name: path.read_text() for path in package.rglob("*.py")} == {"task.py": "one", "er.py": "two"}
    assert (package.parent / "package.sha256").read_text() == plan.packageSha256
    (state.parent / "bucket" / paths.package("job01")).unlink()
    assert job_files(state).prepare(plan, "ps-0").directory == package
    with pytest.raises(BucketError, match=r"jobs/job01/package\.tar\.gz is not there yet"):
        job_files(state).prepare(replace(plan, packageSha256="0"), "ps-0")


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
    with pytest.raises(BucketError, match="cannot be prepared here"):
        job_files(state).prepare(plan, "ps-0")


@pytest.mark.parametrize(
    ("quota", "limit", "inter"), [("max 100000", 10**6, 2), ("150000 100000", 2, 2), ("10000 100000", 1, 2), ("", 10**6, 2)]
)
def test_the_cpu_quota_limits_processors_and_threads(tmp_path: Path, quota: str, limit: int, inter: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    variables = threads(available_cpus(tmp_path))
    count = min(len(os.sched_getaffinity(0)), limit)
    assert variables["TF_NUM_INTEROP_THREADS"] == str(max(inter, count))
    assert variables["OMP_NUM_THREADS"] == variables["TF_NUM_INTRAOP_THREADS"] == str(count)


def messages(files: JobFiles) -> list[str]:
    files._log.roll()
    return [json.loads(entry.line)["message"] for entry in ChunkReader(ChunkFolder(files._log.path)).entries()]


def ending(state: Path, notify: str) -> JobFiles:
    """Return the files of a job that has begun, with an output that is there."""
    (output := state / "output").mkdir()
    (state / "jobs/job01/package").mkdir()
    (state / "secrets").mkdir()
    (state / "secrets/job01.json").write_text('{"TOKEN": "correct horse"}')
    plan = replace(with_environment(JOB_DIR=str(output), JOB_ID="job01"), notify=notify, secrets=["TOKEN"])
    files = job_files(state)
    files.prepare(plan, "ps-0")
    return files


def test_a_command_gets_the_record_of_an_ended_job_once_and_without_secrets(state: Path) -> None:
    files = ending(state, "sh -c 'cat >> $JOB_DIR/$0; pwd; exit 5' ${JOB_ID}")
    job = JobRecord("job01", JobState.FAILED, errorMessage="it says correct horse")
    result = wait_for(lambda: files.notify(job), "the report")
    assert files.notify(job) is result
    assert replace(result, time="") == Notification("command sh …", "", 1, "it exited with status 5")
    written = json.loads((state / "output/job01").read_bytes())
    assert written == replace(job, errorMessage="it says [secret]").to_dict()
    assert messages(files) == [f"{state}/jobs/job01/package"], "it runs as the trainer, and its output is in the log"


def test_variables_in_a_url_are_filled_in(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Mock()
    monkeypatch.setattr(job_files_module.notifier, "start", sent)
    ending(state, "http://master-0:8080/${JOB_ID}?$$JOB_ID").notify(JobRecord("job01", JobState.SUCCEEDED))
    assert sent.call_args.args[:2] == ("http://master-0:8080/job01?$JOB_ID", [])


def test_a_command_that_takes_too_long_is_stopped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files_module, "COMMAND_SECONDS", 0.0)
    files = ending(state, "sleep 600")
    result = wait_for(lambda: files.notify(JobRecord("job01", JobState.SUCCEEDED)), "the report")
    assert result.error == "it was stopped after 30 s"


def test_a_job_that_ran_with_an_output_is_searched_for_unsaved_files(state: Path) -> None:
    (state / "jobs/job01/package").mkdir()
    wait_for_newer_ctime(state / "jobs/job01/package.sha256")
    (state / "jobs/job01/package/model").write_text("x")
    ran, plan = ReplicaRecord("ps-0", startTime="2026-01-31T12:00:00.000Z"), with_environment(JOB_DIR=f"{state}/output")
    ended = threading.Event()
    files = job_files(state, python=sys.executable, wake=ended.set)
    assert files.unsaved(ran) == UnsavedFiles(), "no job is here"
    for plan_, record in ((replace(plan, study=Study([])), ran), (plan, ReplicaRecord("ps-0")), (with_environment(), ran)):
        files.prepare(plan_, "ps-0")
        assert files.unsaved(record) == UnsavedFiles()
    files.prepare(plan, "ps-0")
    assert files.unsaved(ran) is None
    assert ended.wait(limit()), "the agent reports it at once"
    assert files.unsaved(ran) == UnsavedFiles(True, ["model"], 1, 1)
    assert files.unsaved(ran) is files.unsaved(ran)


def test_a_host_remembers_its_job_over_a_restart(state: Path) -> None:
    files, entry = job_files(state), QueueEntry("job01", ["worker-3"], has_hosts=True, candidates={"ps-0": ["worker-3"]})
    files.remember(entry)
    assert files.unfinished() is None, "a job without a log, as on a full disk, has nothing to finish"
    files.prepare(PLAN, "ps-0")
    files.remember(entry)
    assert job_files(state).unfinished() == entry
    (state / "logs/job01/unfinished.json").write_bytes(b"{")
    assert job_files(state).unfinished() is None
    files.remember(entry)
    files.forget("job01")
    files.forget("job01")
    assert job_files(state).unfinished() is None


def test_the_chief_s_host_gives_its_facts_once_and_stops_hashing_at_the_end(state: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, tasks=dict.fromkeys(PLAN.replicas, Task("{}")))
    (state.parent / "bucket" / paths.manifest("job01")).write_text("{}")
    files = job_files(state, python=sys.executable)
    assert files.facts() is None
    files.prepare(plan, "ps-0")
    assert files.facts() is None
    assert files._job.manifest is None
    files.prepare(plan, "master-0")
    assert wait_for(files.facts, "the facts")["data"] == {"paths": [], "notHashed": "no argument of the trainer names any"}
    assert files.facts() is None
    (slow := tmp_path / "python").write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    files = job_files(state, python=str(slow))
    files.prepare(plan, "master-0")
    process = files._job.manifest._process
    assert process
    files.prepare(plan, "ps-0")
    assert process.returncode == -9, "of an attempt before"
    assert files.facts() is None


def test_each_job_on_google_has_a_broker_of_its_own(state: Path) -> None:
    (state.parent / "bucket/jobs/job02").mkdir()
    (state / "jobs/job02").mkdir()
    (state / "jobs/job02/package.sha256").write_text("abc")

    def refuse(rules: Any) -> tuple[str, float]:
        raise OSError("HTTP 403")

    files = job_files(state, bucket="gs://mine", mint=refuse)
    created: list[str] = []
    files._ledger.store.create = lambda name, content: created.append(name) or ""  # type: ignore[method-assign, func-returns-value]
    brokers = []
    for job_id in ("job01", "job02"):
        environ = files.prepare(replace(with_environment(), jobId=job_id), "ps-0").environment
        assert files._broker
        brokers.append(files._broker)
        assert environ["GCE_METADATA_HOST"] == environ["GCE_METADATA_IP"] == f"127.0.0.1:{files._broker.port}"
    assert created == ["jobs/job01/output/", "jobs/job02/output/"]
    assert [broker._server.socket.fileno() < 0 for broker in brokers] == [True, False]
    with pytest.raises(OSError, match="HTTP 403"):
        brokers[1].token()
    assert messages(files) == ["no token for the bucket: HTTP 403"]
    brokers[1].close()


def test_a_folder_above_the_output_that_exists_is_no_error(state: Path) -> None:
    (state.parent / "bucket/jobs/job01").mkdir(exist_ok=True)
    files = job_files(state, bucket="gs://mine")

    def exists(name: str, content: bytes) -> str:
        raise Conflict(name)

    files._ledger.store.create = exists  # type: ignore[method-assign]
    assert files.prepare(with_environment(), "ps-0").environment["GCE_METADATA_HOST"]
    files._broker.close()


def test_attempts_of_a_job_share_a_log_and_another_job_closes_it(state: Path) -> None:
    (state / "jobs/job02").mkdir()
    (state / "jobs/job02/package.sha256").write_text("abc")
    files = job_files(state)
    files.prepare(with_environment(), "ps-0")
    log = files._log
    assert log
    files.prepare(with_environment(), "ps-0")
    assert files._log is log
    wait_for(files.finish, "the archive of the log")
    log.write_message("late")
    assert log.closed() == []
    files.prepare(replace(with_environment(), jobId="job02"), "ps-0")
    assert [chunk.size for chunk in log.closed()] == [path.stat().st_size for path in log.path.iterdir()]
    assert files._log.job_id == "job02"
