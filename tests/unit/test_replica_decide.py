"""The rules of the leader, one by one and as properties over every view that a bucket can show."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.decide import View, decide, leader, stopped
from replica.record import TRANSITIONS, JobRecord, JobState, Plan, ReplicaRecord, ReplicaState

NAMES = ["master-0", "worker-0", "worker-1", "ps-0"]
PLAN = Plan("job01", "master-0", NAMES, "trainer.task", [], "/bucket", "/package", maxRestarts=2, maxRetries=1)
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


NOW = 10_000.0


def record(name: str, state: str = "RUNNING", code: int | None = None, **changes: object) -> ReplicaRecord:
    base = ReplicaRecord(name, state=state, exitCode=code, startTime=at(NOW - 50), heartbeatTime=at(NOW - 1))
    return replace(base, endTime=at(NOW - 1) if state == "EXITED" else None, **changes)  # type: ignore[arg-type]


def view(*records: ReplicaRecord, cancel: bool = False, watching: float = 0.0) -> View:
    """All replicas run, but for those that are given."""
    replicas = {name: record(name) for name in NAMES} | {r.name: r for r in records}
    return View(PLAN, replicas, at(NOW), at(watching), cancel)


def job(state: JobState = JobState.RUNNING, attempt: int = 0) -> JobRecord:
    return JobRecord("job01", state=state, createTime=at(0), attempt=attempt)


def test_running_once_all_are_up() -> None:
    waiting = view(record("ps-0", "PREPARING"))
    assert decide(job(JobState.PREPARING), waiting) is None
    running = decide(job(JobState.PREPARING), view(record("ps-0", "EXITED", 0)))
    assert running is not None
    assert (running.state, running.startTime) == ("RUNNING", at(NOW))
    assert decide(running, view()) is None


def test_queued_job_whose_replicas_are_there_prepares() -> None:
    assert decide(job(JobState.QUEUED), View(PLAN, {}, at(NOW), at(0))) is None
    prepared = decide(job(JobState.QUEUED), view())
    assert prepared is not None
    assert prepared.state == "PREPARING"


def test_the_chief_decides_even_where_others_fail() -> None:
    new = decide(job(), view(record("master-0", "EXITED", 0), record("worker-0", "EXITED", 1), cancel=True))
    assert new is not None
    assert (new.state, new.errorMessage, new.endTime) == ("SUCCEEDED", "", at(NOW))
    assert [r["name"] for r in new.replicas] == NAMES
    assert set(new.replicas[0]) == {"name", "state", "exitCode", "restarts", "startTime", "endTime"}


def test_a_job_that_was_done_at_once_has_a_start() -> None:
    chief = record("master-0", "EXITED", 0)
    new = decide(job(JobState.PREPARING), view(chief))
    assert new is not None
    assert (new.state, new.startTime) == ("SUCCEEDED", chief.startTime)


def test_a_worker_that_is_done_changes_nothing() -> None:
    assert decide(job(), view(record("worker-0", "EXITED", 0))) is None


@pytest.mark.parametrize(("name", "code"), [("worker-0", 1), ("ps-0", 127), ("master-0", 3)])
def test_an_exit_is_for_good(name: str, code: int) -> None:
    new = decide(job(), view(record(name, "EXITED", code, errorMessage="Traceback\nValueError: x")))
    assert new is not None
    who = name.replace("-", " ")
    assert new.state == "FAILED"
    assert new.errorMessage == f"The replica {who} exited with a non-zero status of {code}.\nTraceback\nValueError: x"


def test_the_first_to_exit_is_named() -> None:
    later, first = record("worker-0", "EXITED", 1), record("worker-1", "EXITED", 2)
    new = decide(job(), view(later, replace(first, endTime=at(NOW - 9))))
    assert new is not None
    assert new.errorMessage == "The replica worker 1 exited with a non-zero status of 2."


def test_kills_beyond_the_restarts_retry_the_job_and_then_fail_it() -> None:
    assert decide(job(), view(record("ps-0", "EXITED", 143, restarts=1))) is None  # its unit was stopped, it comes back
    killed = record("ps-0", "EXITED", 137, restarts=2, errorMessage="last line")
    again = decide(job(), view(killed))
    assert again is not None
    assert (again.state, again.attempt) == ("RUNNING", 1)
    assert decide(again, view(killed)) is None
    failed = decide(again, view(replace(killed, attempt=1)))
    assert failed is not None
    assert failed.errorMessage == (
        "The replica ps 0 exited with a non-zero status of 137 (signal 9 (SIGKILL)) "
        "after 2 restarts and 1 retries of the job.\nlast line"
    )
    starved = decide(again, view(replace(killed, attempt=1, outOfMemory=True)))
    assert starved is not None
    assert "a non-zero status of 137 (signal 9 (SIGKILL), out of memory) after 2 restarts" in starved.errorMessage


def test_a_lost_host_is_waited_for_then_fails_the_job() -> None:
    assert decide(job(), view(record("worker-1", heartbeatTime=at(NOW - 119)))) is None
    new = decide(job(), view(record("worker-1", heartbeatTime=at(NOW - 121))))
    assert new is not None
    assert new.errorMessage == "The replica worker 1 is lost: no heartbeat for 120 s."
    done = record("worker-1", "EXITED", 0, heartbeatTime=at(NOW - 500))
    assert decide(job(), view(done)) is None


def test_old_heartbeats_mean_nothing_to_a_leader_that_just_woke() -> None:
    lost = record("worker-1", heartbeatTime=at(0))
    assert decide(job(), view(lost, watching=NOW - 5)) is None


def test_preparing_does_not_last_for_ever() -> None:
    up = {name: record(name, startTime=at(NOW - 301)) for name in NAMES[:2]}
    new = decide(job(JobState.PREPARING), View(PLAN, up, at(NOW), at(0)))
    assert new is not None
    assert new.errorMessage == "The replicas worker 1, ps 0 are not up 300 s after the first replica."
    assert decide(job(JobState.PREPARING), View(PLAN, up, at(NOW), at(NOW - 10))) is None


def test_cancel_waits_for_those_that_live() -> None:
    cancelling = decide(job(), view(cancel=True))
    assert cancelling is not None
    assert cancelling.state == "CANCELLING"
    ended = [record(name, "EXITED", 143) for name in NAMES[:3]]
    assert decide(cancelling, view(*ended, cancel=True)) is None
    lost = record("ps-0", heartbeatTime=at(NOW - 61))
    cancelled = decide(cancelling, view(*ended, lost, cancel=True))
    assert cancelled is not None
    assert (cancelled.state, cancelled.endTime) == ("CANCELLED", at(NOW))


def test_the_end_has_a_cost_where_hosts_have_a_price() -> None:
    seen = view(record("master-0", "EXITED", 0))
    before = replace(job(), startTime=at(NOW - 1800), hourlyCost=2.18)
    new = decide(before, seen)
    assert new is not None
    assert (new.state, new.cost) == ("SUCCEEDED", 1.09)
    assert decide(replace(before, hourlyCost=None), seen) == replace(new, hourlyCost=None, cost=None)


def test_after_the_end_only_the_list_of_replicas_follows() -> None:
    ended = decide(job(), view(record("master-0", "EXITED", 0)))
    assert ended is not None
    assert decide(ended, view(record("master-0", "EXITED", 0))) is None
    after = decide(ended, view(record("master-0", "EXITED", 0), record("ps-0", "EXITED", 143)))
    assert after is not None
    assert replace(after, replicas=ended.replicas) == ended
    assert after.replicas[3]["exitCode"] == 143


_moments = st.integers(0, int(NOW)).map(at)
_codes = st.sampled_from([None, 0, 1, 2, 127, 128, 137, 143, 255])
_records = st.builds(
    ReplicaRecord,
    name=st.just(""),
    state=st.sampled_from([str(state) for state in ReplicaState]),
    exitCode=_codes,
    restarts=st.integers(0, 3),
    attempt=st.integers(0, 2),
    startTime=st.none() | _moments,
    endTime=st.none() | _moments,
    heartbeatTime=_moments | st.just(at(NOW - 1)),
    errorMessage=st.sampled_from(["", "last line"]),
)
_replicas = st.dictionaries(st.sampled_from(NAMES), _records).map(
    lambda found: {name: replace(r, name=name) for name, r in found.items()}
)
_views = st.builds(View, st.just(PLAN), _replicas, st.just(at(NOW)), _moments, st.booleans())
_jobs = st.builds(job, st.sampled_from(JobState), st.integers(0, PLAN.maxRetries))


@given(_jobs, _views)
def test_only_moves_of_the_table(before: JobRecord, seen: View) -> None:
    after = decide(before, seen)
    if after is None:
        return
    assert after != before
    if before.final:
        assert replace(after, replicas=before.replicas) == before
    elif after.state != before.state:
        assert after.state in TRANSITIONS[JobState(before.state)]
        assert after.attempt == before.attempt
        assert bool(after.errorMessage) == (after.state == JobState.FAILED)
        assert (after.endTime is not None) == after.final
    else:
        assert after == replace(before, attempt=before.attempt + 1)
    assert after.attempt <= PLAN.maxRetries


@given(_jobs, _views)
def test_a_view_leads_to_an_end_of_deciding(before: JobRecord, seen: View) -> None:
    steps = 0
    while (after := decide(before, seen)) is not None:
        before, steps = after, steps + 1
        assert steps < 8


@given(_jobs, _views)
def test_a_job_whose_chief_is_done_never_fails(before: JobRecord, seen: View) -> None:
    done = record(PLAN.chief, "EXITED", 0)
    seen = replace(seen, replicas={**seen.replicas, PLAN.chief: done})
    if before.state != JobState.FAILED:
        while (after := decide(before, seen)) is not None:
            assert after.state != JobState.FAILED
            before = after


@given(_jobs, _views)
def test_an_exit_never_leads_to_another_attempt(before: JobRecord, seen: View) -> None:
    failed = record("worker-0", "EXITED", 1, attempt=before.attempt)
    after = decide(before, replace(seen, replicas={**seen.replicas, "worker-0": failed}))
    assert after is None or after.attempt == before.attempt


@given(_replicas, st.sets(st.sampled_from(NAMES), min_size=1))
def test_exactly_one_leads(replicas: dict[str, ReplicaRecord], alive: set[str]) -> None:
    """Given the same view, in which those that live have a fresh heartbeat and the others have not."""
    replicas = {name: replace(r, heartbeatTime=at(0)) for name, r in replicas.items()}
    replicas |= {name: record(name) for name in alive}
    leaders = {me for me in alive if leader(PLAN, replicas, me, at(NOW)) == me}
    assert leaders == {next(name for name in NAMES if name in alive)}


def test_stopped_leaves_lost_hosts_aside() -> None:
    assert not stopped(view(), NAMES)
    assert stopped(view(*(record(name, "EXITED", 143) for name in NAMES)), NAMES)
    assert stopped(view(*(record(name, heartbeatTime=at(0)) for name in NAMES)), NAMES)
