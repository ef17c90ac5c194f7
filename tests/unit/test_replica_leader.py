"""The leader: reads last what it may write, trusts no old heartbeat, and stays for those that still end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from replica.bucket import Directory
from replica.leader import Leader
from replica.ledger import Ledger
from replica.record import JobRecord, JobState, Plan, ReplicaRecord, now

PLAN = Plan("job01", "master-0", ["master-0", "worker-0", "ps-0"], "trainer.task", [], "/bucket", "/package")


def ledger(root: Path, replica: str = "master-0") -> Ledger:
    return Ledger(replace(PLAN, replica=replica), Directory(root, replica))


def running(name: str, **changes: str) -> ReplicaRecord:
    return replace(ReplicaRecord(name, state="RUNNING"), **changes)  # type: ignore[arg-type]


def test_who_leads_reads_all_and_who_does_not_reads_little(tmp_path: Path) -> None:
    for name in PLAN.replicas:
        ledger(tmp_path).write_replica(running(name))
    assert set(ledger(tmp_path).others() or ()) == {"worker-0", "ps-0"}
    assert ledger(tmp_path, "worker-0").others() is None
    ledger(tmp_path).write_replica(running("master-0", heartbeatTime="2026-01-31T12:00:00.000Z"))
    assert set(ledger(tmp_path, "worker-0").others() or ()) == {"master-0", "ps-0"}
    assert ledger(tmp_path, "ps-0").others() is None


def test_what_a_power_cut_left_of_a_record_is_none(tmp_path: Path) -> None:
    ledger(tmp_path).write_replica(running("worker-0"))
    (tmp_path / "jobs/job01/replicas/ps-0.json").write_bytes(b"")
    assert set(ledger(tmp_path).others() or ()) == {"worker-0"}


def test_a_job_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"there is no jobs/job01/job\.json"):
        ledger(tmp_path).job()
    for text in ("", '{"jobId": "job01", "state": "LOST"}'):
        (tmp_path / "jobs/job01").mkdir(parents=True, exist_ok=True)
        (tmp_path / "jobs/job01/job.json").write_text(text)
        with pytest.raises(ValueError, match=r"Expecting|LOST"):
            ledger(tmp_path).job()


def test_after_a_long_sleep_old_heartbeats_count_from_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leads, job = Leader(PLAN, ledger(tmp_path)), JobRecord("job01", state=JobState.RUNNING)
    old = {name: running(name) for name in PLAN.replicas} | {"ps-0": running("ps-0", heartbeatTime="2026-01-31T12:00:00.000Z")}
    assert leads.act(job, old) == job
    leads._watching_since = "2026-01-31T12:00:00.000Z"  # as if it had been watching all the time
    slept = time.time() + PLAN.lostAfterSeconds + 1
    monkeypatch.setattr(time, "time", lambda: slept)
    assert leads.act(job, old) == job
    leads._watching_since = "2026-01-31T12:00:00.000Z"
    assert leads.act(job, old).state == "FAILED"


def test_the_leader_stays_until_the_others_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leads, job = Leader(PLAN, ledger(tmp_path)), JobRecord("job01", state=JobState.RUNNING)
    done = {"master-0": ReplicaRecord("master-0", state="EXITED", exitCode=0, endTime=now())}
    ended = leads.act(job, {name: running(name) for name in PLAN.replicas} | done)
    assert (ended.state, leads.settled) == ("SUCCEEDED", False)
    others = {name: ReplicaRecord(name, state="EXITED", exitCode=143) for name in ("worker-0", "ps-0")}
    after = leads.act(ended, done | others)
    assert leads.settled
    assert [r["exitCode"] for r in after.replicas] == [0, 143, 143]
    assert ledger(tmp_path).job() == after
    late = Leader(PLAN, ledger(tmp_path))
    late.act(ended, {name: running(name) for name in PLAN.replicas} | done)
    clock = time.monotonic() + PLAN.stopSeconds + 2 * PLAN.heartbeatSeconds + 1
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    late.act(ended, {name: running(name) for name in PLAN.replicas} | done)
    assert late.settled
