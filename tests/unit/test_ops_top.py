"""`fab top`: what the bucket says on one side, what is seen of the cluster on the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from opsdata import put_job

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import BucketError, Item
from jobs.folder import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.states import JobState, ReplicaState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.screen.render import Picture
from ops.show import top as module
from ops.show.snapshot import SnapshotReader, overview
from ops.show.top import picture, top

NOON, LATER = "2026-01-31T12:00:00.000Z", "2026-01-31T12:30:00.000Z"
REPORT = "2026-01-31T12:29:57.500Z"


class Counted(FolderBucket):
    """A bucket that counts how often it is asked, and may fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[list[str]] = []
        self.away = False

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        if self.away:
            raise BucketError("no answer")
        self.asked.append(list(names))
        return super().read_all(self.asked[-1])


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


@pytest.fixture
def ledger(store: Counted) -> Ledger:
    """Write job01, which has the master and a worker, with the master's record; job02 waits for all."""
    ledger = Ledger(store)
    entries = [QueueEntry("job01", ["master-0", "worker-0"], held=True), QueueEntry("job02", ["master-0", "ps-0"], priority=2)]
    ledger.change_queue(lambda _: Queue(entries))
    running = JobRecord("job01", JobState.RUNNING, createTime=NOON, startTime=NOON, hourlyCost=0.5, submittedBy="ann@x")
    put_job(ledger, replace(running, lostReplicas=["worker-0"]))
    put_job(ledger, JobRecord("job02", createTime=NOON, hourlyCost=9.0, submittedBy="bob\x1b[2J"))
    used = Usage(12.5, 1.5, 500_000_000)
    told = ReplicaRecord("master-0", ReplicaState.RUNNING, restarts=1, heartbeatTime=REPORT, incarnation="a", usage=used)
    ledger.write_replica("job01", told, None)
    ledger.write_replica("job01", replace(told, name="worker-0", heartbeatTime=NOON), None)
    return ledger


def rows(shown: Picture) -> list[str]:
    """Return its lines, with one space between cells."""
    return [" ".join(line.plain.split()) for line in shown]


def test_the_whole_cluster(inventory: Inventory, ledger: Ledger) -> None:
    seen = overview(inventory, SnapshotReader(ledger).read(), LATER)
    shown = rows(picture(seen))
    assert shown == [
        f"test, CUSTOM {terminal.local_time(LATER)} 2 of 5 hosts busy",
        "",
        "HOST ROLE CPU CPUS MEMORY LIMIT JOB REPLICA STATE RESTARTS REPORT",
        "ps-0 ps - 1 - 2.0 GB reserved for job02 - - - -",
        "master-0 master 150% 1 500.0 MB 2.0 GB job01 master-0 RUNNING 1 2.5 s ago",
        "worker-0 worker - 1 - 2.0 GB job01 worker-0 LOST 1 30 min 0 s ago",
        "worker-1 worker - 1 - 2.0 GB - - - - -",
        "evaluator-0 evaluator - 1 - 2.0 GB - - - - -",
        "",
        "JOB STATE HOSTS PRIORITY TOOK BY USD BEHIND",
        "job01 RUNNING 2 - 30 min 0 s ann@x 0.2500 -",
        "job02 QUEUED - 2 30 min 0 s bob␛[2J - job01",
    ]


def test_the_shape_of_the_json(inventory: Inventory, ledger: Ledger) -> None:
    priced = tuple(replace(host, hourly_cost=0.25, create_time=NOON) for host in inventory.hosts)
    shown = overview(replace(inventory, hosts=priced), SnapshotReader(ledger).read(), LATER).to_dict()
    hosts, jobs = shown.pop("hosts"), shown.pop("jobs")
    assert shown == {"time": LATER, "stack": "test", "scaleTier": "CUSTOM", "hourlyCost": 1.25, "cost": 0.625}
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
    free = {key: value for key, value in hosts[0].items() if value is None}
    assert (hosts[0]["reservedFor"], sorted(free)) == (
        "job02",
        ["job", "replica", "reportSeconds", "reportTime", "restarts", "state", "usage"],
    )
    assert jobs == [
        {
            "jobId": "job01",
            "state": "RUNNING",
            "hosts": ["master-0", "worker-0"],
            "priority": 0,
            "behind": [],
            "submittedBy": "ann@x",
            "createTime": NOON,
            "startTime": NOON,
            "seconds": 1800.0,
            "cost": 0.25,
        },
        {
            "jobId": "job02",
            "state": "QUEUED",
            "hosts": [],
            "priority": 2,
            "behind": ["job01"],
            "submittedBy": "bob\x1b[2J",
            "createTime": NOON,
            "startTime": None,
            "seconds": 1800.0,
            "cost": None,
        },
    ]


