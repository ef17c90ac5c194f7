"""The lines after a job: files to fetch, and a program's files that nothing keeps."""

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

    def __init__(self, left: UnsavedFiles | None) -> None:
        self.ledger, self._left = self, left

    def replicas(self, *_: object) -> dict[str, ReplicaRecord]:
        return {"worker-0": ReplicaRecord("worker-0", ReplicaState.EXITED, unsaved=self._left)}


def lines(monkeypatch: pytest.MonkeyPatch, files: Mapping[str, int], left: UnsavedFiles | None = None) -> list[str]:
    record, nowhere = JobRecord("job01", hosts=["worker-0"]), Any
    monkeypatch.setattr(outcome, "find", lambda *_: JobOutput(record, "/bucket/x", dict(files), nowhere, "x"))  # type: ignore[arg-type]
    cluster: Any = Replicas(left)
    return outcome.read(cluster, record)


@pytest.mark.parametrize("left", [None, UnsavedFiles()])
def test_an_output_is_fetched(monkeypatch: pytest.MonkeyPatch, left: UnsavedFiles | None) -> None:
    assert lines(monkeypatch, {"model/a": 1500, "b": 500}, left) == ["fab get job01 fetches its 2 files, 2.0 kB"]
    assert lines(monkeypatch, {"model": 0, "left/old": 5}, left) == ["fab get job01 fetches its 1 file, 0 B"]


def test_nothing_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ["it wrote nothing to JOB_DIR, there is nothing to fetch"]
    assert lines(monkeypatch, {}) == lines(monkeypatch, {}, UnsavedFiles(True)) == nothing


def test_what_was_written_elsewhere_is_named_with_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    left = UnsavedFiles(True, [f"m{n}" for n in range(7)], 9, 90)
    assert lines(monkeypatch, {"left/worker-0/m0": 90}, left) == [
        "it wrote nothing to JOB_DIR; fab get job01 fetches its 1 file, 90 B",
        "worker-0 wrote beside JOB_DIR, kept in JOB_DIR/left/worker-0: m0, m1, m2, m3, m4 and 4 more",
        HINT,
    ]
    left = UnsavedFiles(True, leftOut=["big (2.1 GB)"], leftOutFiles=1)
    assert lines(monkeypatch, {}, left)[1:] == ["worker-0 wrote beside JOB_DIR, not kept: big (2.1 GB)", HINT]
    assert lines(monkeypatch, {"model": 1}, replace(left, jobDirEmpty=False)) == [
        "fab get job01 fetches its 1 file, 1 B",
        "worker-0 wrote beside JOB_DIR, not kept: big (2.1 GB)",
        HINT,
    ]
    assert lines(monkeypatch, {}, UnsavedFiles(error="no disk"))[1:] == ["worker-0: no disk"]


def test_a_bucket_that_does_not_answer_is_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> JobOutput:
        raise BucketError("gone")

    monkeypatch.setattr(outcome, "find", fails)
    cluster: Any = Replicas(None)
    assert outcome.read(cluster, JobRecord("job01")) == []


def test_nobody_goes_on_from_what_was_left() -> None:
    files = {"model-7": 1, "left/worker-0/model-9": 1, "export/Servo/1": 1}
    assert JobOutput(JobRecord("job01"), "", files, Any, "").checkpoints == ["model-7"]  # type: ignore[arg-type]
