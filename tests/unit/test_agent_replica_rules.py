"""A replica's record after a restart of its trainer, its host or its job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosts.agent import replica_rules as rules
from jobs.records import Event, Plan, ReplicaRecord
from jobs.states import ReplicaState
from jobs.study import Study

PLAN = Plan("job01", ["master-0", "worker-0"], "trainer.task", [], {}, maxRestarts=2)
RESTART_ALL = replace(PLAN, restartPolicy="all")
NOW = "2026-01-31T12:00:00.000Z"
RUNNING = ReplicaRecord("worker-0", state=ReplicaState.RUNNING, startTime="2026-01-31T11:00:00.000Z")
PREPARING, EXITED = ReplicaState.PREPARING, ReplicaState.EXITED


def run_and_end(
    record: ReplicaRecord, status: int, seconds: float = 60.0, memory: bool = False, plan: Plan = PLAN
) -> ReplicaRecord:
    """Start a trainer that runs for `seconds` and ends by itself."""
    return rules.after_exit(plan, rules.started(record, NOW), rules.Exit(status, memory), seconds, NOW, "tail")


def test_a_kill_is_restarted_up_to_the_limit() -> None:
    record, states = RUNNING, []
    for _ in range(3):
        record = run_and_end(record, -9)
        states.append((record.state, record.restarts, record.restartsUsed))
    assert states == [(PREPARING, 1, 1), (PREPARING, 2, 2), (EXITED, 2, 2)]
    assert record.awaits_restart
    assert not record.crashLooping
    assert record.events == [Event(NOW, "signal 9 (SIGKILL)")] * 2


def test_ten_good_minutes_reset_the_restarts() -> None:
    exhausted = replace(RUNNING, restarts=2, restartsUsed=2)
    assert run_and_end(exhausted, -9, 599.9).state == EXITED
    good = run_and_end(exhausted, -9, 600.0)
    assert (good.state, good.restarts, good.restartsUsed, good.consecutiveFailures) == (PREPARING, 3, 1, 0)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(-9, 1.0)] * 3, [1, 2, 3]),
        ([(-9, 9.9), (-9, 9.9), (-9, 10.0)], [1, 2, 0]),
        ([(-9, 1.0), (-11, 1.0), (-9, 1.0)], [1, 1, 1]),
        ([(-9, 1.0), (1, 1.0), (-9, 1.0)], [1, 0, 1]),
    ],
)
def test_three_equal_early_ends_are_a_crash_loop(ends: list[tuple[int, float]], expected: list[int]) -> None:
    plan, record, failures = replace(PLAN, maxRestarts=9), RUNNING, []
    for code, seconds in ends:
        record = run_and_end(record, code, seconds, plan=plan)
        failures.append(record.consecutiveFailures)
    assert failures == expected
    assert record.crashLooping == record.awaits_restart == (expected[-1] == 3)
    assert record.state == (EXITED if record.crashLooping else PREPARING)


@pytest.mark.parametrize("stop", ["of the trainer", "of the host", "of the host, and a new attempt"])
@pytest.mark.parametrize(
    ("memory", "seconds", "failures", "used"),
    [(False, 9.9, 2, 2), (False, 10.0, 0, 2), (True, 599.9, 2, 2), (True, 600.0, 0, 0)],
)
def test_a_long_run_that_others_end_counts_as_good(stop: str, memory: bool, seconds: float, failures: int, used: int) -> None:
    plan, record = replace(PLAN, maxRestarts=9), RUNNING
    for _ in range(2):
        record = run_and_end(record, -9, 1.0, memory, plan=plan)
    assert (record.consecutiveFailures, record.restartsUsed) == (2, 2)
    record = replace(rules.started(record, NOW), faults=0)
    if stop == "of the trainer":
        record = rules.after_stop(record, 143, NOW, True, seconds)
        assert record.restartsUsed == used
    else:
        record = rules.resume(plan, "worker-0", int("attempt" in stop), replace(record, runSeconds=seconds), NOW)
        assert record.restartsUsed == (0 if "attempt" in stop else used + 1)
    assert record.consecutiveFailures == failures
    assert run_and_end(record, -9, 1.0, memory, plan=plan).crashLooping == (failures > 0)


def test_three_times_out_of_memory_is_a_crash_loop_however_long_it_ran() -> None:
    plan, record = replace(PLAN, maxRestarts=9), RUNNING
    for _ in range(2):
        record = run_and_end(record, -9, 300.0, memory=True, plan=plan)
    assert not record.crashLooping
    assert run_and_end(record, -9, 300.0, plan=plan).consecutiveFailures == 0  # another reason
    assert run_and_end(record, -9, 600.0, memory=True, plan=plan).consecutiveFailures == 0
    assert run_and_end(record, -9, 300.0, memory=True, plan=plan).crashLooping


def test_out_of_memory_is_recorded_until_the_next_end_of_a_trainer() -> None:
    out_of_memory = run_and_end(RUNNING, -9, memory=True)
    assert out_of_memory.outOfMemory
    assert out_of_memory.events[-1].cause == "signal 9 (SIGKILL), out of memory"
    assert not run_and_end(out_of_memory, -9).outOfMemory


def test_restart_policy_all_leaves_a_kill_to_the_leader() -> None:
    ended = run_and_end(RUNNING, -9, plan=RESTART_ALL)
    assert (ended.state, ended.exitCode, ended.restarts) == (EXITED, 137, 0)
    assert ended.awaits_restart
    optional = run_and_end(RUNNING, -9, plan=replace(RESTART_ALL, optionalRoles=["worker"]))
    assert (optional.state, optional.restarts) == (PREPARING, 1)
    assert rules.resume(RESTART_ALL, "worker-0", 0, RUNNING, NOW).state == EXITED


def test_an_exit_is_not_restarted() -> None:
    for code in (0, 1, 127):
        ended = run_and_end(RUNNING, code)
        assert (ended.state, ended.exitCode, ended.signal, ended.restarts, ended.endTime) == (EXITED, code, None, 0, NOW)
        assert ended.errorMessage == ("tail" if code else "")


@pytest.mark.parametrize("code", [128, 130, 137, 143, 255])
def test_a_high_code_is_no_signal(code: int) -> None:
    ended = run_and_end(RUNNING, code)
    assert (ended.state, ended.awaits_restart, ended.exitCode, ended.signal) == (EXITED, False, code, None)


def test_restart_codes_use_restarts_permanently() -> None:
    record, states = RUNNING, []
    for _ in range(3):
        record = run_and_end(record, 42, 600.0)
        states.append((record.state, record.restarts, record.restartsUsed, record.awaits_restart))
    assert states == [(PREPARING, 1, 1, False), (PREPARING, 2, 2, False), (EXITED, 2, 2, True)]
    assert (
        run_and_end(replace(record, restartsUsed=4, faults=1), -9, 600.0, plan=replace(PLAN, maxRestarts=9)).restartsUsed == 2
    ), "only restarts after kills are reset"


@pytest.mark.parametrize(
    "ends_by",
    [
        [(-6, False)],
        [(-11, False), (-7, False)],
        [(-9, True)],
        [(1, True)],
        [(42, False), (43, False)],
        [(42, False), (-9, False)],
    ],
    ids=["abort", "faults", "memory", "a child's memory", "codes in turn", "a code and kills in turn"],
)
def test_faults_of_a_program_count_however_late_they_happen(ends_by: list[tuple[int, bool]]) -> None:
    plan, record, starts = replace(PLAN, maxRestarts=3, restartCodes=[42, 43]), RUNNING, 0
    while record.state != EXITED and starts < 50:
        status, memory = ends_by[starts % len(ends_by)]
        record = run_and_end(record, status, 620.0, memory=memory, plan=plan)
        starts += 1
    assert (record.state, record.awaits_restart, record.crashLooping) == (EXITED, True, False)
    assert starts <= 2 * (plan.maxRestarts + 1)
    assert rules.for_attempt(record, 1).faults == 0


@pytest.mark.parametrize("status", [-9, -15, -2, -1])
def test_signals_do_not_count_against_a_trainer_that_ran_well(status: int) -> None:
    record = RUNNING
    for _ in range(9):
        record = run_and_end(record, status, 620.0)
    assert (record.state, record.restarts, record.restartsUsed, record.faults) == (PREPARING, 9, 1, 0)


def test_a_study_s_codes_apply_to_trials_only() -> None:
    tuned = replace(PLAN, study=Study([]), restartCodes=[1], permanentCodes=[143])
    assert run_and_end(RUNNING, 1, plan=tuned).state == EXITED
    assert not run_and_end(RUNNING, 1, plan=tuned).awaits_restart


def test_the_wait_before_a_restart_grows_up_to_a_limit() -> None:
    waits = [rules.wait_before_start(replace(RUNNING, restartsUsed=n)) for n in (0, 1, 2, 3, 4, 6, 7, 5000)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 16.0, 30.0, 30.0]


def test_resume_without_a_record() -> None:
    assert rules.resume(PLAN, "worker-0", 1, None, NOW) == ReplicaRecord("worker-0", attempt=1, heartbeatTime=NOW)


def test_resume_counts_a_trainer_that_died_with_its_host_as_a_kill() -> None:
    killed = rules.resume(PLAN, "worker-0", 0, replace(RUNNING, outOfMemory=True, errorMessage="of the run before"), NOW)
    assert (killed.state, killed.restarts, killed.restartsUsed, killed.exitCode) == (PREPARING, 1, 1, 137)
    assert (killed.outOfMemory, killed.errorMessage) == (False, "")
    assert killed.events[-1].cause == "the replica or its host was stopped"
    stopped = rules.resume(PLAN, "worker-0", 0, rules.after_stop(RUNNING, 143, NOW, awaits_restart=True), NOW)
    assert (stopped.state, stopped.restarts, stopped.exitCode) == (PREPARING, 1, 143)
    assert stopped.events[-1].cause == "the agent was stopped"
    never = rules.resume(PLAN, "worker-0", 0, replace(RUNNING, state=EXITED), NOW)
    assert (never.state, never.restarts, never.exitCode) == (PREPARING, 1, 137)
    exhausted = rules.resume(PLAN, "worker-0", 0, replace(RUNNING, restartsUsed=2), NOW)
    assert (exhausted.state, exhausted.restartsUsed) == (EXITED, 2)


def test_resume_keeps_a_final_or_waiting_record() -> None:
    for changes in (
        {"exitCode": 0},
        {"exitCode": 3},
        {"exitCode": 137},
        {"exitCode": 137, "awaits_restart": True, "crashLooping": True},
    ):
        record = replace(RUNNING, state=EXITED, **changes)  # type: ignore[arg-type]
        assert rules.resume(PLAN, "worker-0", 0, record, NOW) == record
    waiting = replace(RUNNING, state=PREPARING, restarts=1, terminationReason="signal 9 (SIGKILL)")
    assert rules.resume(PLAN, "worker-0", 0, waiting, NOW) == waiting
    preempted = replace(waiting, terminationReason=rules.PREEMPTED)
    assert rules.resume(PLAN, "worker-0", 0, preempted, NOW) == replace(waiting, terminationReason=""), "it is back"


def test_another_attempt_resets_all_but_a_chief_that_succeeded() -> None:
    done = replace(RUNNING, state=EXITED, exitCode=0, restarts=2, restartsUsed=2, crashLooping=True, consecutiveFailures=2)
    again = rules.resume(PLAN, "worker-0", 1, done, NOW)
    assert (again.state, again.attempt, again.restarts, again.restartsUsed, again.crashLooping) == (PREPARING, 1, 0, 0, False)
    assert again.consecutiveFailures == 2  # a crash loop is still recognized
    chief = replace(done, name="master-0")
    assert rules.resume(PLAN, "master-0", 1, chief, NOW).state == EXITED
    assert not rules.outdated(PLAN, chief, 1)
    assert rules.outdated(PLAN, replace(chief, exitCode=137), 1)
    assert not rules.outdated(PLAN, replace(done, attempt=1), 1)


def test_a_new_attempt_and_a_start_forget_an_end() -> None:
    ended = {"state": EXITED, "exitCode": 137, "signal": 9, "awaits_restart": True, "endTime": NOW, "errorMessage": "tail"}
    record = replace(RUNNING, **ended, starts=2, restarts=2, restartsUsed=2, faults=1, crashLooping=True)  # type: ignore[arg-type]
    fresh = {"restarts": 0, "restartsUsed": 0, "faults": 0, "crashLooping": False, "awaits_restart": False, "errorMessage": ""}
    again = rules.for_attempt(record, 3)
    assert again == replace(record, state=PREPARING, attempt=3, **fresh)  # type: ignore[arg-type]
    started = rules.started(replace(again, awaits_restart=True, errorMessage="tail"), "later")
    assert started == replace(RUNNING, attempt=3, starts=3, lastStartTime="later")


def test_a_stop_keeps_the_earlier_end() -> None:
    done = replace(RUNNING, state=EXITED, exitCode=0)
    assert rules.after_stop(done, 143, NOW, awaits_restart=True) == done
    for killed in (False, True):
        stopped = replace(RUNNING, state=EXITED, exitCode=143, endTime=NOW, awaits_restart=killed)
        assert rules.after_stop(RUNNING, 143, NOW, killed) == stopped
    assert rules.after_stop(RUNNING, None, NOW, False) == replace(RUNNING, state=EXITED, endTime=NOW)


def test_a_start_keeps_the_first_start_time_and_counts() -> None:
    first = rules.started(ReplicaRecord("worker-0"), NOW)
    assert (first.state, first.startTime, first.lastStartTime, first.starts) == (ReplicaState.RUNNING, NOW, NOW, 1)
    later = rules.started(rules.for_attempt(rules.after_exit(PLAN, first, rules.Exit(-9), 60.0, NOW, ""), 1), "later")
    assert (later.startTime, later.lastStartTime, later.starts, later.restarts) == (NOW, "later", 2, 0)


def test_an_event_gets_its_recovery_time_once() -> None:
    killed = run_and_end(RUNNING, -9)
    up = rules.recovered(killed, 2.34567)
    assert up.events == [Event(NOW, "signal 9 (SIGKILL)", 2.346)]
    assert rules.recovered(up, 9.0) == up
    assert rules.recovered(RUNNING, 9.0) == RUNNING
    again = replace(up, events=[*up.events, Event("later", "signal 15 (SIGTERM)")])
    assert rules.recovered(again, 1.0).events == [*up.events, Event("later", "signal 15 (SIGTERM)", 1.0)]


_records = st.builds(
    ReplicaRecord,
    name=st.just("worker-0"),
    state=st.sampled_from(ReplicaState),
    exitCode=st.none() | st.integers(0, 255),
    awaits_restart=st.booleans(),
    restarts=st.integers(0, 3),
    restartsUsed=st.integers(0, PLAN.maxRestarts),
    faults=st.integers(0, PLAN.maxRestarts),
    attempt=st.integers(0, 3),
)


@given(_records, st.integers(-64, 255), st.sampled_from([1.0, 60.0, 600.0]))
def test_restarts_stay_within_the_plan_s_limit(record: ReplicaRecord, status: int, seconds: float) -> None:
    ended = rules.after_exit(PLAN, record, rules.Exit(status), seconds, NOW, "")
    assert ended.restartsUsed <= PLAN.maxRestarts
    if not ended.crashLooping:
        again = status < 0 or status == 42
        assert (ended.state == PREPARING) == (
            again and (record.faults if seconds >= 600.0 else record.restartsUsed) < PLAN.maxRestarts
        )
        assert ended.awaits_restart == (again and ended.state == EXITED)


@given(_records, st.integers(0, 3))
def test_resumes_stay_within_the_plan_s_limit(record: ReplicaRecord, attempt: int) -> None:
    for _ in range(5):
        record = rules.resume(PLAN, "worker-0", attempt, record, NOW)
        assert record.restartsUsed <= PLAN.maxRestarts
        assert record.attempt >= attempt
        if record.state in (PREPARING, ReplicaState.LOST):
            record = rules.started(record, NOW)
    assert record.state == EXITED


@pytest.mark.parametrize("state", [ReplicaState.RUNNING, EXITED])
def test_a_preemption_uses_no_restart(state: ReplicaState) -> None:
    ended = {"exitCode": 143, "awaits_restart": True} if state is EXITED else {}
    preempted = replace(RUNNING, state=state, **ended, preempted=True, restarts=7, restartsUsed=2)
    back = rules.resume(PLAN, "worker-0", 0, preempted, NOW)
    assert (back.state, back.restarts, back.restartsUsed, back.preempted) == (PREPARING, 8, 2, False)
    assert back.events == [Event(NOW, "its host was preempted")]
    restart_all = rules.resume(RESTART_ALL, "worker-0", 0, preempted, NOW)
    assert (restart_all.awaits_restart, restart_all.preempted) == (True, False), "its peers restart with it"
    crashed = rules.resume(PLAN, "worker-0", 0, rules.started(back, NOW), NOW)
    assert (crashed.state, crashed.terminationReason) == (EXITED, ""), "a later end counts"


@pytest.mark.parametrize(
    ("end", "restarts"),
    [
        ((0,), False),
        ((0, True), False),
        ((1,), False),
        ((1, True), True),
        ((1, False, True), False),
        ((7, True), False),
        ((42,), True),
        ((143,), False),
        ((143, False, True), True),
        ((-6,), True),
        ((-9,), False),
    ],
)
def test_the_user_s_codes_decide_before_signals_and_memory(end: tuple[int, bool, bool], restarts: bool) -> None:
    plan = replace(PLAN, restartCodes=[42, 134], permanentCodes=[7, 137])
    assert rules.should_restart(plan, *end) is restarts


@pytest.mark.parametrize(
    ("status", "fault"),
    [(0, False), (1, True), (137, True), (143, False), (-1, False), (-2, False), (-9, False), (-11, True), (-15, False)],
)
def test_ends_from_outside_are_no_faults_of_the_program(status: int, fault: bool) -> None:
    assert rules.is_fault(status, False) is fault
    assert rules.is_fault(status, True)


def test_an_end_in_words() -> None:
    assert rules.Exit(3) == (3, False, None, 0)
    ends = [rules.describe_end(status) for status in (0, 3, -9, -40)]
    assert ends == ["status 0", "status 3", "signal 9 (SIGKILL)", "signal 40"]
    assert rules.describe_end(-40, True) == "signal 40, out of memory"
