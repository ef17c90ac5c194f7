"""A host's diagnosis of a FAILED job: its content, the secrets that it omits, and its time limit."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until, wait_for

from hosts.agent import diagnosis
from hosts.agent.diagnosis import LIMIT, LINES, encode, lines_of, redact
from hosts.agent.lines import OutputLine
from hosts.agent.log import Log
from hosts.agent.supervisor import Assignment
from jobs import background, paths
from jobs.bucket import BucketError
from jobs.firsterror import FirstError
from jobs.folder_bucket import FolderBucket
from jobs.lease import Lease
from jobs.records import HostConfig, JobRecord, Plan, ReplicaRecord, Task, Usage
from jobs.states import JobState

SECRET = "correct horse battery staple"


class Files:
    """A bucket whose uploads wait for an event, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.released, self.error = threading.Event(), error
        self.uploads: dict[str, bytes] = {}

    def read_part(self, name: str, start: int, end: int) -> bytes:
        return b""

    def upload(self, name: str, source: Path) -> None:
        assert source.parent == Path("/proc/self/fd")  # no file of the host's disk, which may be full
        self.released.wait()
        if self.error:
            raise self.error
        self.uploads[name] = source.read_bytes()


def test_a_bucket_that_hangs_delays_the_next_job_by_30_s_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    files, messages = Files(), list[str]()
    task = diagnosis.start(files, "a", lambda: b"1", messages.append)  # type: ignore[arg-type]
    now[0] += diagnosis.SECONDS - 0.1
    assert task.result is None
    now[0] += 0.2
    assert task.result is False
    files.released.set()
    until(lambda: files.uploads == {"a": b"1"})
    assert messages == ["no diagnosis for fab bundle: it took longer than 30 s"]


@pytest.mark.parametrize("error", [BucketError(28, "No space left on device"), ValueError("what"), KeyError()])
def test_an_error_of_a_diagnosis_is_one_line(error: Exception) -> None:
    files, messages = Files(error), list[str]()
    files.released.set()
    task = diagnosis.start(files, "a", lambda: b"1", messages.append)  # type: ignore[arg-type]
    until(lambda: task.result is not None)
    assert task.result is False
    reason = {BucketError: "No space left on device", ValueError: "what", KeyError: "KeyError"}[type(error)]
    assert messages == [f"no diagnosis for fab bundle: {reason}"]


def test_a_deleted_job_gets_no_diagnosis_and_no_message(tmp_path: Path) -> None:
    messages = list[str]()
    task = diagnosis.start(FolderBucket(tmp_path), paths.diagnosis("job01", "ps-0"), lambda: b"1", messages.append)
    assert wait_for(lambda: task.result, "the end")
    assert (messages, list(tmp_path.iterdir())) == ([], [])


def test_a_restarted_host_keeps_the_diagnosis_of_before(tmp_path: Path) -> None:
    store, name = FolderBucket(tmp_path), paths.diagnosis("job01", "ps-0")
    store.create(paths.job("job01"), b"{}")
    for content in (b"1", b"2"):
        task = diagnosis.start(store, name, lambda content=content: content, lambda _: None)  # type: ignore[misc]
        assert wait_for(lambda task=task: task.result, "the end")  # type: ignore[misc]
    assert (tmp_path / name).read_bytes() == b"1"


def test_a_diagnosis_that_is_too_large_loses_its_oldest_lines_first() -> None:
    lines = [{"message": f"{n} " + "ä" * 4000} for n in range(LINES)]
    content = encode({"schema": 1, "lines": lines, "small": "here"})
    assert len(content) <= LIMIT
    record = json.loads(content)
    assert record["small"] == "here"
    assert record["lines"] == lines[-len(record["lines"]) :]
    assert len(record["lines"]) == LINES // 2 - 1
    record = json.loads(encode({"schema": 1, "lines": lines, "tfConfig": "x" * LIMIT, "small": "here"}))
    assert record == {"schema": 1, "lines": [], "tfConfig": "left out, as it was too large", "small": "here"}


def test_a_diagnosis_is_readable_json() -> None:
    assert encode({"schema": 1, "lines": ["é\udcff"]}) == '{\n "schema": 1,\n "lines": [\n  "é?"\n ]\n}\n'.encode()


