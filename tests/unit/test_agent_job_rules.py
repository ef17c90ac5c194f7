"""The rules of the leader, one by one and as properties over every view that a bucket can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hosts.agent.job_rules import PREEMPTED, View, decide, stopped, termination_reason, to_start
from jobs.records import Event, JobRecord, Plan, ReplicaRecord
from jobs.states import TRANSITIONS, JobState, ReplicaState
from jobs.study import Study

NAMES = ["master-0", "worker-0", "worker-1", "ps-0"]
PLAN = Plan("job01", NAMES, "trainer.task", [], {}, maxRestarts=2, maxRetries=1, maxWaitTime=100.0)
WHOLE = replace(PLAN, restartPolicy="all")
SPARE = replace(PLAN, optionalRoles=["worker"])
NOW = "2026-01-31T12:00:00.000Z"
START = "2026-01-31T11:30:00.000Z"


def record(name: str, state: str = "RUNNING", code: int | None = None, **changes: Any) -> ReplicaRecord:
    signal = code - 128 if code and 128 < code < 255 else None
    base = ReplicaRecord(name, state=ReplicaState(state), exitCode=code, signal=signal, startTime=START, heartbeatTime=NOW)
    base = replace(base, killed=state == "EXITED" and signal is not None)
    return replace(base, endTime=NOW if state == "EXITED" else None, **changes)


def view(*records: ReplicaRecord, plan: Plan = PLAN, **seen: Any) -> View:
    """Return a view in which all replicas run, except the given ones."""
    return View(plan, {name: record(name) for name in NAMES} | {r.name: r for r in records}, NOW, **seen)


def job(state: JobState = JobState.RUNNING, **changes: Any) -> JobRecord:
    started = START if state not in (JobState.QUEUED, JobState.PREPARING) else None
    return JobRecord("job01", **{"state": state, "createTime": START, "startTime": started, **changes})


def decided(before: JobRecord, seen: View) -> JobRecord:
    new = decide(before, seen)
    assert new is not None
    return new


def test_a_job_that_was_handed_over_prepares_and_runs_once_all_are_up() -> None:
    assert decided(job(JobState.QUEUED), View(PLAN, {}, NOW)).state == "PREPARING"
    assert decide(job(JobState.PREPARING), view(record("ps-0", "PREPARING"))) is None
    assert decide(job(JobState.PREPARING), view(record("ps-0", attempt=-1))) is None  # of an earlier attempt
    running = decided(job(JobState.PREPARING), view(record("ps-0", "EXITED", 0)))
    assert (running.state, running.startTime) == ("RUNNING", NOW)
    assert decide(running, view(record("ps-0", "EXITED", 0))) is None


def test_the_chief_decides_even_where_others_fail() -> None:
    seen = view(
        record("master-0", "EXITED", 0), record("worker-0", "EXITED", 1), cancel_requested=True, exited={"worker-0": 9.0}
    )
    new = decided(job(runSeconds=1e9), seen)
    assert (new.state, new.errorMessage, new.endTime) == ("SUCCEEDED", "", NOW)
    assert [r["name"] for r in new.replicas] == NAMES
    assert set(new.replicas[0]) == {"name", "state", "exitCode", "starts", "restarts", "startTime", "lastStartTime", "endTime"}


def test_who_failed_after_the_chief_was_done_is_named() -> None:
    failed = (record("worker-0", "EXITED", 1), record("worker-1", "EXITED", 137), record("ps-0", "EXITED", 1))
    new = decided(job(droppedReplicas=["worker-1"]), view(CHIEF_DONE, *failed))
    more = "successPolicy: all makes the job depend on it"
    assert [event.cause for event in new.events] == [f"worker-0 ended with status 1, and its work may be missing: {more}"]
    spare = decided(job(), view(CHIEF_DONE, failed[1], plan=SPARE))
    assert [event.cause for event in spare.events] == [
        "worker-1 ended with signal 9 (SIGKILL), and its work may be missing: its role is in optionalRoles"
    ]


def test_a_job_that_was_done_at_once_has_a_start() -> None:
    new = decided(job(JobState.PREPARING), view(record("master-0", "EXITED", 0)))
    assert (new.state, new.startTime) == ("SUCCEEDED", START)


def test_a_worker_that_is_done_changes_nothing() -> None:
    assert decide(job(), view(record("worker-0", "EXITED", 0))) is None


# Who still works when the job is done

GRACE = replace(PLAN, gracePeriod=30.0)
ALL = replace(GRACE, successPolicy="all", optionalRoles=["evaluator"])
CHIEF_DONE = record("master-0", "EXITED", 0)


def done(*names: str) -> list[ReplicaRecord]:
    return [record(name, "EXITED", 0) for name in names]


def test_who_works_when_the_chief_ends_has_a_grace() -> None:
    seen = view(CHIEF_DONE, *done("worker-1"), plan=GRACE, exited={"master-0": 0.0})
    told = decided(job(), seen)
    said = "the job is done by its successPolicy, but worker-0 still worked: up to 30 s are given (gracePeriod)"
    assert (told.state, [event.cause for event in told.events]) == ("RUNNING", [said])
    assert decide(told, replace(seen, exited={"master-0": 29.9})) is None
    over = decided(told, replace(seen, exited={"master-0": 30.0}))
    assert (over.state, over.errorMessage) == ("SUCCEEDED", "")
    more = "a longer gracePeriod, or successPolicy: all, waits for that"
    assert over.events[-1].cause == f"worker-0 still worked when the job ended, and were stopped: {more}"


@pytest.mark.parametrize(
    "other",
    [
        record("worker-0", "EXITED", 0),
        record("worker-0", "EXITED", 1),
        record("worker-0", "EXITED", 137),
        record("worker-0", preempted=True),
    ],
)
def test_nobody_waits_for_who_does_not_work(other: ReplicaRecord) -> None:
    ended = decided(job(), view(CHIEF_DONE, other, *done("worker-1"), plan=GRACE))
    assert ended.state == "SUCCEEDED"
    assert not [event for event in ended.events if "still worked" in event.cause]


def test_a_grace_is_for_all_that_have_an_end_of_their_own() -> None:
    for changes, waits in (({}, True), ({"droppedReplicas": ["worker-0"]}, False)):
        new = decided(job(**changes), view(CHIEF_DONE, *done("worker-1"), plan=GRACE))
        assert (new.state == "RUNNING") == waits
    assert decided(job(), view(CHIEF_DONE, *done("worker-0", "worker-1"), plan=GRACE)).state == "SUCCEEDED", "but for a ps"
    late = decided(job(), view(CHIEF_DONE, record("worker-0", "PREPARING"), *done("worker-1"), plan=GRACE))
    assert late.state == "RUNNING", "its host was slow to start it"
    asked = view(CHIEF_DONE, plan=GRACE, cancel_requested=True)
    assert decided(job(), asked).state == "SUCCEEDED", "who cancels does not wait for it"


def test_what_becomes_of_others_in_a_grace_fails_no_job() -> None:
    others = [record("worker-0", "EXITED", 1), record("ps-0", "EXITED", 137, crashLooping=True)]
    seen = view(CHIEF_DONE, *others, plan=GRACE, exited={"worker-0": 9.0}, silence={"ps-0": 500.0})
    for state in (JobState.RUNNING, JobState.PREPARING):
        before, after = job(state), decide(job(state), seen)
        while after is not None:
            assert (after.state, after.attempt) in (("RUNNING", 0), ("PREPARING", 0))
            before, after = after, decide(after, seen)
        assert decided(before, replace(seen, exited={"master-0": 30.0})).state == "SUCCEEDED"


def test_by_the_policy_all_each_must_succeed_but_servers_and_optional_roles() -> None:
    plan = replace(ALL, replicas=[*NAMES, "evaluator-0"])
    evaluator = record("evaluator-0")
    seen = view(CHIEF_DONE, *done("worker-0"), evaluator, plan=plan, exited={"master-0": 1e6, "worker-0": 1e6})
    assert decide(job(), seen) is None
    failed = record("worker-1", "EXITED", 1)
    exited = {**seen.exited, "worker-1": 9.0}
    assert decided(job(), replace(seen, replicas={**seen.replicas, "worker-1": failed}, exited=exited)).state == "FAILED"
    asked = decided(job(), replace(seen, cancel_requested=True))
    assert asked.state == "CANCELLING", "nothing is done yet"
    last = view(*done("master-0", "worker-0", "worker-1"), evaluator, plan=plan, exited=exited | {"worker-1": 0.0})
    assert "evaluator-0 still worked" in decided(job(), last).events[-1].cause
    assert decided(job(), replace(last, exited=exited | {"worker-1": 30.0})).state == "SUCCEEDED"
    needed = replace(plan, optionalRoles=[])
    assert decide(job(), replace(last, plan=needed)) is None


@pytest.mark.parametrize(("policy", "state"), [("replica", "SUCCEEDED"), ("all", "RUNNING")])
def test_what_was_done_in_an_earlier_attempt_counts_unless_all_start_again(policy: str, state: str) -> None:
    plan = replace(ALL, restartPolicy=policy)
    others = [record(name, "EXITED", 0, attempt=1) for name in ("worker-0", "worker-1")]
    after = decide(job(attempt=1), view(CHIEF_DONE, *others, plan=plan))
    assert (after.state if after else "RUNNING") == state


# An exit


@pytest.mark.parametrize(("name", "code"), [("worker-0", 1), ("ps-0", 127), ("master-0", 3), ("worker-0", 255)])
def test_an_exit_is_for_good_after_a_look(name: str, code: int) -> None:
    seen = view(record(name, "EXITED", code, errorMessage="Traceback\nValueError: x"), exited={name: 0.99})
    assert decide(job(), seen) is None
    new = decided(job(), replace(seen, exited={name: 1.0}))
    said = f"The replica {name.replace('-', ' ')} exited with a non-zero status of {code}.\nTraceback\nValueError: x"
    assert (new.state, new.errorMessage) == ("FAILED", said)


def test_the_look_is_no_longer_than_a_heartbeat() -> None:
    quick = replace(PLAN, heartbeatSeconds=0.1)
    assert decided(job(), view(record("ps-0", "EXITED", 1), plan=quick, exited={"ps-0": 0.1})).state == "FAILED"


def test_the_first_to_exit_is_named() -> None:
    seen = view(record("worker-0", "EXITED", 1), record("worker-1", "EXITED", 2), exited={"worker-0": 2.0, "worker-1": 3.0})
    assert decided(job(), seen).errorMessage == "The replica worker 1 exited with a non-zero status of 2."


@pytest.mark.parametrize(
    ("exited", "killed", "again"),
    [
        (2.0, 32.0, True),  # 30 s before the exit
        (2.0, 32.1, False),
        (2.0, 1.0, True),  # it was told later than the exit that follows from it
        (0.0, 0.0, True),
    ],
)
@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_an_exit_soon_after_a_kill_follows_from_it(exited: float, killed: float, again: bool, plan: Plan) -> None:
    failed, mended = record("worker-0", "EXITED", 1), record("ps-0", restarts=1)
    seen = view(failed, mended, plan=plan, exited={"worker-0": exited}, killed={"ps-0": killed})
    new = decided(job(), seen)
    if again:
        assert (new.state, new.attempt, new.restartsUsed) == ("RUNNING", 1, 1)
        assert new.events == [Event(NOW, "ps 0 was killed, and the others could not go on without it")]
    else:
        assert new.state == "FAILED"


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_a_restart_code_that_is_seen_after_an_exit_follows_from_it(plan: Plan) -> None:
    failed = record("master-0", "EXITED", 1, errorMessage="no such column")
    asks = record("worker-0", "EXITED", 42, killed=True, terminationReason="status 42")
    late = view(failed, asks, plan=plan, exited={"master-0": 5.0, "worker-0": 4.9}, killed={"worker-0": 4.9})
    assert decided(job(), late).errorMessage == "The replica master 0 exited with a non-zero status of 1.\nno such column"
    first = replace(late, killed={"worker-0": 5.0})
    again = decided(job(), first)
    assert (again.state, again.attempt) == ("RUNNING", 1)
    assert again.events == [Event(NOW, "worker 0 ended (status 42), and the others could not go on without it")]
    spent = decided(job(restartsUsed=2), first)
    assert spent.errorMessage == (
        "Worker 0 ended (status 42), and the others could not go on without it, and the job was started again "
        f"{2 if plan.whole else 1} time{'s' if plan.whole else ''}. "
        "The replica master 0 exited with a non-zero status of 1.\nno such column"
    )


@pytest.mark.parametrize(
    ("reason", "since", "attempt"),
    [
        ("signal 15 (SIGTERM)", 4.9, 0),
        ("signal 15 (SIGTERM)", 5.9, 0),  # a moment earlier, which is how long an end takes to be reported
        ("signal 15 (SIGTERM)", 6.1, 1),
        ("signal 9 (SIGKILL)", 4.9, 1),
        ("signal 11 (SIGSEGV)", 4.9, 1),
        ("", 4.9, 1),  # its host was lost
    ],
)
@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_a_sigterm_may_follow_from_an_exit(reason: str, since: float, attempt: int, plan: Plan) -> None:
    failed, ended = record("master-0", "EXITED", 1), record("worker-0", "EXITED", 143, terminationReason=reason)
    seen = view(failed, ended, plan=plan, exited={"master-0": 5.0, "worker-0": since}, killed={"worker-0": since})
    assert decided(job(), seen).attempt == attempt


def test_a_job_starts_again_after_a_sigterm_once_no_exit_can_be_its_cause() -> None:
    ended = record("worker-0", "EXITED", 143, terminationReason="signal 15 (SIGTERM)")
    assert decide(job(), view(ended, plan=WHOLE, killed={"worker-0": 0.9})) is None
    assert decided(job(), view(ended, plan=WHOLE, killed={"worker-0": 1.0})).attempt == 1
    killed = record("worker-1", "EXITED", 137)
    new = decided(job(), view(ended, killed, plan=WHOLE, killed={"worker-0": 0.9, "worker-1": 0.1}))
    assert new.events == [Event(NOW, "worker 1 was killed (signal 9 (SIGKILL))")]


def test_who_exits_does_not_follow_from_its_own_kill() -> None:
    seen = view(record("worker-0", "EXITED", 1, restarts=1), exited={"worker-0": 2.0}, killed={"worker-0": 5.0})
    assert decided(job(), seen).state == "FAILED"


def test_a_verdict_waits_for_hosts_that_are_late() -> None:
    failed = record("worker-0", "EXITED", 1)
    for name, silence, waits in (
        ("ps-0", 12.5, True),
        ("ps-0", 12.4, False),
        ("ps-0", 600.0, True),
        ("worker-0", 600.0, False),
    ):
        seen = view(failed, exited={"worker-0": 5.0}, silence={name: silence}, plan=replace(PLAN, maxWaitTime=1e9))
        new = decide(replace(job(), lostReplicas=[]), seen)
        assert (new is None or new.state == "RUNNING") == waits, (name, silence)
    done = view(failed, record("ps-0", "EXITED", 0), exited={"worker-0": 5.0}, silence={"ps-0": 60.0})
    assert decided(job(), done).state == "FAILED"
    spare = view(failed, plan=replace(PLAN, optionalRoles=["ps"]), exited={"worker-0": 5.0}, silence={"ps-0": 60.0})
    assert decided(job(), spare).state == "FAILED"


def test_what_happened_in_an_earlier_attempt_has_been_dealt_with() -> None:
    old = [
        record("worker-0", "EXITED", 1),
        record("worker-1", "EXITED", 137, restartsUsed=2),
        record("ps-0", "EXITED", 137, crashLooping=True),
    ]
    assert decide(job(attempt=1), view(*old, exited={"worker-0": 9.0})) is None


# A kill


def test_a_kill_that_its_host_mends_is_not_the_leader_s_affair() -> None:
    assert decide(job(), view(record("ps-0", "PREPARING", 137, restarts=1, restartsUsed=1), killed={"ps-0": 0.0})) is None


def test_a_unit_that_was_stopped_comes_back() -> None:
    assert decide(job(), view(record("ps-0", "EXITED", 143, restarts=1, restartsUsed=1))) is None
    assert decide(job(), view(record("worker-0", "EXITED", 143, restartsUsed=1), plan=SPARE)) is None


def test_kills_beyond_the_restarts_start_the_job_again_and_then_fail_it() -> None:
    killed = record("ps-0", "EXITED", 137, restarts=2, restartsUsed=2, errorMessage="last line")
    again = decided(job(droppedReplicas=["worker-1"]), view(killed))
    assert (again.state, again.attempt, again.restartsUsed, again.droppedReplicas) == ("RUNNING", 1, 1, [])
    assert again.events == [Event(NOW, "ps 0 ended (signal 9 (SIGKILL)) after 2 restarts")]
    assert decide(again, view(killed)) is None
    failed = decided(again, view(replace(killed, attempt=1)))
    said = "a non-zero status of 137 (signal 9 (SIGKILL)), and the job was started again 1 time.\nlast line"
    assert (failed.state, failed.errorMessage) == ("FAILED", f"The replica ps 0 exited with {said}")
    starved = decided(again, view(replace(killed, attempt=1, outOfMemory=True)))
    assert "137 (signal 9 (SIGKILL), out of memory), and the job" in starved.errorMessage


def test_what_went_well_for_a_while_is_not_counted() -> None:
    killed = view(record("ps-0", "EXITED", 137, attempt=1, restartsUsed=2), in_state=599.9)
    assert decided(job(attempt=1, restartsUsed=1), killed).state == "FAILED"
    again = decided(job(attempt=1, restartsUsed=1), replace(killed, in_state=600.0))
    assert (again.state, again.attempt, again.restartsUsed) == ("RUNNING", 2, 1)


def test_the_same_exit_code_does_not_go_well_however_long_it_takes() -> None:
    ended = record("worker-0", "EXITED", 42, killed=True)
    late = view(ended, plan=WHOLE, in_state=1e4)
    first = decided(job(restartsUsed=2), late)
    assert (first.attempt, first.restartsUsed, first.faults) == (1, 1, 1)
    assert first.events[-1].cause == "worker 0 ended (status 42)"
    again = decided(replace(first, attempt=0), late)
    assert (again.restartsUsed, again.faults) == (2, 2)
    failed = decided(replace(again, attempt=0), late)
    said = "The replica worker 0 exited with a non-zero status of 42, and the job was started again 2 times."
    assert (failed.state, failed.errorMessage) == ("FAILED", said)
    killed = view(record("worker-0", "EXITED", 137), plan=WHOLE, in_state=1e4)
    other = decided(job(restartsUsed=2, faults=1), killed)
    assert (other.restartsUsed, other.faults) == (2, 1), "a kill gives back what kills took"
    assert decided(job(restartsUsed=2, faults=2), killed).state == "FAILED"


@pytest.mark.parametrize(
    "cause",
    [
        view(record("worker-0", "EXITED", 134), plan=WHOLE, in_state=1e4),
        view(record("worker-0", "EXITED", 137, outOfMemory=True), plan=WHOLE, in_state=1e4),
        view(record("worker-0", "EXITED", 137, restartsUsed=2, faults=1), in_state=1e4),
        view(
            record("worker-0", faults=1, terminationReason="signal 11 (SIGSEGV)"),
            record("worker-1", "EXITED", 1),
            exited={"worker-1": 9.0},
            killed={"worker-0": 9.0},
            in_state=1e4,
        ),
        view(plan=replace(PLAN, stallTimeout=900.0), since_output=900.0, in_state=1e4),
    ],
    ids=["abort", "memory", "a kill after a fault", "a peer's fault", "a stall"],
)
def test_what_programs_do_to_themselves_starts_no_job_for_ever(cause: View) -> None:
    first = decided(job(restartsUsed=1), cause)
    assert (first.state, first.attempt, first.restartsUsed, first.faults) == ("RUNNING", 1, 1, 1)
    limit = cause.plan.maxRestarts if cause.plan.whole else cause.plan.maxRetries
    assert decided(job(restartsUsed=limit, faults=limit), cause).state == "FAILED"


def test_peers_that_need_one_another_start_again_at_the_first_kill() -> None:
    killed = view(record("worker-0", "EXITED", 137), plan=WHOLE)
    again = decided(job(restartsUsed=1), killed)
    assert (again.attempt, again.restartsUsed) == (1, 2)
    assert again.events == [Event(NOW, "worker 0 was killed (signal 9 (SIGKILL))")]
    assert decided(job(restartsUsed=2), killed).state == "FAILED"  # maxRestarts, not maxRetries
    spare = replace(WHOLE, optionalRoles=["worker"])
    assert decide(job(), replace(killed, plan=spare)) is None
    assert decided(job(), view(record("worker-0", "EXITED", 137, restartsUsed=2), plan=spare)).droppedReplicas == ["worker-0"]


def test_an_optional_replica_is_gone_on_without() -> None:
    killed = view(record("worker-1", "EXITED", 137, restartsUsed=2), plan=SPARE)
    new = decided(job(), killed)
    assert (new.state, new.attempt, new.droppedReplicas) == ("RUNNING", 0, ["worker-1"])
    assert new.events == [Event(NOW, "goes on without worker-1 (signal 9 (SIGKILL)) after 2 restarts")]
    assert decide(new, killed) is None
    hopeless = record("worker-1", "EXITED", 137, crashLooping=True, consecutiveFailures=3)
    new = decided(job(), view(hopeless, plan=SPARE))
    assert new.events == [Event(NOW, "goes on without worker-1 (signal 9 (SIGKILL)), the same 3 times in a row")]
    assert decide(new, view(hopeless, plan=SPARE)) is None


def test_the_same_death_at_once_fails_the_job() -> None:
    dead = record("ps-0", "EXITED", 139, crashLooping=True, consecutiveFailures=3, errorMessage="last line")
    new = decided(job(), view(dead))
    assert (new.state, new.errorMessage) == (
        "FAILED",
        "The replica ps 0 exited with a non-zero status of 139 (signal 11 (SIGSEGV)), the same 3 times in a row.\nlast line",
    )


@pytest.mark.parametrize(
    ("code", "memory", "said"),
    [(137, False, "signal 9 (SIGKILL)"), (137, True, "signal 9 (SIGKILL), out of memory"), (255, False, "status 255")],
)
def test_what_killed_a_trainer(code: int, memory: bool, said: str) -> None:
    assert termination_reason(record("ps-0", "EXITED", code, outOfMemory=memory)) == said


# A lost host, silence, and limits


def test_a_lost_host_is_waited_for_then_fails_the_job() -> None:
    for silence in (59.0, 60.0, 160.0):
        new = decide(job(), view(silence={"worker-1": silence}))
        assert new is None or (new.state, new.attempt) == ("RUNNING", 0)
    new = decided(job(), view(silence={"worker-1": 160.1}))
    assert (new.state, new.errorMessage) == ("FAILED", "The replica worker 1 is lost: no heartbeat for 160 s.")
    assert [r["state"] for r in new.replicas] == ["RUNNING", "RUNNING", "LOST", "RUNNING"]
    two = decided(job(), view(silence={"worker-1": 161.0, "ps-0": 161.0}))
    assert two.errorMessage == "The replicas worker 1, ps 0 are lost: no heartbeat for 160 s."
    done = view(record("worker-1", "EXITED", 0), silence={"worker-1": 500.0})
    assert decide(job(), done) is None
    spare = decide(job(), view(plan=SPARE, silence={"worker-1": 500.0}))
    assert spare is None or spare.state == "RUNNING"


def test_who_is_lost_is_said_once_and_who_is_back() -> None:
    gone = view(silence={"ps-0": 60.0})
    new = decided(job(), gone)
    assert (new.state, new.lostReplicas) == ("RUNNING", ["ps-0"])
    assert new.events[-1].cause.startswith(
        "ps-0 is lost, no heartbeat for 60 s: pulumi up brings it back, else the job is FAILED in 100 s"
    )
    assert decide(new, gone) is None
    back = decided(new, view())
    assert (back.lostReplicas, back.events[-1].cause) == ([], "ps-0 is heard of again")


def test_preparing_does_not_last_for_ever() -> None:
    up = view(plan=PLAN, in_state=300.1)
    up = replace(up, replicas={name: up.replicas[name] for name in NAMES[:2]})
    new = decided(job(JobState.PREPARING), up)
    assert new.errorMessage == "The replicas worker 1, ps 0 are not up 300 s after the first replica."
    assert decide(job(JobState.PREPARING), replace(up, in_state=300.0)) is None


def test_an_optional_replica_that_does_not_come_up_is_not_waited_for_for_ever() -> None:
    seen = view(record("worker-1", "PREPARING"), plan=SPARE, in_state=299.0)
    assert decide(job(JobState.PREPARING), seen) is None
    new = decided(job(JobState.PREPARING), replace(seen, in_state=300.0))
    assert new.state == "RUNNING"
    assert new.events == [Event(NOW, "goes on without worker-1, which did not come up")]


def test_a_job_that_runs_too_long_is_cancelled() -> None:
    assert decide(job(runSeconds=604799.9), view()) is None
    new = decided(job(runSeconds=604800.0), view())
    assert (new.state, new.errorMessage) == ("CANCELLING", "The job ran for longer than maxRunningTime, 604800 s.")
    ended = decided(new, view(*(record(name, "EXITED", 143) for name in NAMES)))
    assert (ended.state, ended.errorMessage) == ("CANCELLED", new.errorMessage)


def test_a_job_that_stands_still_starts_again() -> None:
    plan = replace(PLAN, stallTimeout=60.0)
    assert decide(job(), view(since_output=1e9)) is None
    assert decide(job(), view(plan=plan, since_output=59.9)) is None
    new = decided(job(), view(plan=plan, since_output=60.0))
    assert (new.attempt, new.events[0].cause) == (1, "no replica printed a line for 60 s (stallTimeout)")
    failed = decided(job(restartsUsed=1), view(plan=plan, since_output=60.0))
    assert failed.errorMessage == "No replica printed a line for 60 s (stallTimeout), and the job was started again 1 time."
    lost = decide(job(), view(plan=plan, since_output=60.0, silence={"ps-0": 70.0}))
    assert lost is None or lost.attempt == 0


def test_cancel_waits_for_those_that_live() -> None:
    cancelling = decided(job(), view(cancel_requested=True))
    assert cancelling.state == "CANCELLING"
    ended = [record(name, "EXITED", 143) for name in NAMES[:3]]
    assert decide(cancelling, view(*ended, silence={"ps-0": 29.9})) is None
    cancelled = decided(cancelling, view(*ended, silence={"ps-0": 30.0}))  # two leases
    assert (cancelled.state, cancelled.endTime) == ("CANCELLED", NOW)
    assert decided(job(JobState.QUEUED), view(cancel_requested=True)).state == "CANCELLING"
    assert decided(job(JobState.PREPARING), view(cancel_requested=True)).state == "CANCELLING"


def test_the_end_has_a_cost_where_hosts_have_a_price() -> None:
    seen = view(record("master-0", "EXITED", 0))
    new = decided(job(hourlyCost=2.18), seen)
    assert (new.state, new.cost) == ("SUCCEEDED", 1.09)
    assert decided(job(), seen) == replace(new, hourlyCost=None, cost=None)


def test_after_the_end_only_the_list_of_replicas_follows() -> None:
    ended = decided(job(), view(record("master-0", "EXITED", 0)))
    assert decide(ended, view(record("master-0", "EXITED", 0))) is None
    after = decided(ended, view(record("master-0", "EXITED", 0), record("ps-0", "EXITED", 143)))
    assert replace(after, replicas=ended.replicas) == ended
    assert after.replicas[3]["exitCode"] == 143


def test_stopped_leaves_lost_hosts_aside() -> None:
    failed = job(JobState.FAILED)
    assert not stopped(failed, view())
    assert stopped(failed, view(*(record(name, "EXITED", 143) for name in NAMES)))
    assert stopped(failed, view(silence=dict.fromkeys(NAMES, 60.0)))
    assert not stopped(failed, view(silence=dict.fromkeys(NAMES, 59.0)))
    assert stopped(job(JobState.CANCELLING), view(silence=dict.fromkeys(NAMES, 30.0)))


# As properties

_seconds = st.sampled_from([0.0, 1.0, 12.5, 29.0, 30.0, 61.0, 300.5, 700.0, 10_000.0])
_per_name = st.dictionaries(st.sampled_from(NAMES), _seconds)
_records = st.builds(
    ReplicaRecord,
    name=st.just(""),
    state=st.sampled_from(ReplicaState),
    exitCode=st.sampled_from([None, 0, 1, 2, 127, 128, 137, 143, 255]),
    signal=st.sampled_from([None, 9, 15]),
    killed=st.booleans(),
    restarts=st.integers(0, 3),
    restartsUsed=st.integers(0, 3),
    attempt=st.integers(0, 2),
    crashLooping=st.booleans(),
    errorMessage=st.sampled_from(["", "last line"]),
)
_plans = st.builds(
    replace,
    st.just(PLAN),
    restartPolicy=st.sampled_from(["all", "replica"]),
    optionalRoles=st.lists(st.sampled_from(["worker", "ps", "master"]), max_size=2),
    stallTimeout=st.sampled_from([None, 60.0]),
    successPolicy=st.sampled_from(["chief", "all"]),
    gracePeriod=st.sampled_from([0.0, 30.0]),
)
_replicas = st.dictionaries(st.sampled_from(NAMES), _records).map(
    lambda found: {name: replace(r, name=name) for name, r in found.items()}
)
_views = st.builds(View, _plans, _replicas, st.just(NOW), _per_name, _per_name, _per_name, _seconds, _seconds, st.booleans())
_jobs = st.builds(
    job,
    st.sampled_from(JobState),
    attempt=st.integers(0, 2),
    restartsUsed=st.integers(0, 2),
    runSeconds=st.sampled_from([0.0, 1e6]),
    droppedReplicas=st.lists(st.sampled_from(["worker-0", "ps-0"]), unique=True),
)


@given(_jobs, _views)
def test_only_moves_of_the_table(before: JobRecord, seen: View) -> None:
    after = decide(before, seen)
    if after is None:
        return
    assert after != before
    assert (after.jobId, after.lease, after.createTime) == (before.jobId, before.lease, before.createTime)
    if before.final:
        assert replace(after, replicas=before.replicas) == before
    elif after.state != before.state:
        assert after.state in TRANSITIONS[before.state]
        assert after.attempt == before.attempt
        assert after.state != JobState.FAILED or after.errorMessage
        assert (after.endTime is not None) == after.final
    else:
        assert after.attempt - before.attempt in (0, 1)
        assert set(before.droppedReplicas) <= set(after.droppedReplicas) or after.droppedReplicas == []
        assert seen.plan.chief not in after.droppedReplicas
    limit = seen.plan.maxRestarts if seen.plan.whole else seen.plan.maxRetries
    assert after.restartsUsed <= max(limit, before.restartsUsed)


@given(_jobs, _views)
@example(job(), View(PLAN, {"worker-0": record("worker-0", "EXITED", 1)}, NOW, killed={"master-0": 0.0}))  # its record is gone
def test_a_view_leads_to_an_end_of_deciding(before: JobRecord, seen: View) -> None:
    # By itself a leader begins another attempt's view with `in_state` and `since_output` at 0.
    steps = 0
    while (after := decide(before, seen)) is not None:
        if after.attempt != before.attempt:
            seen = replace(seen, in_state=0.0, since_output=0.0)
        before, steps = after, steps + 1
        assert steps < 16


@given(_jobs, _views)
def test_a_job_whose_chief_is_done_never_fails(before: JobRecord, seen: View) -> None:
    done = record("master-0", "EXITED", 0)
    seen = replace(seen, plan=replace(seen.plan, successPolicy="chief"), replicas={**seen.replicas, "master-0": done})
    if before.state != JobState.FAILED:
        while (after := decide(before, seen)) is not None:
            assert after.state != JobState.FAILED
            before = after


@given(_jobs, _views)
def test_an_exit_where_nobody_was_killed_never_leads_to_another_attempt(before: JobRecord, seen: View) -> None:
    failed = record("worker-0", "EXITED", 1, attempt=before.attempt)
    seen = replace(seen, killed={}, silence={}, replicas={**seen.replicas, "worker-0": failed}, exited={"worker-0": 60.0})
    after = decide(before, seen)
    assert after is None or after.attempt == before.attempt


def test_a_study_that_fails_says_so_in_its_own_words() -> None:
    tuned = replace(PLAN, study=Study([]))
    failed = record("worker-0", "EXITED", 1, errorMessage="Trial 3: x\nerror: trial 3 FAILED\nerror: 3 of 4 trials FAILED\nbye")
    ended = decided(job(), view(failed, plan=tuned, exited={"worker-0": 60.0}))
    assert (ended.state, ended.errorMessage) == (JobState.FAILED, "3 of 4 trials FAILED")
    ended = decided(job(), view(failed, exited={"worker-0": 60.0}))
    assert ended.errorMessage.startswith("The replica worker 0 exited with a non-zero status of 1.")


# A host that is preempted, or off


def test_a_preempted_replica_is_lost_at_once_and_its_host_is_started_once_it_is_off() -> None:
    taken = record("worker-0", "EXITED", 143, preempted=True)
    seen = view(taken, startable=NAMES)
    new = decided(job(), seen)
    said = "worker-0 is preempted: its host is to be started again, else the job is FAILED in 100 s"
    assert (new.state, new.lostReplicas, new.events[-1].cause) == ("RUNNING", ["worker-0"], said)
    assert to_start(new, seen) == []
    off = replace(seen, silence={"worker-0": 12.5})
    assert to_start(new, off) == ["worker-0"]
    assert to_start(new, replace(off, startable=())) == []
    for other in (job(JobState.CANCELLING), job(JobState.FAILED), job(droppedReplicas=["worker-0"])):
        assert to_start(other, off) == []
    assert to_start(new, replace(off, cancel_requested=True)) == []


def test_a_host_of_which_nothing_is_heard_is_started() -> None:
    silent = view(startable=NAMES, silence={"worker-0": 60.0, "ps-0": 59.9})
    assert to_start(job(), silent) == ["worker-0"]
    never = View(PLAN, {"master-0": record("master-0")}, NOW, silence={"ps-0": 60.0}, startable=NAMES)
    assert to_start(job(JobState.PREPARING), never) == ["ps-0"]
    done = view(record("worker-0", "EXITED", 0), startable=NAMES, silence={"worker-0": 600.0})
    assert to_start(job(), done) == []


@pytest.mark.parametrize("plan", [PLAN, WHOLE])
def test_what_follows_from_a_preemption_waits_for_the_host(plan: Plan) -> None:
    taken, failed = record("worker-0", "EXITED", 143, preempted=True), record("ps-0", "EXITED", 1)
    known = job(lostReplicas=["worker-0"])
    assert decide(known, view(taken, failed, plan=plan, exited={"ps-0": 50.0}, killed={"worker-0": 50.0})) is None
    mended = record("worker-0", restarts=1, terminationReason=PREEMPTED)
    back = decided(known, view(mended, failed, plan=plan, exited={"ps-0": 50.0}, killed={"worker-0": 0.0}))
    assert (back.attempt, back.restartsUsed) == (1, 0)
    assert back.events[-1].cause == "worker 0 was preempted, and the others could not go on without it"


def test_preemptions_are_counted_against_no_limit() -> None:
    ended = record("worker-0", "EXITED", 143, terminationReason=PREEMPTED)
    new = decided(job(restartsUsed=2), view(ended, plan=WHOLE))
    assert (new.state, new.attempt, new.restartsUsed, new.events[-1].cause) == ("RUNNING", 1, 2, "worker 0 was preempted")
    assert decided(job(restartsUsed=2), view(replace(ended, terminationReason=""), plan=WHOLE)).state == "FAILED"


def test_peers_that_cannot_go_on_without_it_start_when_the_preempted_one_is_back() -> None:
    peer, taken = record("master-0", "EXITED", 143), record("worker-0", "EXITED", 143, preempted=True)
    known = job(restartsUsed=2, lostReplicas=["worker-0"])
    assert decide(known, view(peer, taken, plan=WHOLE)) is None
    back = replace(taken, preempted=False, terminationReason=PREEMPTED)
    new = decided(known, view(peer, back, plan=WHOLE))
    assert (new.state, new.attempt, new.restartsUsed, new.events[-1].cause) == ("RUNNING", 1, 2, "worker 0 was preempted")


def test_a_job_that_prepares_waits_longer_for_hosts_that_are_started() -> None:
    seen = view(plan=PLAN, in_state=399.0, startable=NAMES, silence={"ps-0": 60.0})
    seen = replace(seen, replicas={name: seen.replicas[name] for name in NAMES[:3]})
    assert decide(job(JobState.PREPARING), seen) is None
    assert decided(job(JobState.PREPARING), replace(seen, startable=())).state == "FAILED"
    too_long = decided(job(JobState.PREPARING), replace(seen, in_state=400.1))
    assert too_long.errorMessage == "The replica ps 0 is not up 400 s after the first replica."
