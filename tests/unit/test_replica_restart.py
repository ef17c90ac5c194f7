"""What becomes of a replica's record when its trainer, its host or its job starts again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from replica import restart
from replica.record import Plan, ReplicaRecord, ReplicaState

PLAN = Plan("job01", "worker-0", ["master-0", "worker-0"], "trainer.task", [], "/bucket", "/package", maxRestarts=2)
CHIEF = replace(PLAN, replica="master-0")
NOW = "2026-01-31T12:00:00.000Z"
RUNNING = ReplicaRecord("worker-0", state="RUNNING", startTime="2026-01-31T11:00:00.000Z")


def test_a_kill_is_restarted_until_there_were_too_many() -> None:
    record = RUNNING
    seen: list[tuple[str, int]] = []
    for _ in range(3):
        record = restart.started(restart.after_exit(PLAN, record, 137, NOW, "tail"), NOW) if seen else record
        ended = restart.after_exit(PLAN, record, 137, NOW, "tail")
        seen.append((ended.state, ended.restarts))
    assert seen == [("PREPARING", 1), ("PREPARING", 2), ("EXITED", 2)]


def test_what_a_killed_trainer_lacked_is_told_until_the_next_ends() -> None:
    starved = restart.after_exit(PLAN, RUNNING, 137, NOW, "", out_of_memory=True)
    assert starved.outOfMemory
    assert not restart.after_exit(PLAN, restart.started(starved, NOW), 137, NOW, "").outOfMemory


def test_an_exit_is_not_restarted() -> None:
    for code in (0, 1, 127):
        ended = restart.after_exit(PLAN, RUNNING, code, NOW, "tail")
        assert (ended.state, ended.exitCode, ended.restarts, ended.endTime) == ("EXITED", code, 0, NOW)
        assert ended.errorMessage == ("tail" if code else "")


def test_the_wait_grows_to_a_limit() -> None:
    waits = [restart.wait_before_start(PLAN, replace(RUNNING, restarts=n)) for n in (0, 1, 2, 3, 5, 50)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 16.0, 30.0]


def test_resume_of_a_first_life() -> None:
    assert restart.resume(PLAN, 1, None, NOW) == ReplicaRecord("worker-0", attempt=1, heartbeatTime=NOW)


def test_resume_counts_a_trainer_that_died_with_its_host_as_a_kill() -> None:
    killed = restart.resume(PLAN, 0, RUNNING, NOW)
    assert (killed.state, killed.restarts, killed.exitCode) == ("PREPARING", 1, 137)
    stopped = restart.resume(PLAN, 0, restart.after_stop(RUNNING, 143, NOW), NOW)
    assert (stopped.state, stopped.restarts, stopped.exitCode) == ("PREPARING", 1, 143)
    exhausted = restart.resume(PLAN, 0, replace(RUNNING, restarts=2), NOW)
    assert (exhausted.state, exhausted.restarts) == ("EXITED", 2)


def test_resume_leaves_what_is_done_or_was_waiting() -> None:
    for record in (replace(RUNNING, state="EXITED", exitCode=0), replace(RUNNING, state="EXITED", exitCode=3)):
        assert restart.resume(PLAN, 0, record, NOW) == replace(record, heartbeatTime=NOW)
    waiting = replace(RUNNING, state="PREPARING", restarts=1)
    assert restart.resume(PLAN, 0, waiting, NOW).restarts == 1


def test_another_attempt_starts_all_over_but_a_chief_that_is_done() -> None:
    done = replace(RUNNING, state="EXITED", exitCode=0, restarts=2)
    again = restart.resume(PLAN, 1, done, NOW)
    assert (again.state, again.attempt, again.restarts, again.exitCode) == ("PREPARING", 1, 0, None)
    chief = replace(done, name="master-0")
    assert restart.resume(CHIEF, 1, chief, NOW).state == "EXITED"
    assert not restart.outdated(CHIEF, chief, 1)
    assert restart.outdated(CHIEF, replace(chief, exitCode=137), 1)


def test_a_stop_does_not_hide_how_a_trainer_ended() -> None:
    done = replace(RUNNING, state="EXITED", exitCode=0)
    assert restart.after_stop(done, 143, NOW) == done
    assert restart.after_stop(RUNNING, 143, NOW).exitCode == 143


_records = st.builds(
    ReplicaRecord,
    name=st.just("worker-0"),
    state=st.sampled_from([str(state) for state in ReplicaState]),
    exitCode=st.none() | st.integers(0, 255),
    restarts=st.integers(0, PLAN.maxRestarts),
    attempt=st.integers(0, 3),
)


@given(_records, st.integers(0, 255))
def test_restarts_stay_within_the_plan(record: ReplicaRecord, code: int) -> None:
    ended = restart.after_exit(PLAN, record, code, NOW, "")
    assert record.restarts <= ended.restarts <= PLAN.maxRestarts
    assert (ended.state == "PREPARING") == (code >= 128 and record.restarts < PLAN.maxRestarts)


@given(_records, st.integers(0, 3))
def test_no_number_of_lives_makes_more_restarts_than_the_plan_has(record: ReplicaRecord, attempt: int) -> None:
    for _ in range(5):
        record = restart.resume(PLAN, attempt, record, NOW)
        assert record.restarts <= PLAN.maxRestarts
        assert record.attempt >= attempt
        if record.state == "PREPARING":
            record = restart.started(record, NOW)
    assert record.state == "EXITED"
