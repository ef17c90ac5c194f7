"""Check the comparison of two runs of a job, as `fab reproduce` prints it."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.records import JobRecord
from ops.submit import compare


@pytest.mark.parametrize(
    ("original", "repeated", "change"),
    [
        ("0.9", "0.9", "same"),
        ("0.90", "0.885", "-0.015"),
        ("5006", "5008", "+2"),
        ("2e-05", "7e-05", "+5e-05"),
        ("0.0001", "7e-05", "-3e-05"),
        ("1.2E+08", "0.5", "-1.2e+08"),
        ("a", "b", "differs"),
        ("a", None, "not known"),
    ],
)
def test_a_difference_is_formatted(original: str | None, repeated: str | None, change: str) -> None:
    difference = compare.ComparedValue("x", [original, repeated])
    assert (difference.change, difference.same) == (change, change == "same")


def test_results_have_the_time_of_jobs_that_ran() -> None:
    ran = JobRecord("a", startTime="2026-01-31T12:00:00.000Z", endTime="2026-01-31T12:00:02.500Z")
    rows = compare.rows(ran, JobRecord("b", startTime="2026-01-31T12:00:00.000Z"), ({"loss": "0.2"}, {}))
    assert {row.what: tuple(row.values) for row in rows} == {
        "state": ("QUEUED", "QUEUED"),
        "loss": ("0.2", None),
        "seconds": ("2.5", None),
    }
    assert [row.change for row in rows] == ["same", "not known", "not known"]
    assert compare.results("FAILED", {}, 1.25, 0.00361) == {"state": "FAILED", "seconds": "1.2", "US dollars": "0.0036"}


def test_versions_data_and_replicas_are_compared_one_by_one() -> None:
    def record(job_id: str, workers: int, data: dict[str, Any], **versions: str) -> JobRecord:
        types = {"worker": "n1-highcpu-8"}
        cluster = {"scaleTier": "CUSTOM", "replicas": {"worker": workers}, "machineTypes": types}
        return JobRecord(job_id, manifest={"cluster": cluster, "versions": versions, "data": data})

    hashed = {"sha256": "ab" * 32, "files": 1, "bytes": 1_000_000}
    rows = compare.rows(record("a", 2, hashed, python="3.11"), record("b", 4, {"notHashed": "gone"}, python="3.12"), ({}, {}))
    assert {row.what: tuple(row.values) for row in rows} == {
        "data": ("sha256:abababababababab (1 file, 1.0 MB)", "not hashed: gone"),
        "python": ("3.11", "3.12"),
        "scaleTier": ("CUSTOM", "CUSTOM"),
        "worker": ("2 x n1-highcpu-8", "4 x n1-highcpu-8"),
        "state": ("QUEUED", "QUEUED"),
    }