def test_one_read_a_look_and_another_for_what_is_new(ledger: Ledger, store: Counted) -> None:
    looker = SnapshotReader(ledger)
    wanted = [paths.job("job01"), paths.replica("job01", "master-0"), paths.replica("job01", "worker-0"), paths.job("job02")]
    store.asked.clear()
    first = looker.read()
    assert store.asked == [[paths.QUEUE], wanted]
    store.asked.clear()
    assert looker.read() == first
    assert store.asked == [[paths.QUEUE, *wanted]]
    ledger.change_queue(lambda _: Queue())
    looker.read()
    store.asked.clear()
    assert looker.read().jobs == {}
    assert store.asked == [[paths.QUEUE]], "a job that is over is asked for no more"


def test_what_cannot_be_read_is_not_there(inventory: Inventory, ledger: Ledger, store: Counted, tmp_path: Path) -> None:
    (tmp_path / paths.job("job02")).write_bytes(b"{")
    (tmp_path / paths.replica("job01", "worker-0")).write_bytes(b"[]")
    shown = rows(picture(overview(inventory, SnapshotReader(ledger).read(), LATER)))
    assert [row for row in shown if row.startswith("worker-0")] == ["worker-0 worker - 1 - 2.0 GB job01 worker-0 LOST - -"]
    assert shown[-1].startswith("job02 QUEUED - 2 ")
    (tmp_path / paths.QUEUE).write_bytes(b"nonsense")
    assert [job.jobId for job in overview(inventory, SnapshotReader(ledger).read(), LATER).jobs] == ["job01"]


def test_an_idle_cluster(inventory: Inventory, store: Counted) -> None:
    shown = rows(picture(overview(inventory, SnapshotReader(Ledger(store)).read(), LATER)))
    assert shown[0].endswith("0 of 5 hosts busy")
    assert shown[-1] == "no job runs, and none waits"


def test_a_host_that_serves_models_is_said_to_do_so(served: Inventory, store: Counted) -> None:
    shown = rows(picture(overview(served, SnapshotReader(Ledger(store)).read(), LATER)))
    jobs = {row.partition(" ")[0]: row.partition(" GB ")[2] for row in shown}
    assert jobs["serving-0"] == jobs["serving-1"] == "serves models - - - -"
    assert jobs["master-0"] == "- - - - -"


@pytest.mark.parametrize("lines", [6, 8, 10, 12, 40])
def test_it_never_takes_more_lines_than_there_are(inventory: Inventory, ledger: Ledger, lines: int) -> None:
    shown = picture(overview(inventory, SnapshotReader(ledger).read(), LATER), "a problem", lines)
    assert len(shown) <= lines
    if lines == 10:
        assert rows(shown)[5] == "and 4 more hosts"


@pytest.mark.parametrize(("lines", "hosts", "jobs"), [(24, 5, 13), (18, 5, 7), (14, 5, 3), (12, 3, 2)])
def test_jobs_are_cut_before_hosts_until_they_have_a_third(
    inventory: Inventory, ledger: Ledger, lines: int, hosts: int, jobs: int
) -> None:
    seen = overview(inventory, SnapshotReader(ledger).read(), LATER)
    shown = picture(replace(seen, jobs=seen.jobs * 20), "", lines)
    assert len(shown) <= lines
    names = [line.plain.split()[0] for line in shown if line.plain]
    assert (sum("-" in name for name in names), sum(name.startswith("job") for name in names)) == (hosts, jobs)


def test_once_where_there_is_no_terminal(inventory: Inventory, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterClient(inventory, object(), ledger=ledger)  # type: ignore[arg-type]
    assert top(cluster, once=False, as_json=False) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].startswith("HOST")
    assert "\x1b" not in out
    assert top(cluster, once=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["stack"] == "test"


def test_it_stays_until_ctrl_c_also_where_the_bucket_fails(
    inventory: Inventory, ledger: Ledger, store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    left: list[Any] = []

    class Screen:
        lines = 40

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def show(self, seen: Picture) -> None:
            shown.append(seen[1].plain)

    def sleep(seconds: float) -> None:
        assert seconds == module.REFRESH_SECONDS or len(shown) > 1
        store.away = len(shown) == 1
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "supports_screen", lambda: True)
    monkeypatch.setattr(module, "Screen", Screen)
    monkeypatch.setattr(module, "print_picture", left.append)
    monkeypatch.setattr(module.time, "sleep", sleep)
    assert top(ClusterClient(inventory, object(), ledger=ledger), once=False, as_json=False) == 0  # type: ignore[arg-type]
    assert [text.partition(":")[0] for text in shown] == ["", "the bucket does not answer (no answer)", ""]
    assert len(left) == 1


@pytest.mark.parametrize(("took", "seconds"), [(0.0, 0.4), (0.03, 0.37), (0.1, 0.9), (2.0, 18.0)])
def test_a_bucket_that_is_slow_is_asked_less_often(took: float, seconds: float) -> None:
    assert module.pause(took) == pytest.approx(seconds)
