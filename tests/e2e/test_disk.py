"""Jobs that fill their host's disk or the bucket: the quota holds, and other jobs have space."""

from __future__ import annotations

import re
from typing import Any

from stacks import TINY, Stack
from waiting import wait_for

from infra.lxd import quotas

_FILLING = ("--package", "tests/trainers/filling", "--module", "filling.task", "--args")
_FULL = "Disk quota exceeded"
_INTO = "/bucket/jobs/fills_the_bucket/output/full"


def _written_mib(record: dict[str, Any]) -> int:
    """Return the MiB that the trainer wrote, from the log's end in the error message."""
    return max(map(int, re.findall(r"(\d+) MiB are written", record["errorMessage"])))


def test_a_job_that_fills_its_quota_does_not_affect_others(cluster: Stack) -> None:
    """Set both limits by one update."""
    usage = int(cluster.ssh("master-0", "sudo du -s --block-size=1M /bucket").out.split()[0])
    cluster.pulumi("config", "set", "--path", "disk.worker", "1GiB")
    try:
        cluster.configure(bucketSize=f"{usage + 1024}MiB")
        assert cluster.up_changes() == {"updated": 2}
        wait_for(has_quotas, "the pool, which other stacks use too, enforces quotas")
        result = cluster.fab("train", "--job", "fills_its_disk", *_FILLING, "--on worker-0")
        assert result.code == 1, result.text
        record = cluster.describe("fills_its_disk")
        assert record["state"] == "FAILED"
        assert "worker 0" in record["errorMessage"]
        assert _FULL in record["errorMessage"]
        assert 256 < _written_mib(record) < 1024
        # The files on its host are deleted with the job.
        cluster.must("train", "--job", "after_a_full_disk", *TINY, "--args", "--seconds 1")

        cluster.must("train", "--job", "fills_the_bucket", "--no-follow", *_FILLING, "--on worker-0 --bucket")
        wait_for(lambda: _FULL in worker_log(cluster), "the bucket is full", 300, poll=1)
        assert int(cluster.ssh("worker-0", f"sudo du -s --block-size=1M {_INTO}").out.split()[0]) < 1100
        findings = cluster.json("doctor")["findings"]
        assert [each["what"] for each in findings if each["severity"] == "error"] == ["the bucket is 100% full"]
        # No record can be written now. With more space the job ends as usual.
        cluster.configure(bucketSize=f"{usage + 2048}MiB")
        cluster.up()
        assert _FULL in cluster.wait("fills_the_bucket", "FAILED")["errorMessage"]
    finally:
        cluster.ssh("master-0", f"sudo rm -rf {_INTO}")
        cluster.pulumi("config", "rm", "bucketSize")
        cluster.pulumi("config", "rm", "--path", "disk.worker")
        cluster.up()
    assert cluster.changes() == {}
    cluster.must("train", "--job", "after_a_full_bucket", *TINY, "--args", "--seconds 1")


def has_quotas() -> bool:
    """Make the pool count, as `pulumi up` does, and return True if it does: a host that another stack deletes may stop that."""
    quotas.enable_accounting("scaletier")
    return quotas.is_accounting("scaletier")


def worker_log(cluster: Stack) -> str:
    """Return the newest lines of the worker that fills the bucket."""
    return cluster.fab("logs", "worker-0", "--job", "fills_the_bucket", "--lines", "9").out
