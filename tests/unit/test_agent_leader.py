"""The leader: when a replica takes the lease, what the leader counts and does, and when it may exit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_fakes import Clock

from hosts.agent.job_rules import View
from hosts.agent.leader import Leader
from hosts.agent.replica_rules import STABLE_SECONDS
from jobs.bucket import Conflict
from jobs.folder_bucket import FolderBucket
from jobs.host_power import HostStarter
from jobs.ledger import Ledger, Stored
from jobs.records import JobRecord, Plan, ReplicaRecord
from jobs.states import JobState, ReplicaState

NAMES = ["master-0", "worker-0", "ps-0"]
PLAN = Plan("job01", NAMES, "trainer.task", [], {}, leaseSeconds=10.0, heartbeatSeconds=1.0, stopSeconds=4.0)


class Bucket:
    """A submitted job, and the clock of a host."""

    def __init__(self, root: Path) -> None:
        self.clock, self.ledger = Clock(), Ledger(FolderBucket(root))
        self.wall = "2026-01-31T12:00:00.000Z"
        self.ledger.create_job(JobRecord("job01", state=JobState.RUNNING, startTime=self.wall))

    def leader(self, name: str, incarnation: str = "1", clock: Clock | None = None, plan: Plan = PLAN) -> Leader:
        return Leader(plan, name, incarnation, self.ledger, clock or self.clock, lambda: self.wall)

    def leading(self, name: str = "master-0", incarnation: str = "1", plan: Plan = PLAN) -> Leader:
        leader = self.leader(name, incarnation, plan=plan)
        leader.take(self.stored)
        return leader

    @property
    def stored(self) -> Stored[JobRecord]:
        stored = self.ledger.job("job01")
        assert stored is not None
        return stored

    @property
    def job(self) -> JobRecord:
        return self.stored.record


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def running_replicas(*names: str, beat: int = 0, **changes: object) -> dict[str, ReplicaRecord]:
    names = names or tuple(NAMES)
    return {name: ReplicaRecord(name, state=ReplicaState.RUNNING, heartbeatSeq=beat, **changes) for name in names}  # type: ignore[arg-type]


def seconds_until_free(bucket: Bucket, leader: Leader, limit: float = 40.0) -> float:
    """Return the seconds after which this leader may take the unchanged lease."""
    for tenths in range(int(limit * 10)):
        if leader.may_take(bucket.job):
            return tenths / 10
        bucket.clock.sleep(0.1)
    return limit


@pytest.mark.parametrize(("name", "after"), [("master-0", 0.0), ("worker-0", 1.0), ("ps-0", 2.0)])
def test_a_free_lease_is_taken_in_the_order_of_the_plan(bucket: Bucket, name: str, after: float) -> None:
    assert seconds_until_free(bucket, bucket.leader(name)) == pytest.approx(after, abs=0.11)


def test_all_replicas_after_the_fifth_wait_equally_long(bucket: Bucket) -> None:
    plan = replace(PLAN, replicas=[f"worker-{n}" for n in range(100)])
    assert seconds_until_free(bucket, bucket.leader("worker-99", plan=plan)) == pytest.approx(5.0, abs=0.11)


def test_a_held_lease_is_taken_only_when_its_holder_is_silent(bucket: Bucket) -> None:
    holder, other = bucket.leader("master-0"), bucket.leader("worker-0")
    holder.take(bucket.stored)
    assert bucket.job.lease.holder == "master-0/1"
    for _ in range(30):
        assert not other.may_take(bucket.job)
        bucket.clock.sleep(1.0)
        holder.act(bucket.stored, running_replicas(), False)  # it renews its lease
    bucket.clock.sleep(4.0)
    holder.act(bucket.stored, running_replicas(), False)
    assert seconds_until_free(bucket, other) == pytest.approx(11.0, abs=0.11)


def test_a_lease_is_renewed_at_most_three_times_in_its_period(bucket: Bucket) -> None:
    leader = bucket.leading()
    for _ in range(100):
        bucket.clock.sleep(0.1)
        leader.act(bucket.stored, running_replicas(), False)
    assert bucket.job.lease.heartbeatSeq == 2


def test_a_replica_takes_only_its_own_earlier_lease_at_once(bucket: Bucket) -> None:
    bucket.leader("worker-0", "1").take(bucket.stored)
    later = bucket.leader("worker-0", "2")
    assert not later.leads(bucket.job)
    assert later.may_take(bucket.job)
    bucket.ledger.change_job(bucket.stored, bucket.job.with_holder("fab 1", submitter=True))
    assert seconds_until_free(bucket, bucket.leader("master-0")) == 40.0
    bucket.ledger.change_job(bucket.stored, bucket.job.with_holder("ps-0/0"))
    assert seconds_until_free(bucket, bucket.leader("ps-0")) == 0.0


def test_a_replaced_leader_changes_nothing(bucket: Bucket) -> None:
    first, second = bucket.leader("master-0"), bucket.leader("worker-0")
    outdated = first.take(bucket.stored)
    bucket.clock.sleep(60.0)
    second.take(bucket.stored)
    after = bucket.stored
    assert (after.record.lease.holder, after.record.lease.epoch) == ("worker-0/1", 2)
    done = running_replicas() | {"master-0": ReplicaRecord("master-0", state=ReplicaState.EXITED, exitCode=0)}
    with pytest.raises(Conflict):
        first.act(outdated, done, False)
    with pytest.raises(Conflict):
        first.take(outdated)
    assert bucket.stored == after
    assert not first.leads(after.record)


@pytest.mark.parametrize("wall", ["2026-01-31T11:50:00.000Z", "2026-01-31T12:10:00.000Z", "2036-01-31T12:00:00.000Z"])
def test_a_wrong_wall_clock_changes_nothing(bucket: Bucket, wall: str) -> None:
    leader = bucket.leading()
    for beat in range(30):
        records = running_replicas(beat=beat, heartbeatTime=wall if beat % 2 else bucket.wall)
        bucket.wall = wall if beat % 3 else "2026-01-31T12:00:00.000Z"
        bucket.clock.sleep(1.0)
        leader.act(bucket.stored, records, False)
    assert (bucket.job.state, bucket.job.attempt, bucket.job.events) == ("RUNNING", 0, [])
    assert bucket.job.runSeconds == pytest.approx(30.0, abs=4.0)


def test_a_silent_replica_is_lost_by_the_leader_s_clock(bucket: Bucket) -> None:
    leader = bucket.leading(plan=replace(PLAN, lostAfterSeconds=20.0, maxWaitTime=10.0))
    leader.act(bucket.stored, running_replicas(), False)
    for beat in range(30):
        bucket.clock.sleep(1.0)
        leader.act(bucket.stored, running_replicas("master-0", "worker-0", beat=beat) | running_replicas("ps-0"), False)
    assert bucket.job.state == "RUNNING"
    bucket.clock.sleep(1.0)
    leader.act(bucket.stored, running_replicas("master-0", "worker-0", beat=99) | running_replicas("ps-0"), False)
    assert bucket.job.errorMessage == "The replica ps 0 is lost: no heartbeat for 30 s."


def test_silence_during_a_suspension_does_not_count(bucket: Bucket) -> None:
    leader = bucket.leading(plan=replace(PLAN, lostAfterSeconds=20.0, maxWaitTime=10.0))
    leader.act(bucket.stored, running_replicas(), False)
    bucket.clock.sleep(3600.0)
    leader.act(bucket.stored, running_replicas(), False)
    assert (bucket.job.state, bucket.job.lostReplicas) == ("RUNNING", [])
    assert bucket.job.runSeconds == 5.0


def test_the_run_time_continues_under_another_leader(bucket: Bucket) -> None:
    first, second = bucket.leader("master-0"), bucket.leader("worker-0")
    first.take(bucket.stored)
    for _ in range(21):
        first.act(bucket.stored, running_replicas(), False)
        bucket.clock.sleep(1.0)
    assert bucket.job.runSeconds == pytest.approx(20.0, abs=4.0)
    before = bucket.job.runSeconds
    second.take(bucket.stored)
    for _ in range(21):
        second.act(bucket.stored, running_replicas(), False)
        bucket.clock.sleep(1.0)
    assert bucket.job.runSeconds - before == pytest.approx(20.0, abs=4.0)


def test_a_good_attempt_restores_restarts_although_the_leader_changes(bucket: Bucket) -> None:
    plan = replace(PLAN, restartPolicy="all", maxRestarts=1)
    ended = {"state": ReplicaState.EXITED, "exitCode": 137, "signal": 9, "awaits_restart": True}
    for attempt in range(3):
        for incarnation in ("before", "after a reboot"):
            leader = bucket.leading(incarnation=incarnation, plan=plan)
            for beat in range(3):
                leader.act(bucket.stored, running_replicas(attempt=attempt, beat=beat), False)
                bucket.clock.sleep(4.0)
        assert bucket.job.attemptSeconds == 16.0
        assert bucket.job.runSeconds == attempt * (STABLE_SECONDS + 16.0) + 16.0
        good = replace(bucket.job, attemptSeconds=16.0 + STABLE_SECONDS, runSeconds=bucket.job.runSeconds + STABLE_SECONDS)
        bucket.ledger.change_job(bucket.stored, good)
        leader = bucket.leading(incarnation="after another", plan=plan)
        records = running_replicas(attempt=attempt)
        leader.act(bucket.stored, records | {"ps-0": replace(records["ps-0"], **ended)}, False)
        assert (bucket.job.state, bucket.job.attempt, bucket.job.restartsUsed) == ("RUNNING", attempt + 1, 1)
        assert bucket.job.attemptSeconds == 0.0


def test_kills_and_exits_are_timed_by_their_first_observation(bucket: Bucket) -> None:
    """An exit of a peer 20 s after a kill is attributed to it, one 40 s after is not."""
    for pause, state in ((20, "RUNNING"), (40, "FAILED")):
        leader = bucket.leading(incarnation=str(pause))
        killed = running_replicas() | running_replicas("ps-0", restarts=1, attempt=bucket.job.attempt)
        killed = {name: replace(record, attempt=bucket.job.attempt) for name, record in killed.items()}
        for _ in range(pause):
            killed = {name: replace(record, heartbeatSeq=record.heartbeatSeq + 1) for name, record in killed.items()}
            leader.act(bucket.stored, killed, False)
            bucket.clock.sleep(1.0)
        exited = killed | {"worker-0": replace(killed["worker-0"], state=ReplicaState.EXITED, exitCode=1)}
        for beat in range(100, 103):
            leader.act(bucket.stored, {name: replace(record, heartbeatSeq=beat) for name, record in exited.items()}, False)
            bucket.clock.sleep(1.0)
        assert bucket.job.state == state
    assert bucket.job.attempt == 1


def test_an_exit_and_a_heartbeat_of_one_poll_have_the_same_age(bucket: Bucket) -> None:
    """The peer's host was killed between both; the next heartbeat reports that. The leader's own is not awaited."""

    delays = itertools.count()

    def clock() -> float:
        bucket.clock.sleep(next(delays) / 1000)
        return bucket.clock.now

    leader = bucket.leader("master-0", clock=clock)  # type: ignore[arg-type]
    leader.take(bucket.stored)
    exited = {"worker-0": ReplicaRecord("worker-0", state=ReplicaState.EXITED, exitCode=1)}
    for _ in range(3):
        leader.act(bucket.stored, running_replicas() | exited, False)
        bucket.clock.sleep(0.8)
    assert bucket.job.state == "RUNNING"
    leader.act(bucket.stored, running_replicas("master-0") | exited | running_replicas("ps-0", beat=1), False)
    assert bucket.job.state == "FAILED"


def test_the_leader_stays_until_the_others_have_ended(bucket: Bucket) -> None:
    leader = bucket.leading()
    done = {"master-0": ReplicaRecord("master-0", state=ReplicaState.EXITED, exitCode=0)}
    ended = leader.act(bucket.stored, running_replicas() | done, False)
    assert ended.record.state == "SUCCEEDED"
    assert not leader.replicas_stopped(ended.record, running_replicas() | done)
    others = {name: ReplicaRecord(name, state=ReplicaState.EXITED, exitCode=143) for name in ("worker-0", "ps-0")}
    after = leader.act(ended, done | others, False)
    assert leader.replicas_stopped(after.record, done | others)
    assert [r["exitCode"] for r in after.record.replicas] == [0, 143, 143]
    assert bucket.job == after.record


def test_the_leader_s_wait_for_the_others_has_a_limit(bucket: Bucket) -> None:
    leader = bucket.leading()
    records = running_replicas() | {"master-0": ReplicaRecord("master-0", state=ReplicaState.EXITED, exitCode=0)}
    for _ in range(2):  # the first ends the job, the second observes the end
        leader.act(bucket.stored, records, False)
    bucket.clock.sleep(6.0)  # stopSeconds and two heartbeats
    assert not leader.replicas_stopped(bucket.job, records)
    bucket.clock.sleep(0.1)
    assert leader.replicas_stopped(bucket.job, records)


def test_a_reassigned_job_records_its_hosts(bucket: Bucket) -> None:
    leader = bucket.leader("master-0", plan=PLAN.with_hosts({"master-0": "w3", "worker-0": "w4", "ps-0": "p"}))
    leader.act(leader.take(bucket.stored), running_replicas(), False)
    assert bucket.job.hosts == ["w3", "w4", "p"]
    before = bucket.stored.version
    leader.act(bucket.stored, running_replicas(), False)
    assert bucket.stored.version == before, "the hosts are written once"


def test_the_leader_starts_hosts_and_records_the_answers(bucket: Bucket) -> None:
    requests: list[str] = []

    def start(host: str) -> str:
        requests.append(host)
        return "HTTP 403" if host == "h-ps" else ""

    plan = PLAN.with_hosts({"master-0": "h-m", "worker-0": "h-w", "ps-0": "h-ps"})
    starter = HostStarter(start, ["h-w", "h-ps"], bucket.clock, lambda work: work())
    leader = Leader(plan, "master-0", "1", bucket.ledger, bucket.clock, lambda: bucket.wall, starter)
    leader.take(bucket.stored)
    for beat in range(40):
        leader.act(
            bucket.stored, running_replicas("master-0", beat=beat) | running_replicas("worker-0", "ps-0", preempted=True), False
        )
        bucket.clock.sleep(1.0)
    assert requests == ["h-ps", "h-w"] * 3
    assert bucket.job.lease.heartbeatSeq < 20, "a round without an answer writes nothing"
    causes = [event.cause for event in bucket.job.events]
    assert causes.count("h-w is being started") == 1
    assert causes.count("h-ps is not started: HTTP 403; it is asked for again") == 1
    assert bucket.job.lostReplicas == ["worker-0", "ps-0"]


def test_the_leader_times_silence_exits_and_kills_of_this_attempt(bucket: Bucket) -> None:
    def state(name: str, state: ReplicaState = ReplicaState.RUNNING, **changes: Any) -> ReplicaRecord:
        return ReplicaRecord(name, state=state, **{"attempt": 1, **changes})

    exited = ReplicaState.EXITED
    records = [
        state("master-0", exited, exitCode=0, attempt=0),
        state("worker-0"),
        state("worker-1", restarts=1),
        state("worker-2", exited, exitCode=137, signal=9, awaits_restart=True),
        state("worker-3"),
        state("worker-4", exited, exitCode=1),
        state("ps-0", exited, exitCode=1, attempt=0, restarts=1, awaits_restart=True),
    ]
    plan = replace(PLAN, replicas=[*(record.name for record in records), "ps-1"], lostAfterSeconds=4.0)
    leader, job = bucket.leader("worker-0", plan=plan), replace(bucket.job, attempt=1)
    for beat in range(3):
        beats = {r.name: r if r.name == "worker-3" else replace(r, heartbeatSeq=beat) for r in records}
        view = leader._view(job, beats, True)
        bucket.clock.sleep(2.0)
    silent = dict.fromkeys(plan.replicas, 0.0) | {"worker-3": 4.0, "ps-1": 4.0}
    ended = dict.fromkeys(("master-0", "worker-2", "worker-4"), 4.0)
    killed = {"worker-1": 4.0, "worker-2": 4.0, "worker-3": 0.0}
    assert view == View(plan, beats, bucket.wall, silent, ended, killed, 4.0, 4.0, True, frozenset())


@pytest.mark.parametrize(
    ("busy", "waiting", "started"), [("worker-0", 0.0, 2.0), ("ps-0", 6.0, 10.0)], ids=["needed", "optional"]
)
def test_the_wait_of_a_needed_replica_for_its_busy_host_is_no_stall(
    bucket: Bucket, busy: str, waiting: float, started: float
) -> None:
    leader = bucket.leading(plan=replace(PLAN, optionalRoles=["ps"]))
    replicas = running_replicas()
    replicas[busy] = replace(replicas[busy], state=ReplicaState.PREPARING, hostBusy=True)
    seen = []
    for shown in (*[replicas] * 4, *[running_replicas()] * 2):
        seen.append(leader._view(bucket.job, shown, False).since_output)
        bucket.clock.sleep(2.0)
    assert (seen[3], seen[5]) == (waiting, started)
