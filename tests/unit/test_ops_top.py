"""Check `fab top`: from records in the bucket to the overview of the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import pytest
from opsdata import put_job
from rich.text import Text

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError, Item
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.screen.render import Frame
from ops.show import top as module
from ops.show.snapshot import Overview, SnapshotReader, build_overview
from ops.show.top import frame, top

NOON, LATER = "2026-01-31T12:00:00.000Z", "2026-01-31T12:30:00.000Z"
REPORT = "2026-01-31T12:29:57.500Z"


class CountingBucket(FolderBucket):
    """A bucket that records its reads, and may fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[list[str]] = []
        self.failing = False

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        if self.failing:
            raise BucketError("no answer")
        self.reads.append(list(names))
        return super().read_all(self.reads[-1])


@pytest.fixture
def store(tmp_path: Path) -> CountingBucket:
    return CountingBucket(tmp_path)


@pytest.fixture
def ledger(store: CountingBucket) -> Ledger:
    """Write job01, which has the master and a worker, with the master's record; job02 waits for both."""
    ledger = Ledger(store)
    entries = [
        QueueEntry("job01", ["master-0", "worker-0"], has_hosts=True),
        QueueEntry("job02", ["master-0", "ps-0"], priority=2),
    ]
    ledger.change_queue(lambda _: Queue(entries))
    running = JobRecord("job01", JobState.RUNNING, createTime=NOON, startTime=NOON, hourlyCost=0.5, submittedBy="ann@x")
    put_job(ledger, replace(running, lostReplicas=["worker-0"]))
    put_job(ledger, JobRecord("job02", createTime=NOON, hourlyCost=9.0, submittedBy="bob\x1b[2J"))
    usage = Usage(12.5, 1.5, 500_000_000)
    replica = ReplicaRecord("master-0", ReplicaState.RUNNING, restarts=1, heartbeatTime=REPORT, incarnation="a", usage=usage)
    ledger.write_replica("job01", replica, None)
    ledger.write_replica("job01", replace(replica, name="worker-0", heartbeatTime=NOON), None)
    return ledger


def text_rows(shown_frame: Frame) -> list[str]:
    """Return the lines of a frame, with one space between cells."""
    return [" ".join(line.plain.split()) for line in shown_frame]


def test_the_frame_of_a_cluster(inventory: Inventory, ledger: Ledger) -> None:
    snapshot_overview = build_overview(inventory, SnapshotReader(ledger).read(), LATER)
    lines = text_rows(frame(snapshot_overview))
    assert lines == [
        f"test, CUSTOM {terminal.local_time(LATER)} 2 of 5 hosts busy",
        "",
        "HOST ROLE CPU CPUS MEMORY HOST MEMORY JOB REPLICA STATE RESTARTS REPORT",
        "ps-0 ps - 1 - 2.0 GB reserved for job02 - - - -",
        "master-0 master 150% 1 500.0 MB 2.0 GB job01 master-0 RUNNING 1 2.5 s ago",
        "worker-0 worker - 1 - 2.0 GB job01 worker-0 LOST 1 30 min 0 s ago",
        "worker-1 worker - 1 - 2.0 GB - - - - -",
        "evaluator-0 evaluator - 1 - 2.0 GB - - - - -",
        "",
        "JOB STATE HOSTS PRIORITY TIME BY USD WAITS FOR",
        "job01 RUNNING 2 - 30 min 0 s ann@x 0.2500 -",
        "job02 QUEUED - 2 30 min 0 s bob␛[2J - job01",
    ]


