"""Check the arguments of `fab logs`: replicas, a job, or both, in either order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opsdata import put_job, put_log

from infra.inventory import Inventory
from jobs import paths
from jobs.chunks import LogFilter
from jobs.firsterror import FirstError
from jobs.folder import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState, ReplicaState
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.errors import HostError, UsageError
from ops.logs.lines import LogLine
from ops.logs.read import resolve_selection, select_replicas
from ops.screen.logs import show_logs


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    cluster = ClusterClient(inventory, object(), ledger=Ledger(FolderBucket(tmp_path)))  # type: ignore[arg-type]
    for second, job_id in enumerate(("job01", "worker")):
        create_time = f"2026-01-31T12:00:0{second}.000Z"
        put_job(cluster.ledger, JobRecord(job_id, hosts=list(inventory.replicas), createTime=create_time))
    return cluster


@pytest.mark.parametrize(
    ("word", "job", "replicas", "job_id"),
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
def test_arguments_resolve_to_replicas_and_job(
    cluster: ClusterClient, word: str | None, job: str | None, replicas: str, job_id: str | None
) -> None:
    assert resolve_selection(cluster, word, job) == (replicas, job_id)


def test_an_unknown_argument_is_refused(cluster: ClusterClient) -> None:
    with pytest.raises(UsageError, match=r"there is no replica and no job 'job02'; did you mean job01[?]; replicas are ps-0, "):
        show_logs(cluster, "job02", None, LogFilter(), follow=False, as_json=False)
    with pytest.raises(
        UsageError, match=r"job worker has no replica 'worker-7'; did you mean worker-\d[?]; valid are master-0, "
    ):
        show_logs(cluster, "worker-7", None, LogFilter(), follow=False, as_json=False)


def test_several_replicas_are_selected(cluster: ClusterClient) -> None:
    record = JobRecord("job01", hosts=list(cluster.inventory.replicas))
    assert select_replicas(record, "worker, ps-replica-0") == ["ps-0", "worker-0", "worker-1"]
    assert select_replicas(record, "worker-1,all") == list(cluster.inventory.replicas)
    assert resolve_selection(cluster, "worker-0,ps", None) == ("worker-0,ps", None)
    with pytest.raises(UsageError, match=r"job job01 has no replica 'ps-7'; did you mean ps-0[?]; valid are "):
        select_replicas(record, "worker,ps-7")


class DeletedHosts:
    """Fail for every host, as after a destroy."""

    def __init__(self, error: str = "does not answer") -> None:
        self.error = error

    def each(self, names: list[str], *_: object) -> Outcome[object]:
        return Outcome({}, {name: HostError(name, self.error) for name in names})


@pytest.fixture
def ended(inventory: Inventory, tmp_path: Path) -> ClusterClient:
    """Return a cluster whose job has ended and whose hosts are deleted; each replica wrote 300 lines."""
    ledger = Ledger(FolderBucket(tmp_path))
    job = JobRecord("job01", JobState.FAILED, hosts=["ps-0", "worker-0"])
    put_job(ledger, job)
    for name in job.hosts:
        put_log(tmp_path / paths.log("job01", name), [])
        log_lines = [
            LogLine(f"2026-01-31T12:{n // 60:02}:{n % 60:02}.000Z", "ERROR" if n % 100 == 50 else "INFO", name, f"{name} {n}")
            for n in range(300)
        ]
        for first in range(0, 300, 50):
            put_log(tmp_path / paths.log("job01", name), log_lines[first : first + 50])
    error = FirstError("2026-01-31T12:00:50.000Z", "worker-0 50")
    ledger.write_replica("job01", ReplicaRecord("worker-0", ReplicaState.EXITED, firstError=error), None)
    return ClusterClient(inventory, DeletedHosts(), open_bucket(str(tmp_path)), ledger)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log_filter", "messages"),
    [
        (LogFilter(2), ["ps-0 298", "worker-0 298", "ps-0 299", "worker-0 299"]),
        (LogFilter(1, until="2026-01-31T12:01:00.000Z"), ["ps-0 60", "worker-0 60"]),
        (LogFilter(None, since="2026-01-31T12:04:59.000Z"), ["ps-0 299", "worker-0 299"]),
        (LogFilter(None, severity="ERROR", until="2026-01-31T12:02:00.000Z"), ["ps-0 50", "worker-0 50"]),
        (LogFilter(None, pattern=r"^worker-0 29[89]$"), ["worker-0 298", "worker-0 299"]),
    ],
)
def test_logs_of_deleted_hosts_come_from_the_bucket(
    ended: ClusterClient, log_filter: LogFilter, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_logs(ended, "all", "job01", log_filter, follow=False, as_json=True) == 0
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["message"] for line in lines] == messages
    assert [line["message"] for line in lines if line.get("firstError")] == [text for text in messages if text == "worker-0 50"]
    assert "its lines are the bucket's copy" in output.err


def test_follow_and_until_conflict(ended: ClusterClient) -> None:
    with pytest.raises(UsageError, match="--until is for what has been printed, --follow for what will be: say one of them"):
        show_logs(ended, "all", "job01", LogFilter(until="2026"), follow=True, as_json=False)


def test_a_slow_pattern_is_refused(ended: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.chunks.PATTERN_SECONDS", 0.05)
    put_log(tmp_path / paths.log("job01", "worker-0"), [LogLine("2027", "INFO", "worker-0", "a" * 50)], incarnation=1 << 33)
    with pytest.raises(UsageError, match=r"--grep '\(a\+\)\+b' takes longer than 0.05 s on one line"):
        show_logs(ended, "worker", "job01", LogFilter(pattern="(a+)+b"), follow=False, as_json=False)
