"""The records and the table of states."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.record import (
    TRANSITIONS,
    JobRecord,
    JobState,
    Plan,
    RecordError,
    ReplicaRecord,
    TransitionError,
    now,
    seconds_since,
)


@pytest.mark.parametrize(("here", "there"), list(itertools.product(JobState, JobState)))
def test_every_pair_of_states(here: JobState, there: JobState) -> None:
    job = JobRecord("job01", state=here)
    if there in TRANSITIONS[here]:
        moved = job.to(there)
        assert moved.state == there
        assert (moved.endTime is not None) == there.final
        assert (moved.startTime is not None) == (there is JobState.RUNNING)
    else:
        with pytest.raises(TransitionError, match=f"from {here} to {there}"):
            job.to(there)


@pytest.mark.parametrize(
    ("start", "price", "cost"),
    [
        ("2026-01-31T12:10:00Z", 2.18, 1.09),
        (None, 2.18, 1.4533),
        ("2026-01-31T12:50:00Z", 2.18, 0.0),  # by a clock that is ahead
        ("2026-01-31T12:10:00Z", 0.0, 0.0),
        ("2026-01-31T12:10:00Z", None, None),
    ],
)
def test_a_job_costs_from_its_start_to_its_end(start: str | None, price: float | None, cost: float | None) -> None:
    job = JobRecord("job01", state=JobState.RUNNING, createTime="2026-01-31T12:00:00Z", startTime=start, hourlyCost=price)
    assert job.to(JobState.FAILED, endTime="2026-01-31T12:40:00Z").cost == cost
    assert job.to(JobState.CANCELLING).cost is None


def test_the_table_has_a_row_for_every_state_and_ends() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert {state for state in JobState if state.final} == {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    reachable, frontier = {JobState.QUEUED}, {JobState.QUEUED}
    while frontier := {there for here in frontier for there in TRANSITIONS[here]} - reachable:
        reachable |= frontier
    assert reachable == set(JobState)


@given(st.lists(st.text(st.characters(exclude_characters="\0")), max_size=4))
def test_a_plan_survives_the_trip_through_a_file(args: list[str]) -> None:
    plan = Plan("job01", "master-0", ["master-0"], "trainer.task", args, "/bucket", "/package")
    assert Plan.from_json(plan.to_json().encode()) == plan


def test_bytes_that_are_no_utf8_survive_as_surrogates() -> None:
    argument = b"--path=\xff\xfe".decode("utf-8", "surrogateescape")
    plan = Plan("job01", "master-0", ["master-0"], "trainer.task", [argument], "/bucket", "/package")
    assert Plan.from_json(plan.to_json().encode()).args[0].encode("utf-8", "surrogateescape") == b"--path=\xff\xfe"


def test_unknown_keys_are_dropped_and_missing_ones_named() -> None:
    assert ReplicaRecord.from_json('{"name": "ps-0", "colour": "red"}').name == "ps-0"
    with pytest.raises(RecordError, match="Plan lacks jobId, replica, replicas"):
        Plan.from_json("{}")
    with pytest.raises(RecordError, match="JSON object, not list"):
        JobRecord.from_json("[]")


def test_records_are_plain_json() -> None:
    data = json.loads(JobRecord("job01", state=JobState.RUNNING, labels={"team": "é"}).to_json())
    assert data["state"] == "RUNNING"
    assert data["labels"] == {"team": "é"}


def test_time() -> None:
    moment = now()
    assert len(moment) == len("2026-01-31T12:00:00.250Z")
    assert moment.endswith("Z")
    assert seconds_since("2026-01-31T12:00:00.250Z", "2026-01-31T12:01:00.750Z") == 60.5