def test_the_json_output(inventory: Inventory, ledger: Ledger) -> None:
    priced_hosts = tuple(replace(host, hourly_cost=0.25, create_time=NOON) for host in inventory.hosts)
    priced_overview = build_overview(replace(inventory, hosts=priced_hosts), SnapshotReader(ledger).read(), LATER)
    assert text_rows(frame(priced_overview))[0] == (
        f"test, CUSTOM {terminal.local_time(LATER)} 2 of 5 hosts busy 0.6250 USD so far, 1.2500 an hour"
    )
    output = asdict(priced_overview)
    hosts, jobs = output.pop("hosts"), output.pop("jobs")
    assert output == {"time": LATER, "stack": "test", "scaleTier": "CUSTOM", "hourlyCost": 1.25, "cost": 0.625}
    assert hosts[1] == {
        "name": "master-0",
        "role": "master",
        "machineType": "n1-highcpu-8",
        "cpus": 1,
        "memoryBytes": 2_000_000_000,
        "job": "job01",
        "replica": "master-0",
        "reservedFor": None,
        "state": "RUNNING",
        "restarts": 1,
        "usage": {"cpuSeconds": 12.5, "cpus": 1.5, "memoryBytes": 500_000_000},
        "reportTime": REPORT,
        "reportSeconds": 2.5,
    }
    empty_fields = [key for key, value in hosts[0].items() if value is None]
    assert hosts[0]["reservedFor"] == "job02"
    assert empty_fields == ["job", "replica", "state", "restarts", "usage", "reportTime", "reportSeconds"]
    keys = ("jobId", "state", "hosts", "priority", "behind", "submittedBy", "createTime", "startTime", "seconds", "cost")
    running = ("job01", "RUNNING", ["master-0", "worker-0"], 0, [], "ann@x", NOON, NOON, 1800.0, 0.25)
    waiting = ("job02", "QUEUED", [], 2, ["job01"], "bob\x1b[2J", NOON, None, 1800.0, None)
    assert jobs == [dict(zip(keys, values, strict=True)) for values in (running, waiting)]


def test_one_read_per_poll_and_one_more_for_new_jobs(ledger: Ledger, store: CountingBucket) -> None:
    reader = SnapshotReader(ledger)
    names = [paths.job("job01"), paths.replica("job01", "master-0"), paths.replica("job01", "worker-0"), paths.job("job02")]
    store.reads.clear()
    first = reader.read()
    assert store.reads == [[paths.QUEUE], names]
    store.reads.clear()
    assert reader.read() == first
    assert store.reads == [[paths.QUEUE, *names]]
    ledger.change_queue(lambda _: Queue())
    reader.read()
    store.reads.clear()
    assert reader.read().jobs == {}
    assert store.reads == [[paths.QUEUE]], "an ended job is not read again"


def test_unreadable_records_are_left_out(inventory: Inventory, ledger: Ledger, store: CountingBucket, tmp_path: Path) -> None:
    (tmp_path / paths.job("job02")).write_bytes(b"{")
    (tmp_path / paths.replica("job01", "worker-0")).write_bytes(b"[]")
    lines = text_rows(frame(build_overview(inventory, SnapshotReader(ledger).read(), LATER)))
    assert [row for row in lines if row.startswith("worker-0")] == ["worker-0 worker - 1 - 2.0 GB job01 worker-0 LOST - -"]
    assert lines[-1].startswith("job02 QUEUED - 2 ")
    (tmp_path / paths.QUEUE).write_bytes(b"nonsense")
    assert [job.jobId for job in build_overview(inventory, SnapshotReader(ledger).read(), LATER).jobs] == ["job01"]


def test_the_ages_of_reports_and_the_costs_of_jobs(inventory: Inventory, ledger: Ledger) -> None:
    record = ReplicaRecord("master-0", ReplicaState.RUNNING, heartbeatTime="2026-01-31T12:29:58.7654Z", incarnation="a")
    worker = ReplicaRecord("worker-0", ReplicaState.PREPARING, restarts=2, usage=Usage(1.0, 1.0, 1))
    for replica in (record, worker):
        ledger.write_replica("job01", replica, ledger.replica_version("job01", replica.name))
    ended = JobRecord("job01", JobState.SUCCEEDED, createTime=NOON, startTime=NOON, endTime="2026-01-31T12:10:00.1234Z")

    def snapshot(moment: str, **changes: Any) -> Overview:
        put_job(ledger, replace(ended, **changes))
        return build_overview(inventory, SnapshotReader(ledger).read(), moment)

    first = snapshot(LATER, hourlyCost=0.5)
    _, master, other, *_ = first.hosts
    assert (master.reportTime, master.reportSeconds) == ("2026-01-31T12:29:58.7654Z", 1.235)
    assert (other.state, other.restarts) == ("PREPARING", 2)
    assert (other.usage, other.reportTime, other.reportSeconds) == (None, None, None)
    assert (first.jobs[0].seconds, first.jobs[0].cost) == (600.123, 0.0834)
    early = snapshot("2026-01-31T11:00:00Z", endTime=None)
    assert (early.hosts[1].reportSeconds, early.jobs[0].seconds, early.jobs[0].cost) == (0.0, 0.0, None)
    assert snapshot(LATER, hourlyCost=0.5, cost=0.0).jobs[0].cost == 0.0