def test_the_last_lines_of_a_log_are_truncated(tmp_path: Path) -> None:
    log = Log(tmp_path, "job01", "ps-0")
    log.write([OutputLine(1769860800.0 + n, "INFO", f"line {n}") for n in range(LINES + 5)])
    log.write([OutputLine(1769869999.0, "ERROR", "x" * 9000)])
    log.roll()
    lines = diagnosis.truncated(diagnosis.last_lines(log.path))
    assert len(lines) == LINES
    assert lines[0] == {"time": "2026-01-31T12:00:06.000Z", "severity": "INFO", "message": "line 6"}
    assert (lines[-1]["severity"], len(lines[-1]["message"])) == ("ERROR", 4000)


def test_the_last_error_is_in_the_diagnosis_though_the_disk_is_full() -> None:
    lines = [{"time": "12:00", "severity": "INFO", "message": "up"}]
    ended = ReplicaRecord("ps-0", endTime="12:01", errorMessage="up\nOSError: No space left on device")
    lost = {"time": "12:01", "severity": "ERROR", "message": "OSError: No space left on device"}
    assert diagnosis.with_tail(lines, ended) == [*lines, lost]
    assert diagnosis.with_tail([*lines, lost], ended) == [*lines, lost]
    assert diagnosis.with_tail(lines, ReplicaRecord("ps-0")) == lines


def test_each_line_of_a_secret_is_hidden() -> None:
    secrets = lines_of([f"{SECRET}\nsecond line", "abc", "", "correct horse"])
    assert secrets == [SECRET, "correct horse", "second line"]
    record = {"a": [f"it is {SECRET}!", {"b": "correct horse, second line"}, 5, None], "abc": "abc"}
    assert redact(record, secrets) == {"a": ["it is [secret]!", {"b": "[secret], [secret]"}, 5, None], "abc": "abc"}


@pytest.mark.parametrize("at", [500, 1000])
@pytest.mark.parametrize("length", [4, 12, len(SECRET)])
def test_the_rest_of_a_truncated_secret_is_hidden(at: int, length: int) -> None:
    cut = "x" * (at - length) + SECRET[:length]
    secrets = lines_of([SECRET, "correct", "staple diet"])
    assert redact(f"{SECRET}\n{cut}\ncorr", secrets) == f"[secret]\n{'x' * (at - length)}[secret]\ncorr"
    assert redact("x" * (at - 3) + SECRET[:3], secrets) == "x" * (at - 3) + SECRET[:3]


def test_of_a_package_with_any_number_of_entries_only_some_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def scan(folder: Path) -> Iterator[Iterator[SimpleNamespace]]:
        def entries() -> Iterator[SimpleNamespace]:
            yield from (SimpleNamespace(name=name) for name in ("task.py", "mine-1.2.dist-info", "other-1"))
            raise AssertionError(f"more of {folder} are listed than the limit")

        yield entries()

    monkeypatch.setattr(diagnosis, "_ENTRIES", 3)
    python = {"path": "/none/bin/python", "versions": [], "packages": {"mine": "1.2"}}
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        assert diagnosis.packages("/none/bin/python", tmp_path) == python


