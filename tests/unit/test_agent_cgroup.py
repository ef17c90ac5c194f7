"""A trainer's resource usage and want of memory by the kernel's files, and the times of its measurements."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from replicahosts import Clock
from test_agent_reporter import PLAN, Replica
from waiting import wait_for

from hosts.agent import cgroup, trainer
from hosts.agent.cgroup import Meter, memory_events, oom_kills
from hosts.agent.log import Log
from hosts.agent.process import ProcessRun
from hosts.agent.replica_rules import Exit
from hosts.agent.reporter import HostProbes
from jobs.folder import FolderBucket
from jobs.ledger import Ledger
from jobs.queue import QueueEntry
from jobs.records import JobRecord, ReplicaRecord, Usage
from jobs.serialization import RecordError
from jobs.states import JobState

UNIT = "/system.slice/scaletier.service"
CURRENT = "memory.current"
V2 = {f"{UNIT}/cpu.stat": "usage_usec 2500000\nuser_usec 1\n", f"{UNIT}/{CURRENT}": "1000\n"}
V2_STAT = {f"{UNIT}/memory.stat": "anon 1\nfile 700\nshmem 50\n"}
V1 = {
    f"/unified{UNIT}/cpu.stat": "usage_usec 2500000\n",
    f"/memory{UNIT}/memory.usage_in_bytes": "1000\n",
    f"/memory{UNIT}/memory.stat": "cache 1\ntotal_cache 700\ntotal_shmem 50\n",
}
OLD = {"/cpuacct/cpuacct.usage": "2500000000\n"}
HYBRID = f"4:memory:{UNIT}\n2:cpu,cpuacct:/\n0::{UNIT}\n"


def lay(root: Path, own: str, files: dict[str, str]) -> None:
    (root / "own").write_text(own)
    for name, text in files.items():
        path = Path(f"{root}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "seconds", "memory"),
    [
        (f"0::{UNIT}\n", V2 | V2_STAT, 2.5, 350),
        (HYBRID, V1, 2.5, 350),
        (HYBRID, OLD, 2.5, None),
        (f"0::{UNIT}\n", V2, 2.5, None),
        (f"0::{UNIT}\n", V2_STAT | {f"{UNIT}/{CURRENT}": "1000\n"}, None, 350),
        (f"0::{UNIT}\n", V2_STAT | {f"{UNIT}/{CURRENT}": "100\n"}, None, 0),
    ],
)
def test_what_the_kernel_says(tmp_path: Path, own: str, files: dict[str, str], seconds: float, memory: int) -> None:
    lay(tmp_path, own, files)
    assert Meter(Clock(), tmp_path / "own", tmp_path).read() == Usage(seconds, None, memory)


@pytest.mark.parametrize("own", ["", "nonsense\n", f"0::{UNIT}\n"])
def test_usage_is_unknown_without_the_kernel_s_counters(tmp_path: Path, own: str) -> None:
    lay(tmp_path, own, {f"{UNIT}/cpu.stat": "nothing\n", f"{UNIT}/{CURRENT}": "max\n"})
    assert Meter(Clock(), tmp_path / "own", tmp_path).read() is None
    assert Meter(Clock(), tmp_path / "gone", tmp_path).read() is None


def test_the_processors_that_were_busy_between_two_readings(tmp_path: Path) -> None:
    clock = Clock()
    meter, seen = Meter(clock, tmp_path / "own", tmp_path), []
    for microseconds in (1_000_000, 8_500_000, 8_500_000, 100, 5_000_100):
        lay(tmp_path, f"0::{UNIT}\n", {f"{UNIT}/cpu.stat": f"usage_usec {microseconds}\n"})
        found = meter.read()
        assert found is not None
        seen.append(found.cpus)
        clock.pass_(5.0)
    assert seen == [None, 1.5, 0.0, 0.0, 1.0], "a unit that was started anew counts from nothing"


def test_a_trainer_in_a_unit_of_its_own_counts_and_its_time_stays_when_it_has_ended(tmp_path: Path) -> None:
    meter, seen = Meter(Clock(), tmp_path / "own", tmp_path), []
    trainer = "/system.slice/scaletier-trainer.service"
    lay(tmp_path, f"0::{UNIT}\n", V2 | V2_STAT)
    for microseconds in (1_000_000, 3_000_000, None, 500_000):
        if microseconds is None:
            shutil.rmtree(f"{tmp_path}{trainer}")
        else:
            stat = {f"{trainer}/cpu.stat": f"usage_usec {microseconds}\n", f"{trainer}/memory.stat": "file 0\nshmem 0\n"}
            lay(tmp_path, f"0::{UNIT}\n", stat | {f"{trainer}/{CURRENT}": "50\n"})
        found = meter.read()
        assert found is not None
        seen.append((found.cpuSeconds, found.memoryBytes))
    assert seen == [(3.5, 400), (5.5, 400), (5.5, 350), (6.0, 400)]


def test_usage_is_read_after_a_heartbeat_and_sent_with_the_next(tmp_path: Path) -> None:
    ledger = Ledger(FolderBucket(tmp_path))
    ledger.create_job(JobRecord("job01", state=JobState.PREPARING, hosts=PLAN.replicas))
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job01", PLAN.replicas)))
    order: list[str] = []

    def read() -> Usage:
        order.append("usage")
        return Usage(float(len(order)), None, 10)

    replica = Replica(tmp_path, probes=HostProbes(usage=read))
    replica.store.before = lambda method, name: order.append("heartbeat") if "replicas/" in str(name) else None
    replica.rounds()
    assert order[0] == "heartbeat", "it waits for nothing"
    assert "usage" in order
    assert replica.written.usage is None
    order.clear()
    replica.rounds(9)
    assert replica.written.usage is not None
    assert order.count("usage") == 4, "each half of a heartbeat's 4 s, not at each round"


def test_a_record_of_an_older_version_has_none_and_a_wrong_one_is_named() -> None:
    assert ReplicaRecord.from_dict({"name": "ps-0"}).usage is None
    told = ReplicaRecord("ps-0", usage=Usage(1.5, 0.25, 10))
    assert ReplicaRecord.from_json(told.to_json()) == told
    with pytest.raises(RecordError, match=r"usage.memoryBytes must be a whole number, not 1.5"):
        ReplicaRecord.from_dict({"name": "ps-0", "usage": {"memoryBytes": 1.5}})


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/unit\n", "unit/memory.events", "low 0\noom 7\noom_kill 3\noom_group_kill 9\n"),
        ("9:name=systemd:/unit\n4:memory:/unit\n0::/unit\n", "memory/unit/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_are_counted_where_the_unit_is(tmp_path: Path, own: str, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(own)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 3


@pytest.mark.parametrize("own", ["1:cpu:/a\n", "0::/gone\n", "0::/empty\n", ""])
def test_nothing_is_counted_where_the_kernel_does_not_tell(tmp_path: Path, own: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "memory.events").write_text("")
    (tmp_path / "cgroup").write_text(own)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    assert oom_kills(tmp_path / "nothing", tmp_path) == 0


def test_kills_before_a_trainer_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 2
    monkeypatch.setattr(cgroup, "oom_kills", lambda: kills)
    started = trainer.Trainer(ProcessRun("job01", ["true"], tmp_path, {}), Log(tmp_path, "job01", "master-0"))
    assert wait_for(started.poll, "its end") == Exit(0, False, cgroup.memory_limit())
    started = trainer.Trainer(ProcessRun("job01", ["true"], tmp_path, {}), Log(tmp_path, "job01", "master-0"))
    kills = 3
    assert wait_for(started.poll, "its end").out_of_memory


@pytest.mark.parametrize(
    ("own", "folder", "file"),
    [("0::/slice/unit\n", "slice", "memory.events"), ("4:memory:/slice/unit\n", "memory/slice", "memory.oom_control")],
)
def test_all_that_the_kernel_counts_here_and_one_above(tmp_path: Path, own: str, folder: str, file: str) -> None:
    (tmp_path / folder / "unit").mkdir(parents=True)
    (tmp_path / folder / "unit" / file).write_text("oom 7\noom_kill 3\n")
    (tmp_path / folder / file).write_text("oom_kill 4\n")
    (tmp_path / "cgroup").write_text(own)
    above = f"/{folder}"
    assert memory_events(tmp_path / "cgroup", tmp_path) == {f"{above}/unit": {"oom": 7, "oom_kill": 3}, above: {"oom_kill": 4}}
    assert memory_events(tmp_path / "gone", tmp_path) == {}
