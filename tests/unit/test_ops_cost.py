"""Check the cost of hosts and jobs: sums by role, unknown prices, and a stack without prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import inventory_json, put_job

from infra.inventory import Inventory
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.lease import ChangeTimer
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.times import seconds_between
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.show import cost
from ops.submit.claim import Canceller

CREATED, NOW = "2026-01-31T12:00:00.000Z", "2026-01-31T14:30:00.000Z"


@pytest.fixture
def priced(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """Return hosts at 0.25 an hour, created 2.5 hours ago; worker-1 an hour later, in another time zone."""
    monkeypatch.setattr(cost, "now", lambda: NOW)
    hosts = [replace(host, hourly_cost=0.25, create_time=CREATED) for host in inventory.hosts]
    (tmp_path / "bucket").mkdir()
    hosts[3] = replace(hosts[3], create_time="2026-01-31T05:00:00.000-08:00")
    return replace(inventory, hosts=tuple(hosts), operator_bucket=str(tmp_path / "bucket"))


@pytest.fixture
def ledger(priced: Inventory) -> Ledger:
    """Write two jobs: the older one has ended and cost 1.25, the newer one is running."""
    ledger = Ledger(FolderBucket(Path(priced.operator_bucket)))
    done = JobRecord("job01", state=JobState.RUNNING, createTime=CREATED, startTime=CREATED, hourlyCost=priced.hourly_cost)
    put_job(ledger, done.to(JobState.SUCCEEDED, endTime="2026-01-31T13:00:00.000Z"))
    put_job(ledger, JobRecord("job02", state=JobState.RUNNING, createTime=NOW, startTime=NOW))
    return ledger


def test_a_share_is_hours_times_price(priced: Inventory) -> None:
    assert cost.cost_of(priced.hosts[:1], NOW) == cost.CostShare(1, 0.25, 2.5, 0.625)
    assert cost.cost_of(priced.hosts[2:4], NOW) == cost.CostShare(2, 0.5, 2.0, 1.0)
    assert cost.cost_of(priced.hosts, NOW) == cost.CostShare(5, 1.25, 2.3, 2.875)
    assert cost.cost_of(priced.hosts[:1], "2026-01-31T11:00:00Z").accruedCost == 0  # the local clock is slow


def test_a_sum_needs_prices_and_times_of_all_hosts(priced: Inventory) -> None:
    ps, master, *_ = priced.hosts
    assert cost.cost_of([master, replace(ps, create_time=None)], NOW) == cost.CostShare(2, 0.5, None, None)
    assert cost.cost_of([master, replace(ps, hourly_cost=None)], NOW) == cost.CostShare(2, None, 2.5, None)
    assert priced.hourly_cost == 1.25
    assert replace(priced, hosts=(master, replace(ps, hourly_cost=None))).hourly_cost is None


def test_an_inventory_without_creation_times_is_read(inventory: Inventory, tmp_path: Path) -> None:
    hosts = json.loads(inventory_json())["hosts"]
    old = [{key: value for key, value in host.items() if key != "createTime"} for host in hosts]
    assert parse(inventory_json(hosts=old), tmp_path) == inventory
    new = [host | {"createTime": CREATED} for host in hosts]
    assert {host.create_time for host in parse(inventory_json(hosts=new), tmp_path).hosts} == {CREATED}


def test_the_table(priced: Inventory, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.cost(ClusterClient(priced), as_json=False) == 0
    captured = capsys.readouterr()
    roles, jobs = captured.out.split("\n\n")
    assert [line.split() for line in roles.splitlines()[1:]] == [
        ["ps", "1", "0.2500", "2.50", "0.6250"],
        ["master", "1", "0.2500", "2.50", "0.6250"],
        ["worker", "2", "0.5000", "2.00", "1.0000"],
        ["evaluator", "1", "0.2500", "2.50", "0.6250"],
        ["all", "5", "1.2500", "2.30", "2.8750"],
    ]
    assert [(line.split()[0], line.split()[-1]) for line in jobs.splitlines()] == [
        ("JOB", "USD"),
        ("job02", "-"),
        ("job01", "1.2500"),
    ]
    assert captured.err.startswith("not counted: hosts that are gone, the network, traffic, the bucket; ")


def test_the_json_output(priced: Inventory, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.cost(ClusterClient(priced), as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    keys = ("stack", "hosts", "hourlyCost", "hoursUp", "accruedCost")
    assert [output[key] for key in keys] == ["test", 5, 1.25, 2.3, 2.875]
    assert output["roles"][2] == {"role": "worker", "hosts": 2, "hourlyCost": 0.5, "hoursUp": 2.0, "accruedCost": 1.0}
    assert [(job["jobId"], job["cost"]) for job in output["jobs"]] == [("job02", None), ("job01", 1.25)]


@pytest.mark.parametrize("as_json", [False, True])
def test_unreadable_records_are_noted(
    priced: Inventory, ledger: Ledger, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    (Path(priced.operator_bucket) / "jobs/job02/job.json").write_text("{")
    assert cost.cost(ClusterClient(priced), as_json) == 0
    captured = capsys.readouterr()
    assert "job01" in captured.out
    assert "job02" not in captured.out
    assert captured.err.startswith("not shown: job02: ")


def test_a_failing_bucket_leaves_the_cost_of_hosts(
    priced: Inventory, ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BucketError("no answer")

    monkeypatch.setattr(Ledger, "jobs", fail)
    assert cost.cost(ClusterClient(priced), as_json=True) == 0
    captured = capsys.readouterr()
    output = json.loads(captured.out)
    assert (output["accruedCost"], output["jobs"]) == (2.875, None)
    assert captured.err == "the cost of jobs cannot be read: no answer\n"
    assert cost.cost(ClusterClient(priced), as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "5", "1.2500", "2.30", "2.8750"]


def test_hosts_without_a_creation_time_have_no_accrued_cost(priced: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tuple(replace(host, create_time=None) for host in priced.hosts)
    assert cost.cost(ClusterClient(replace(priced, hosts=hosts)), as_json=False) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].split() == ["all", "5", "1.2500", "-", "-"]
    assert "run pulumi up" in captured.err


def test_a_stack_without_prices_prints_one_line(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    """Check also that its bucket is not opened, as none of its hosts exists."""
    assert cost.cost(ClusterClient(inventory), as_json=False) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "not every host of stack test has a price: local hosts have none" in captured.err
    assert cost.cost(ClusterClient(inventory), as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert [output[key] for key in ("hourlyCost", "hoursUp", "accruedCost", "jobs")] == [None] * 4
    assert output["roles"][0] == {"role": "ps", "hosts": 1, "hourlyCost": None, "hoursUp": None, "accruedCost": None}


def test_a_job_ended_by_the_canceller_has_a_cost(ledger: Ledger) -> None:
    put_job(ledger, JobRecord("job03", state=JobState.RUNNING, createTime=CREATED, startTime=CREATED, hourlyCost=1.25))
    ended = Canceller(ledger, ChangeTimer(lambda: 0.0), "ann", "job03", b"{}", seconds=0.0).step()
    assert ended is not None
    assert ended.cost == pytest.approx(1.25 * seconds_between(CREATED, ended.endTime) / 3600, abs=1e-4)
    stored = ledger.job("job03")
    assert stored is not None
    assert stored.record == ended
