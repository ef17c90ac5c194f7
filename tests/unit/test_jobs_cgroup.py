"""A trainer's resource usage and out-of-memory kills from the kernel's files, and when they are measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from shared_fakes import Clock
from test_agent_reporter import PLAN, Replica
from waiting import wait_for

from hosts.agent import trainer
from hosts.agent.log import Log
from hosts.agent.process import ProgramSpec
from hosts.agent.replica_rules import Exit
from hosts.agent.reporter import HostFunctions
from jobs import cgroup
from jobs.cgroup import Meter, memory_events, memory_limit, oom_kills
from jobs.ledger import Ledger
from jobs.queue import QueueEntry
from jobs.records import JobRecord, Usage
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


def write_cgroup_files(root: Path, cgroup: str, files: dict[str, str]) -> None:
    (root / "own").write_text(cgroup)
    for name, text in files.items():
        path = Path(f"{root}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "seconds", "memory"),
    [
        (f"0::{UNIT}\n", V2 | V2_STAT, 2.5, 350),
        (HYBRID, V1, 2.5, 350),
        (HYBRID, OLD, 2.5, None),
        (f"0::{UNIT}\n", V2, 2.5, None),
        (f"0::{UNIT}\n", V2_STAT | {f"{UNIT}/{CURRENT}": "1000\n"}, None, 350),
        (f"0::{UNIT}\n", V2_STAT | {f"{UNIT}/{CURRENT}": "100\n"}, None, 0),
    ],
)
def test_usage_is_read_from_the_kernel(tmp_path: Path, cgroup: str, files: dict[str, str], seconds: float, memory: int) -> None:
    write_cgroup_files(tmp_path, cgroup, files)
    assert Meter(Clock(), tmp_path / "own", tmp_path).read() == Usage(seconds, None, memory)


@pytest.mark.parametrize("cgroup", ["", "nonsense\n", f"0::{UNIT}\n"])
def test_usage_is_unknown_without_the_kernel_s_counters(tmp_path: Path, cgroup: str) -> None:
    write_cgroup_files(tmp_path, cgroup, {f"{UNIT}/cpu.stat": "nothing\n", f"{UNIT}/{CURRENT}": "max\n"})
    assert Meter(Clock(), tmp_path / "own", tmp_path).read() is None
    assert Meter(Clock(), tmp_path / "gone", tmp_path).read() is None


def test_cpus_are_the_cpu_time_between_two_reads(tmp_path: Path) -> None:
    clock = Clock()
    meter, cpus = Meter(clock, tmp_path / "own", tmp_path), []
    for microseconds in (1_000_000, 8_500_000, 8_500_000, 100, 5_000_100):
        write_cgroup_files(tmp_path, f"0::{UNIT}\n", {f"{UNIT}/cpu.stat": f"usage_usec {microseconds}\n"})
        usage = meter.read()
        cpus.append(usage.cpus)
        clock.sleep(5.0)
    assert cpus == [None, 1.5, 0.0, 0.0, 1.0], "a restarted unit counts from zero"


def test_the_trainer_s_unit_counts_and_its_cpu_time_stays_after_its_end(tmp_path: Path) -> None:
    meter, usages = Meter(Clock(), tmp_path / "own", tmp_path), []
    trainer = "/system.slice/scaletier-trainer.service"
    write_cgroup_files(tmp_path, f"0::{UNIT}\n", V2 | V2_STAT)
    for microseconds in (1_000_000, 3_000_000, None, 500_000):
        if microseconds is None:
            shutil.rmtree(f"{tmp_path}{trainer}")
        else:
            stat = {f"{trainer}/cpu.stat": f"usage_usec {microseconds}\n", f"{trainer}/memory.stat": "file 0\nshmem 0\n"}
            write_cgroup_files(tmp_path, f"0::{UNIT}\n", stat | {f"{trainer}/{CURRENT}": "50\n"})
        usage = meter.read()
        usages.append((usage.cpuSeconds, usage.memoryBytes))
    assert usages == [(3.5, 400), (5.5, 400), (5.5, 350), (6.0, 400)]


def test_usage_is_read_after_a_heartbeat_and_sent_with_the_next(ledger: Ledger, tmp_path: Path) -> None:
    ledger.create_job(JobRecord("job01", state=JobState.PREPARING, hosts=PLAN.replicas))
    ledger.change_queue(lambda queue: queue.added(QueueEntry("job01", PLAN.replicas)))
    order: list[str] = []

    def read() -> Usage:
        order.append("usage")
        return Usage(float(len(order)), None, 10)

    replica = Replica(tmp_path, host_functions=HostFunctions(usage=read))
    replica.store.before = lambda method, name: order.append("heartbeat") if "replicas/" in str(name) else None
    replica.cycles()
    assert order[0] == "heartbeat", "the heartbeat does not wait"
    assert "usage" in order
    assert replica.written.usage is None
    order.clear()
    replica.cycles(9)
    assert replica.written.usage is not None
    assert order.count("usage") == 4, "each half of a heartbeat's 4 s, not at each round"


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/unit\n", "unit/memory.events", "low 0\noom 7\noom_kill 3\noom_group_kill 9\n"),
        ("9:name=systemd:/unit\n4:memory:/unit\n0::/unit\n", "memory/unit/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_oom_kills_are_read_from_the_unit_s_cgroup(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(cgroup)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 3


@pytest.mark.parametrize("cgroup", ["1:cpu:/a\n", "0::/gone\n", "0::/empty\n", ""])
def test_oom_kills_are_zero_without_the_kernel_s_counters(tmp_path: Path, cgroup: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "memory.events").write_text("")
    (tmp_path / "cgroup").write_text(cgroup)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    assert oom_kills(tmp_path / "nothing", tmp_path) == 0


def test_kills_before_a_trainer_started_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 2
    monkeypatch.setattr(cgroup, "oom_kills", lambda: kills)
    started = trainer.Trainer(ProgramSpec("job01", ["true"], tmp_path, {}), Log(tmp_path, "job01", "master-0"))
    assert wait_for(started.poll, "its end") == Exit(0, False, cgroup.memory_limit())
    started = trainer.Trainer(ProgramSpec("job01", ["true"], tmp_path, {}), Log(tmp_path, "job01", "master-0"))
    kills = 3
    assert wait_for(started.poll, "its end").out_of_memory


@pytest.mark.parametrize(
    ("cgroup", "folder", "file"),
    [("0::/slice/unit\n", "slice", "memory.events"), ("4:memory:/slice/unit\n", "memory/slice", "memory.oom_control")],
)
def test_memory_events_are_those_of_the_unit_and_its_parent(tmp_path: Path, cgroup: str, folder: str, file: str) -> None:
    (tmp_path / folder / "unit").mkdir(parents=True)
    (tmp_path / folder / "unit" / file).write_text("oom 7\noom_kill 3\n")
    (tmp_path / folder / file).write_text("oom_kill 4\n")
    (tmp_path / "cgroup").write_text(cgroup)
    parent = f"/{folder}"
    assert memory_events(tmp_path / "cgroup", tmp_path) == {
        f"{parent}/unit": {"oom": 7, "oom_kill": 3},
        parent: {"oom_kill": 4},
    }
    assert memory_events(tmp_path / "gone", tmp_path) == {}


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "limit"),
    [
        ("0::/unit\n", "unit/memory.max", "4096\n", 4096),
        ("0::/unit\n", "unit/memory.max", "max\n", None),
        ("0::/unit\n", "other/memory.max", "4096\n", None),
        ("4:memory:/unit\n", "memory/unit/memory.limit_in_bytes", "4096\n", 4096),
        ("4:memory:/unit\n", "memory/unit/memory.limit_in_bytes", f"{2**60 - 1}\n", 2**60 - 1),
        ("4:memory:/unit\n", "memory/unit/memory.limit_in_bytes", f"{2**60}\n", None),
    ],
)
def test_the_memory_limit_is_read_from_the_unit_s_cgroup(
    tmp_path: Path, cgroup: str, file: str, text: str, limit: int | None
) -> None:
    write_cgroup_files(tmp_path, cgroup, {f"/{file}": text})
    assert memory_limit(tmp_path / "own", tmp_path) == limit
    assert memory_limit(tmp_path / "gone", tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 1.5), ("900000 100000", 4), ("1 100000", 1e-5), ("max 100000", 4), ("", 4)]
)
def test_cpus_are_limited_by_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, quota: str, expected: float
) -> None:
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", {0: {4, 5, 6, 7}}.__getitem__)
    (tmp_path / "cpu").mkdir()
    if version == 2:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    elif quota:
        for name, value in zip(("quota", "period"), quota.replace("max", "-1").split(), strict=True):
            (tmp_path / f"cpu/cpu.cfs_{name}_us").write_text(f"{value}\n")
    assert cgroup.available_cpus(tmp_path) == expected
    assert cgroup.available_cpus(tmp_path / "none") == 4
