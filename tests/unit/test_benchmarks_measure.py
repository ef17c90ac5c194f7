"""The measurements behind the figures, without timing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.job_events import parse_log
from benchmarks.jobs import first_train_line, latencies, resident
from benchmarks.launch import hosts_of, launch_command, login_command
from benchmarks.measure import Lines, MeasureError, first_byte, high_water, must, peak_memory, percentile, run, running
from benchmarks.provision import cgroup_folder, used_memory
from benchmarks.push import by_ansible, by_pyinfra, by_ssh
from benchmarks.push_once import vary
from benchmarks.registry import in_turn
from benchmarks.stack import job_id

from infra.inventory import Inventory
from infra.lxd import image
from infra.scale_tiers import ScaleTier
from ops.cluster.host_files import RemoteFile

FOLDER = Path("/")
ENV = {"PATH": os.environ["PATH"]}


def test_ours_and_the_peer_alternate() -> None:
    calls: list[str] = []
    values = iter([3.0, 1.0, 2.0])

    def ours() -> float:
        calls.append("A")
        return next(values)

    def peer() -> float:
        calls.append("B")
        return 5.0

    figure = in_turn(3, ours, peer)
    assert (figure.value, figure.peer, figure.runs) == (2.0, 5.0, (3.0, 1.0, 2.0))
    assert "".join(calls) == "ABABAB"


@pytest.mark.parametrize(("percent", "expected"), [(95, 95.0), (50, 50.0), (100, 100.0), (0, 1.0)])
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_a_percentile_needs_values() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 95)


def test_a_failed_command_is_one_error_line() -> None:
    with pytest.raises(MeasureError, match=r"^it ended with 3: so it is$"):
        must(run(["sh", "-c", "echo so it; echo is; exit 3"], ENV, FOLDER), "it")


def test_a_command_beyond_its_time_limit_is_ended() -> None:
    with pytest.raises(MeasureError, match="did not end within 0 s"):
        run(["sleep", "60"], ENV, FOLDER, limit=0.05)


def test_leaving_the_context_ends_a_command() -> None:
    with running(["sleep", "60"], ENV, FOLDER) as process:
        assert process.poll() is None
    assert process.returncode is not None


def test_lines_end_with_their_command() -> None:
    with running(["printf", "a\nb\n"], ENV, FOLDER) as process:
        assert [line for _, line in Lines(process).until(float("1e8"))] == ["a", "b"]


def test_a_command_without_output_has_no_first_byte() -> None:
    assert first_byte(["echo", "x"], ENV, FOLDER) > 0
    with pytest.raises(MeasureError, match="printed nothing"):
        first_byte(["true"], ENV, FOLDER)


def test_the_peak_memory_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(status: str) -> float:
        (tmp_path / "read").touch()
        return high_water(status)

    monkeypatch.setattr("benchmarks.measure.high_water", read)
    wait = 'until [ -e "$0" ]; do sleep 0.01; done'
    assert 0 < peak_memory(["sh", "-c", wait, str(tmp_path / "read")], ENV, FOLDER) < 20


def test_a_benchmark_s_job_id_is_valid() -> None:
    assert job_id("first-step").startswith("bench_first_step_")


def test_the_first_step_is_the_earliest_of_any_replica() -> None:
    lines = [
        {"time": "1970-01-01T00:00:09.000Z", "message": "Eval, step 1"},
        {"time": "1970-01-01T00:00:12.500Z", "message": "Train [worker/1], step 9: loss"},
        {"time": "1970-01-01T00:00:11.250Z", "message": "Train [master/0], step 3: loss"},
    ]
    log = parse_log("\n".join(json.dumps({**line, "replica": "master-0"}) for line in lines))
    assert first_train_line(log) == 11.25
    with pytest.raises(MeasureError):
        first_train_line(log[:1])


def test_latency_is_the_delay_of_lines_after_the_first_one() -> None:
    lines = [(10.0, "x  Train [ps/0], step 1: at 3.000"), (10.2, "y"), (11.0, "x  Train [ps/0], step 2: at 10.750")]
    assert latencies(lines) == [0.25]
    with pytest.raises(MeasureError):
        latencies(lines[1:2])


def test_the_memory_of_a_replica_is_read_in_mb() -> None:
    assert resident("Name:\tpython\nVmRSS:\t   1000 kB\n") == 1.024
    with pytest.raises(MeasureError, match="no agent runs"):
        resident("Name:\tsystemd\nVmRSS:\t   1000 kB\n")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("0::/lxc.payload.p_a/init.scope\n", "/r/lxc.payload.p_a"),
        ("9:memory:/lxc.payload.p_a/init.scope\n0::/lxc.payload.p_a\n", "/r/memory/lxc.payload.p_a"),
        ("0::/system.slice/lxc.payload.p_a/x/y\n", "/r/system.slice/lxc.payload.p_a"),
    ],
)
def test_a_host_s_cgroup_is_found_in_both_cgroup_versions(table: str, expected: str) -> None:
    assert cgroup_folder(table, Path("/r")) == Path(expected)


def test_a_process_outside_hosts_has_no_host_cgroup() -> None:
    with pytest.raises(ValueError, match="no cgroup of an instance"):
        cgroup_folder("0::/init.scope\n", Path("/r"))


def test_memory_is_counted_without_the_page_cache_of_files(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("file 60\nshmem 10\ntotal_cache 50\ntotal_shmem 5\n")
    (tmp_path / "memory.usage_in_bytes").write_text("100\n")
    assert used_memory(tmp_path) == 55
    (tmp_path / "memory.current").write_text("100\n")
    assert used_memory(tmp_path) == 50


def test_the_peer_launches_the_same_hosts_as_pulumi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "require", lambda: "scaletier-image")
    hosts = hosts_of(ScaleTier.STANDARD_1, "10.1.2.0/24", "ssh-ed25519 AAAA")
    assert [host["name"] for host in hosts] == [
        "ps-0",
        "ps-1",
        "ps-2",
        "master-0",
        "worker-0",
        "worker-1",
        "worker-2",
        "worker-3",
    ]
    command, stdin = launch_command(hosts[3], "lxc")
    assert command == [
        "lxc",
        "launch",
        "scaletier-image",
        "master-0",
        "--project",
        hosts[3]["project"],
        "--no-profiles",
        "--quiet",
    ]
    request = json.loads(stdin)
    assert request["config"]["raw.lxc"].startswith("lxc.net.0.ipv4.address = 10.1.2.2/24")
    assert request["config"]["user.scaletier.authorized-key"] == "ssh-ed25519 AAAA"
    assert sorted(request["devices"]) == ["bucket", "eth0", "root", "runtime", "runtimes"]
    assert list(login_command(hosts[3], Path("/k")))[-2:] == ["scaletier@10.1.2.2", "true"]


def test_every_push_has_a_different_content() -> None:
    unit = RemoteFile("/etc/systemd/system/scaletier.service.d/host.conf", "[Service]\n")
    assert vary(unit).content.startswith("[Service]\n# ")
    assert vary(unit) != vary(unit)
    other = RemoteFile("/etc/scaletier/host.json", "{}")
    assert vary(other) is other


def test_the_peers_of_a_push_reach_every_host(inventory: Inventory, tmp_path: Path) -> None:
    script = by_ssh(inventory, tmp_path)[0][2]
    by_pyinfra(inventory, tmp_path)
    env = by_ansible(inventory, tmp_path)[1]
    for name in inventory.names:
        assert f"{tmp_path}/{name}.tar.gz & all+=($!)" in script
        assert f"('{name}'," in (tmp_path / "inventory.py").read_text()
        assert name in json.loads((tmp_path / "inventory.json").read_text())["all"]["hosts"]
    assert env["ANSIBLE_PIPELINING"] == "1"
