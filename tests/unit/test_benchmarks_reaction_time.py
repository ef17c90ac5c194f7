"""The figures of a job's state, from log lines, records and hosts that are directories."""

from __future__ import annotations

import importlib
import io
import json
import re
import tarfile
import threading
from pathlib import Path

import pytest
from benchmarks import reaction_time
from benchmarks.hanging_once import Hanging
from benchmarks.job_events import LoggedLine, first_after, parse_log, record_in, runs, seconds_of, starts, trainers
from benchmarks.measure import MeasureError
from benchmarks.reaction_time import make_host, packed, played
from waiting import limit, wait_for

from jobs import paths
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import HostConfig, JobRecord
from jobs.states import JobState

LOG = [
    LoggedLine(1.0, "worker-0", "started trainer pid 41: python -m tiny.task"),
    LoggedLine(1.5, "worker-1", "started trainer pid 42: python -m tiny.task"),
    LoggedLine(2.0, "worker-0", "Train [worker/0], step 1: at 2.0"),
    LoggedLine(3.0, "worker-1", "Train [worker/1], step 1: at 3.0"),
    LoggedLine(4.0, "worker-0", "restarting after signal 9 (SIGKILL) (1 of 5)"),
    LoggedLine(5.0, "worker-0", "started trainer pid 57: python -m tiny.task"),
    LoggedLine(6.0, "worker-0", "it started trainer pid 58: a line of the trainer's own"),
    LoggedLine(7.0, "worker-0", "Train [worker/0], step 9: at 7.0"),
]


def test_a_log_is_sorted_by_time() -> None:
    lines = [
        {"time": "1970-01-01T00:00:02.500Z", "severity": "INFO", "replica": "ps-0", "message": "b"},
        {"time": "1970-01-01T00:00:01.250Z", "severity": "INFO", "replica": "ps-1", "message": "a"},
    ]
    assert parse_log("\n".join(map(json.dumps, lines))) == [LoggedLine(1.25, "ps-1", "a"), LoggedLine(2.5, "ps-0", "b")]


def test_a_time_is_converted_to_unix_seconds() -> None:
    assert seconds_of("1970-01-01T01:00:00.250Z") == 3600.25


def test_a_replica_s_trainer_is_the_last_started_one() -> None:
    assert starts(LOG) == [("worker-0", 41, 1.0), ("worker-1", 42, 1.5), ("worker-0", 57, 5.0)]
    assert trainers(LOG) == {"worker-0": 57, "worker-1": 42}


@pytest.mark.parametrize(("time", "expected"), [(0.0, 2.0), (2.0, 7.0), (7.0, None)])
def test_the_first_line_after_a_time_is_the_replica_s_own(time: float, expected: float | None) -> None:
    assert first_after(LOG, "worker-0", "Train [", time) == expected


def test_schedules_are_counted_from_the_last_line() -> None:
    assert played("seed 7: no\n5200 schedules from seed 3, 1 with a violation\n") == (5200, 1)
    for out in ("Traceback", "0 schedules from seed 3, 0 with a violation\n"):
        with pytest.raises(MeasureError, match="no schedule was played"):
            played(out)


def test_many_jobs_are_copies_of_one_record() -> None:
    record = JobRecord("job01", state=JobState.SUCCEEDED, labels={"a": "b"})
    with tarfile.open(fileobj=io.BytesIO(packed(record, 3))) as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames()}
        jobs = [JobRecord.from_json(file.read()) for file in files.values() if file]
    assert list(files) == [paths.job(job.jobId) for job in jobs]
    assert [(job.jobId, job.labels) for job in jobs] == [(f"bench_many_000{n}", {"a": "b"}) for n in range(3)]
    assert len({job.createTime for job in jobs}) == 3


def test_a_host_that_is_a_directory_has_a_job(tmp_path: Path) -> None:
    make_host(tmp_path)
    host = HostConfig.from_json((tmp_path / "host.json").read_bytes())
    ledger = Ledger(FolderBucket(Path(host.bucket)))
    entry = ledger.queue().holder(host.name)
    assert entry is not None
    plan, stored = ledger.plan(entry.jobId), ledger.job(entry.jobId)
    assert plan is not None
    assert stored is not None
    assert stored.record.lease.free
    assert plan.replicas == stored.record.hosts == [host.name]
    home = tmp_path / "state" / "jobs" / plan.jobId
    assert (home / "package" / "tiny" / "task.py").is_file()
    assert (home / "package.sha256").read_text() == plan.packageSha256


def test_a_store_hangs_while_a_file_exists(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    off = tmp_path / "bucket.off"
    store = Hanging(FolderBucket(tmp_path), off)
    assert store.read("a").content == b"x"
    off.touch()
    contents: list[bytes] = []
    call = threading.Thread(target=lambda: contents.append(store.read("a").content), daemon=True)
    call.start()
    wait_for((tmp_path / "bucket.hangs").exists, "the store hangs", poll=0.01)
    assert not contents
    off.unlink()
    call.join(limit())
    assert contents == [b"x"]


def test_the_wait_for_a_job_has_a_limit(ledger: Ledger) -> None:
    with pytest.raises(MeasureError, match="job01 is nowhere after 0 s"):
        record_in(ledger, "job01", runs, 0.0)
    ledger.create_job(JobRecord("job01", state=JobState.PREPARING))
    with pytest.raises(MeasureError, match="job01 is PREPARING after 0 s"):
        record_in(ledger, "job01", runs, 0.0)
    assert record_in(ledger, "job01", lambda state: not state.final, 0.0).jobId == "job01"


def test_a_worker_s_import_is_timed_by_a_function_of_the_library() -> None:
    module, name = re.findall(r"from (\S+) import (\w+);", reaction_time._IMPORT)[0]
    assert callable(getattr(importlib.import_module(module), name))
