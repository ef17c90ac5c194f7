"""The state of jobs on real hosts: the queue, wrong clocks, lost and returning hosts, killed commands."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stacks import ENDLESS, TINY, Stack
from waiting import limit

from infra.lxd.api import client

# Shift the clock of a Python process.
_SKEW = """
import datetime, time
real, offset = time.time, {seconds}
time.time = lambda: real() + offset
class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=offset)
datetime.datetime = Skewed
"""
_DROP_IN = "/etc/systemd/system/scaletier.service.d"


def _skew(cluster: Stack, host: str, seconds: float) -> None:
    """Shift the clock of processes in a host's unit."""
    text = _SKEW.format(seconds=seconds)
    unit = "[Service]\\nEnvironment=PYTHONPATH=/opt/skew\\n"
    cluster.must_ssh(
        host,
        f"sudo mkdir -p /opt/skew {_DROP_IN} && sudo tee /opt/skew/sitecustomize.py >/dev/null <<'END'\n{text}\nEND\n"
        f"printf '{unit}' | sudo tee {_DROP_IN}/skew.conf >/dev/null && sudo systemctl daemon-reload",
    )


@pytest.fixture
def skewed(cluster: Stack) -> Iterator[Stack]:
    """Set the master's clock ten minutes ahead and a worker's ten behind."""
    _skew(cluster, "master-0", 600)
    _skew(cluster, "worker-1", -600)
    try:
        yield cluster
    finally:
        for host in ("master-0", "worker-0", "worker-1"):
            cluster.ssh(host, f"sudo rm -rf {_DROP_IN} /opt/skew; sudo systemctl daemon-reload")


def find_replica(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(replica) for replica in record["replicas"] if replica["name"] == name)


def test_clocks_off_by_ten_minutes_change_nothing(skewed: Stack) -> None:
    skewed.must("train", "--job", "skewed", *TINY, *ENDLESS)
    skewed.wait("skewed", "RUNNING")
    _skew(skewed, "worker-0", 600)
    skewed.must_ssh("worker-0", "sudo systemctl restart scaletier")  # its clock jumps in mid-job
    skewed.wait_until("skewed", lambda record: find_replica(record, "worker-0")["restarts"] == 1, "with worker-0 restarted")
    skewed.wait_until("skewed", lambda record: find_replica(record, "worker-0")["state"] == "RUNNING", "with worker-0 RUNNING")
    skewed.finish_job("skewed")
    record = skewed.wait_succeeded("skewed")
    assert (record["attempt"], record["lostReplicas"]) == (0, [])
    restarts = {replica["name"]: replica["restarts"] for replica in record["replicas"]}
    assert restarts == {"ps-0": 0, "ps-1": 0, "master-0": 0, "worker-0": 1, "worker-1": 0, "evaluator-0": 0}


def test_a_job_waits_for_a_temporarily_stopped_host(cluster: Stack, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    lost = int(limit(10))  # far more than a busy machine delays a heartbeat
    config.write_text(f"trainingInput:\n  scheduling:\n    lostAfterSeconds: {lost}\n    heartbeatSeconds: 2\n")
    cluster.must("train", "--job", "host_away", *TINY, "--config", str(config), *ENDLESS, "--rate", "1")
    cluster.wait("host_away", "RUNNING")
    host = client(cluster.names.project).instances.get("worker-1")
    host.stop(force=True, wait=True)
    try:
        record = cluster.wait_until("host_away", lambda record: "worker-1" in record["lostReplicas"], "with worker-1 lost")
        assert record["state"] == "RUNNING"
        assert find_replica(record, "worker-1")["state"] == "LOST"
        assert "worker-1 is lost" in cluster.fab("describe", "host_away").out
    finally:
        host.start(wait=True)
    cluster.wait_until(
        "host_away",
        lambda record: any(event["seconds"] is not None for event in find_replica(record, "worker-1")["events"]),
        "with worker-1 training again",
    )
    cluster.finish_job("host_away")
    worker = find_replica(cluster.wait_succeeded("host_away"), "worker-1")
    assert worker["restarts"] == 1
    assert worker["events"][0]["cause"] == "the replica or its host was stopped"
    assert worker["events"][0]["seconds"] is not None


def test_queued_jobs_start_in_order_without_the_operators_machine(cluster: Stack) -> None:
    def submit(job: str, *flags: str) -> str:
        return cluster.must("train", "--job", job, *TINY, *flags, "--no-follow", "--", "--seconds", "2").out

    cluster.must("train", "--job", "queue0", *TINY, *ENDLESS)
    assert "queue1 is QUEUED behind queue0" in submit("queue1")
    submit("queue2", "--priority", "5")
    submit("queue3")
    refused = cluster.fab("train", "--job", "queue4", *TINY, "--no-queue", "--", "--seconds", "2")
    assert refused.code == 2
    assert "queue0" in refused.err
    assert cluster.fab("describe", "queue4").code == 2, "nothing was changed"
    assert cluster.describe("queue3")["state"] == "QUEUED"
    cluster.must("cancel", "queue3")
    follower = cluster.start("fab", "train", "--job", "queue5", *TINY, "--", "--seconds", "2")
    assert follower.stdout
    lines = iter(follower.stdout.readline, "")
    assert any("queue5 is QUEUED behind" in line for line in lines)
    cluster.finish_job("queue0")
    assert any("Final metrics" in line for line in [*lines])  # read all of it, or the follower could block on its output
    assert follower.wait(timeout=limit(600)) == 0
    records = {job: cluster.describe(job) for job in ("queue0", "queue1", "queue2", "queue5")}
    assert {record["state"] for record in records.values()} == {"SUCCEEDED"}
    assert sorted(records, key=lambda job: records[job]["startTime"]) == ["queue0", "queue2", "queue1", "queue5"]
    assert cluster.describe("queue3")["state"] == "CANCELLED"
    cluster.must("wait", "queue2")
    assert cluster.fab("wait", "queue3").code == 1


def test_a_killed_submission_blocks_no_other_job(cluster: Stack) -> None:
    chosen = random.Random(7)
    for number in range(6):
        process = cluster.start("fab", "train", "--job", f"cut{number // 2}", *TINY, "--", "--seconds", "1")
        time.sleep(chosen.uniform(0.3, 3.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=limit())
    cluster.must("train", "--job", "after_the_cuts", *TINY, "--", "--seconds", "1")
    states = {record["state"] for record in cluster.must_json("jobs", "--filter", "cut") if record["jobId"].startswith("cut")}
    assert states <= {"SUCCEEDED", "FAILED"}