def test_rows_have_colours(inventory: Inventory, ledger: Ledger) -> None:
    def colours(row: Text) -> dict[str, str]:
        return {row.plain[span.start : span.end].strip(): str(span.style) for span in row.spans}

    title, problem, _, _, reserved, master, lost, *_, _, job, _ = frame(
        build_overview(inventory, SnapshotReader(ledger).read(), LATER), "a\x1b[1m problem"
    )
    assert (colours(title), str(problem.style), problem.plain) == ({"test, CUSTOM": "bold"}, "yellow", "a problem")
    assert colours(reserved)["reserved for job02"] == "dim"
    assert colours(master) == {"master-0": "bold", "RUNNING": "blue", "1": "yellow"}
    assert colours(lost)["LOST"] == "red"
    assert colours(job) == {"job01": "bold", "RUNNING": "blue", "-": "dim"}


def test_the_frame_of_an_idle_cluster_with_serving_hosts(served: Inventory, store: CountingBucket) -> None:
    lines = text_rows(frame(build_overview(served, SnapshotReader(Ledger(store)).read(), LATER)))
    assert lines[0].endswith("0 of 5 hosts busy")
    assert lines[-1] == "no job runs, and none waits"
    jobs = {row.partition(" ")[0]: row.partition(" GB ")[2] for row in lines}
    assert jobs["serving-0"] == jobs["serving-1"] == "serves models - - - -"
    assert jobs["master-0"] == "- - - - -"


@pytest.mark.parametrize("lines", [6, 8, 10, 12, 40])
def test_a_frame_fits_the_terminal(inventory: Inventory, ledger: Ledger, lines: int) -> None:
    cluster_frame = frame(build_overview(inventory, SnapshotReader(ledger).read(), LATER), "a problem", lines)
    assert len(cluster_frame) <= lines
    if lines == 10:
        assert text_rows(cluster_frame)[5] == "and 4 more hosts"


@pytest.mark.parametrize(("lines", "hosts", "jobs"), [(24, 5, 13), (18, 5, 7), (14, 5, 3), (12, 3, 2)])
def test_jobs_are_cut_before_hosts_down_to_a_third(
    inventory: Inventory, ledger: Ledger, lines: int, hosts: int, jobs: int
) -> None:
    snapshot_overview = build_overview(inventory, SnapshotReader(ledger).read(), LATER)
    cluster_frame = frame(replace(snapshot_overview, jobs=snapshot_overview.jobs * 20), "", lines)
    assert len(cluster_frame) <= lines
    names = [line.plain.split()[0] for line in cluster_frame if line.plain]
    assert (sum("-" in name for name in names), sum(name.startswith("job") for name in names)) == (hosts, jobs)


def test_without_a_terminal_it_prints_once(
    cluster: ClusterClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Screen", None)
    assert top(cluster, once=False, as_json=False) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].startswith("HOST")
    assert "\x1b" not in out
    assert top(cluster, once=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["stack"] == "test"
    monkeypatch.setattr(terminal, "supports_screen", lambda: True)
    assert top(cluster, once=True, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("HOST")


def test_it_runs_until_ctrl_c_even_if_the_bucket_fails(
    cluster: ClusterClient, store: CountingBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_lines: list[str] = []
    final_frames: list[Any] = []

    class Screen:
        lines = 40

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def show(self, new_frame: Frame) -> None:
            status_lines.append(new_frame[1].plain)

    def sleep(seconds: float) -> None:
        assert seconds == module.REFRESH_SECONDS or len(status_lines) > 1
        store.failing = len(status_lines) == 1
        if len(status_lines) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "supports_screen", lambda: True)
    monkeypatch.setattr(module, "Screen", Screen)
    monkeypatch.setattr(module, "print_frame", final_frames.append)
    monkeypatch.setattr(module.time, "sleep", sleep)
    assert top(cluster, once=False, as_json=False) == 0
    assert [text.partition(":")[0] for text in status_lines] == ["", "cannot refresh (no answer)", ""]
    assert len(final_frames) == 1


@pytest.mark.parametrize(("read_seconds", "pause_seconds"), [(0.0, 0.4), (0.03, 0.37), (0.1, 0.9), (2.0, 18.0)])
def test_a_slow_bucket_is_read_less_often(read_seconds: float, pause_seconds: float) -> None:
    assert module.pause(read_seconds) == pytest.approx(pause_seconds)