@pytest.mark.parametrize("config", ["{}", "no JSON"])
def test_a_diagnosis_is_complete_and_secrets_are_hidden_before_lines_are_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    for name in ("units", "memory_of_host"):
        monkeypatch.setattr(diagnosis, name, lambda name=name: name)
    monkeypatch.setattr(diagnosis, "disks", list)
    monkeypatch.setattr(diagnosis, "now", lambda: "12:02")
    monkeypatch.setattr(diagnosis.cgroup, "memory_events", lambda: {"/": {"oom_kill": 3}})
    (folder := tmp_path / "state" / "jobs" / "job01").mkdir(parents=True)
    (folder / "brought-1.2.dist-info").mkdir()
    python = tmp_path / "venv/bin/python3"
    for version in ("3.11", "3.12"):
        (tmp_path / f"venv/lib/python{version}/site-packages/dash-ed-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "venv/lib/python3.11/site-packages/nameless.dist-info").mkdir()
    plan = Plan("job01", ["ps-0"], "task", [], {"ps-0": Task(config)}, "abc", folder="a/b", secrets=["TOKEN", "OTHER"])
    log = Log(tmp_path / "logs", "job01", "ps-0")
    log.write([OutputLine(1769860800.0, "INFO", "x" * 3990 + SECRET)])
    log.roll()
    assignment = Assignment(plan, "ps-0", folder / "a/b", {"TOKEN": SECRET}, str(python), log)
    error = FirstError("12:00", f"it is {SECRET}")
    record = ReplicaRecord(
        "ps-0", exitCode=3, errorMessage="no such column", endTime="12:01", firstError=error, usage=Usage(1.5)
    )
    job = JobRecord("job01", endTime="2026-01-31T12:00:00.000Z", lease=Lease(holder="master-0/ab"))
    for bucket in (str(tmp_path), "gs://mine"):
        host = HostConfig("h-0", bucket)
        content = diagnosis.build(host, tmp_path / "state", assignment, log.path, job, record, "2026-01-31T12:10:00.500Z")
        assert json.loads(content) == {
            "schema": 1,
            "jobId": "job01",
            "clock": {
                "leader": "master-0",
                "leaderTime": "2026-01-31T12:00:00.000Z",
                "time": "2026-01-31T12:10:00.500Z",
                "aheadSeconds": 600.5,
            },
            "replica": "ps-0",
            "host": "h-0",
            "time": "12:02",
            "trainer": {
                "state": "PREPARING",
                "exitCode": 3,
                "outOfMemory": False,
                "memoryLimit": None,
                "restarts": 0,
                "preempted": False,
                "startTime": None,
                "endTime": "12:01",
                "errorMessage": "no such column",
                "ended": None,
                "firstError": {"time": "12:00", "message": "it is [secret]"},
                "usage": {"cpuSeconds": 1.5, "cpus": None, "memoryBytes": None},
            },
            "lines": [
                {"time": "2026-01-31T12:00:00.000Z", "severity": "INFO", "message": "x" * 3990 + "[secret]"},
                {"time": "12:01", "severity": "ERROR", "message": "no such column"},
            ],
            "units": "units",
            "kernel": {"memoryEvents": {"/": {"oom_kill": 3}}},
            "disks": ["/", str(tmp_path / "state"), *([bucket] if bucket.startswith("/") else [])],
            "memory": "memory_of_host",
            "tfConfig": {} if config == "{}" else config,
            "python": {
                "path": str(python),
                "versions": ["python3.11", "python3.12"],
                "packages": {"brought": "1.2", "dash-ed": "3.12"},
            },
        }


def test_the_clock_s_offset_is_the_host_s_time_minus_the_leader_s() -> None:
    job = JobRecord("job01", JobState.FAILED, endTime="2026-01-31T12:00:00.000Z", lease=Lease(holder="master-0/ab"))
    record = diagnosis.summarize_job(job, "2026-01-31T12:10:00.500Z")
    clock = {"leader": "master-0", "leaderTime": job.endTime, "time": "2026-01-31T12:10:00.500Z", "aheadSeconds": 600.5}
    assert record == {"jobId": "job01", "clock": clock}
    assert diagnosis.summarize_job(replace(job, endTime=None), "2026-01-31T12:10:00.500Z")["clock"]["aheadSeconds"] is None


def test_the_end_of_a_trainer_is_described() -> None:
    trainer = diagnosis.summarize_trainer(ReplicaRecord("ps-0", exitCode=137, signal=9, outOfMemory=True, memoryLimit=5))
    assert (trainer["ended"], trainer["memoryLimit"]) == ("signal 9 (SIGKILL), out of memory", 5)


def test_a_disk_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    present, absent = diagnosis.disks([str(tmp_path), str(tmp_path / "gone")])
    assert list(present) == ["path", "totalBytes", "freeBytes", "files", "freeFiles"]
    assert present["totalBytes"] > 0
    assert absent == {"path": str(tmp_path / "gone"), "notReadable": "No such file or directory"}


def test_the_host_s_memory_is_null_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}
    monkeypatch.setattr(diagnosis.cgroup, "memory_limit", lambda: 5)

    def sysconf(name: str) -> int:
        if name not in values:
            raise ValueError(name)
        return values[name]

    monkeypatch.setattr(diagnosis.os, "sysconf", sysconf)
    assert diagnosis.memory_of_host() == {"machineBytes": 40960, "machineFreeBytes": None, "unitLimitBytes": 5}
