"""Check the lines after a job: files to fetch, and files outside JOB_DIR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from jobs.bucket import BucketError
from jobs.records import JobRecord, ReplicaRecord, UnsavedFiles
from jobs.states import ReplicaState
from ops.cluster.output import JobOutput
from ops.submit import outcome

HINT = "what a program saves below $JOB_DIR is kept; in arguments ${JOB_DIR} stands for it"


class Replicas:
    """A ledger of one replica."""

    def __init__(self, unsaved: UnsavedFiles | None) -> None:
        self.ledger, self._unsaved = self, unsaved

    def replicas(self, *_: object) -> dict[str, ReplicaRecord]:
        return {"worker-0": ReplicaRecord("worker-0", ReplicaState.EXITED, unsaved=self._unsaved)}


def read_lines(monkeypatch: pytest.MonkeyPatch, files: Mapping[str, int], unsaved: UnsavedFiles | None = None) -> list[str]:
    record, unused = JobRecord("job01", hosts=["worker-0"]), Any
    monkeypatch.setattr(outcome, "find", lambda *_: JobOutput(record, "/bucket/x", dict(files), unused, "x"))  # type: ignore[arg-type]
    cluster: Any = Replicas(unsaved)
    return outcome.describe_output(cluster, record)


@pytest.mark.parametrize("unsaved", [None, UnsavedFiles()])
def test_the_fetch_command_is_printed(monkeypatch: pytest.MonkeyPatch, unsaved: UnsavedFiles | None) -> None:
    assert read_lines(monkeypatch, {"model/a": 1500, "b": 500}, unsaved) == ["fab get job01 fetches its 2 files, 2.0 kB"]
    assert read_lines(monkeypatch, {"model": 0, "left/old": 5}, unsaved) == ["fab get job01 fetches its 1 file, 0 B"]


def test_an_empty_output_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["it wrote nothing to JOB_DIR, there is nothing to fetch"]
    assert read_lines(monkeypatch, {}) == read_lines(monkeypatch, {}, UnsavedFiles(True)) == expected


def test_files_outside_job_dir_are_listed_with_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    unsaved = UnsavedFiles(True, [f"m{n}" for n in range(7)], 9, 90)
    assert read_lines(monkeypatch, {"left/worker-0/m0": 90}, unsaved) == [
        "it wrote nothing to JOB_DIR; fab get job01 fetches its 1 file, 90 B",
        "worker-0 wrote outside JOB_DIR, kept in JOB_DIR/left/worker-0: m0, m1, m2, m3, m4 and 4 more",
        HINT,
    ]
    unsaved = UnsavedFiles(True, leftOut=["big (2.1 GB)"], leftOutFiles=1)
    assert read_lines(monkeypatch, {}, unsaved)[1:] == ["worker-0 wrote outside JOB_DIR, not kept: big (2.1 GB)", HINT]
    assert read_lines(monkeypatch, {"model": 1}, replace(unsaved, jobDirEmpty=False)) == [
        "fab get job01 fetches its 1 file, 1 B",
        "worker-0 wrote outside JOB_DIR, not kept: big (2.1 GB)",
        HINT,
    ]
    assert read_lines(monkeypatch, {}, UnsavedFiles(error="no disk"))[1:] == ["worker-0: no disk"]
    some_kept = UnsavedFiles(False, ["m"], 1, 5, ["big"], 1, "it took too long")
    assert read_lines(monkeypatch, {"model": 1}, some_kept)[1:] == [
        "worker-0 wrote outside JOB_DIR, kept in JOB_DIR/left/worker-0: m; not kept: big; it took too long",
        HINT,
    ]
    assert read_lines(monkeypatch, {"model": 1}, UnsavedFiles(False, ["m"], 1, 5))[1:] == [
        "worker-0 wrote outside JOB_DIR, kept in JOB_DIR/left/worker-0: m"
    ]


def test_a_failing_bucket_is_not_an_empty_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> JobOutput:
        raise BucketError("gone")

    monkeypatch.setattr(outcome, "find", fail)
    cluster: Any = Replicas(None)
    assert outcome.describe_output(cluster, JobRecord("job01")) == []


def test_files_outside_job_dir_are_no_checkpoints() -> None:
    files = {"model-7": 1, "left/worker-0/model-9": 1, "export/Servo/1": 1}
    assert JobOutput(JobRecord("job01"), "", files, Any, "").checkpoints == ["model-7"]  # type: ignore[arg-type]
