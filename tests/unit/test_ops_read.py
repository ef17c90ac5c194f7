"""Which logs are meant by the words behind `fab logs`: replicas, a job, or both, in either order."""

from __future__ import annotations

from pathlib import Path

import pytest
from opsdata import put_job

from jobs.chunks import Wanted
from jobs.folder import Folder
from jobs.ledger import Ledger
from jobs.records import JobRecord
from ops.cluster.cluster import Cluster
from ops.cluster.inventory import Inventory
from ops.errors import UsageError
from ops.logs.read import meant_by
from ops.screen.logs import show_logs


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> Cluster:
    cluster = Cluster(inventory, object(), ledger=Ledger(Folder(tmp_path)))  # type: ignore[arg-type]
    for second, job_id in enumerate(("job01", "worker")):
        made = f"2026-01-31T12:00:0{second}.000Z"
        put_job(cluster.ledger, JobRecord(job_id, hosts=list(inventory.replicas), createTime=made))
    return cluster


@pytest.mark.parametrize(
    ("word", "job", "replicas", "of"),
    [
        (None, None, "all", None),
        (None, "job01", "all", "job01"),
        ("worker", None, "worker", None),
        ("worker", "job01", "worker", "job01"),
        ("worker-replica-0", None, "worker-replica-0", None),
        ("job01", None, "all", "job01"),
        ("job01", "worker-1", "worker-1", "job01"),
        ("job01", "job02", "job01", "job02"),
    ],
)
def test_what_is_meant(cluster: Cluster, word: str | None, job: str | None, replicas: str, of: str | None) -> None:
    assert meant_by(cluster, word, job) == (replicas, of)


def test_a_word_that_is_neither(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"there is no replica and no job 'job02'; did you mean job01[?]; replicas are ps-0, "):
        show_logs(cluster, "job02", None, Wanted(), follow=False, as_json=False)
    with pytest.raises(
        UsageError, match=r"job worker has no replica 'worker-7'; did you mean worker-\d[?]; valid are master-0, "
    ):
        show_logs(cluster, "worker-7", None, Wanted(), follow=False, as_json=False)
