"""The rules of the leader: single cases, and properties of every view that a bucket can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hosts.agent.job_rules import PREEMPTED, View, decide, exit_message, replicas_to_start, stopped, termination_reason
from jobs.firsterror import FirstError
from jobs.records import Event, JobRecord, Plan, ReplicaRecord
from jobs.states import TRANSITIONS, JobState, ReplicaState
from jobs.study import Study

NAMES = ["master-0", "worker-0", "worker-1", "ps-0"]
PLAN = Plan("job01", NAMES, "trainer.task", [], {}, maxRestarts=2, maxRetries=1, maxWaitTime=100.0)
RESTART_ALL = replace(PLAN, restartPolicy="all")
OPTIONAL_WORKERS = replace(PLAN, optionalRoles=["worker"])
NOW = "2026-01-31T12:00:00.000Z"
ERROR = FirstError("2026-01-31T11:59:00.000Z", "ValueError: x")
START = "2026-01-31T11:30:00.000Z"


def record(name: str, state: str = "RUNNING", code: int | None = None, **changes: Any) -> ReplicaRecord:
    signal = code - 128 if code and 128 < code < 255 else None
    base = ReplicaRecord(name, state=ReplicaState(state), exitCode=code, signal=signal, startTime=START, heartbeatTime=NOW)
    base = replace(base, awaits_restart=state == "EXITED" and signal is not None)
    return replace(base, endTime=NOW if state == "EXITED" else None, **changes)


def view(*records: ReplicaRecord, plan: Plan = PLAN, **fields: Any) -> View:
    """Return a view in which all replicas run, except the given ones."""
    return View(plan, {name: record(name) for name in NAMES} | {r.name: r for r in records}, NOW, **fields)


def job(state: JobState = JobState.RUNNING, **changes: Any) -> JobRecord:
    started = START if state not in (JobState.QUEUED, JobState.PREPARING) else None
    return JobRecord("job01", **{"state": state, "createTime": START, "startTime": started, **changes})


def advance(before: JobRecord, snapshot: View) -> JobRecord:
    new = decide(before, snapshot)
    assert new is not None
    return new


def test_a_job_prepares_and_runs_once_all_replicas_are_up() -> None:
    empty = View(PLAN, {}, NOW)
    assert empty == View(PLAN, {}, NOW, {}, {}, {}, 0.0, 0.0, False, ())
    assert (empty.silent_for("ps-0"), empty.exited_for("ps-0")) == (0.0, 0.0)
    for plan, hosts in ((PLAN, ["h0"]), (replace(PLAN, hosts={"master-0": "h1", "ps-0": "h2"}), ["h1", "h2"])):
        prepared = advance(job(JobState.QUEUED, hosts=["h0"]), View(plan, {}, NOW))
        assert (prepared.state, prepared.hosts, prepared.prepareTime) == ("PREPARING", hosts, NOW)
    assert decide(job(JobState.PREPARING), view(record("ps-0", "PREPARING"))) is None
    assert decide(job(JobState.PREPARING), view(record("ps-0", attempt=-1))) is None  # of an earlier attempt
    running = advance(job(JobState.PREPARING), view(record("ps-0", "EXITED", 0)))
    assert (running.state, running.startTime) == ("RUNNING", NOW)
    assert decide(running, view(record("ps-0", "EXITED", 0))) is None


def test_the_chief_s_end_decides_though_others_fail() -> None:
    snapshot = view(
        record("master-0", "EXITED", 0), record("worker-0", "EXITED", 1), cancel_requested=True, since_exit={"worker-0": 9.0}
    )
    new = advance(job(runSeconds=1e9), snapshot)
    assert (new.state, new.errorMessage, new.endTime) == ("SUCCEEDED", "", NOW)
    assert [r["name"] for r in new.replicas] == NAMES
    assert set(new.replicas[0]) == {"name", "state", "exitCode", "starts", "restarts", "startTime", "lastStartTime", "endTime"}


def test_replicas_that_failed_when_the_chief_succeeded_are_named() -> None:
    failed = (record("worker-0", "EXITED", 1), record("worker-1", "EXITED", 137), record("ps-0", "EXITED", 1))
    new = advance(job(droppedReplicas=["worker-1"]), view(CHIEF_DONE, *failed))
    hint = "set successPolicy: all if the job depends on it"
    assert [event.cause for event in new.events] == [
        f"worker-0 ended with status 1, and its work may be missing: {hint}",
        "ps-0 ended with status 1, and its work may be missing: its log has the cause",
    ]
    assert advance(job(), view(CHIEF_DONE, record("ps-0", "EXITED", 143))).events == [], "its host went down"
    optional = advance(job(), view(CHIEF_DONE, failed[1], plan=OPTIONAL_WORKERS))
    assert [event.cause for event in optional.events] == [
        "worker-1 ended with signal 9 (SIGKILL), and its work may be missing: its role is in optionalRoles"
    ]


def test_a_job_that_ends_at_once_has_a_start_time() -> None:
    new = advance(job(JobState.PREPARING), view(record("master-0", "EXITED", 0)))
    assert (new.state, new.startTime) == ("SUCCEEDED", START)


def test_a_worker_that_succeeded_changes_nothing() -> None:
    assert decide(job(), view(record("worker-0", "EXITED", 0))) is None


# Replicas that still work when the chief succeeds

GRACE = replace(PLAN, gracePeriod=30.0)
ALL = replace(GRACE, successPolicy="all", optionalRoles=["evaluator"])
CHIEF_DONE = record("master-0", "EXITED", 0)


def succeeded(*names: str) -> list[ReplicaRecord]:
    return [record(name, "EXITED", 0) for name in names]


def test_working_replicas_get_a_grace_period_when_the_chief_ends() -> None:
    snapshot = view(CHIEF_DONE, *succeeded("worker-1"), plan=GRACE, since_exit={"master-0": 0.0})
    earlier = replace(snapshot, since_exit={"master-0": 2.0}, silence={"worker-0": 3.0})
    assert decide(job(), earlier) is None, "worker-0 may have ended, too"
    assert advance(job(), replace(earlier, silence={"worker-0": 1.0})).events
    assert advance(job(), replace(earlier, silence={"worker-0": 59.0})).events, "it is late"
    updated = advance(job(), snapshot)
    cause = "the job is done by its successPolicy, but worker-0 still worked: up to 30 s are given (gracePeriod)"
    assert (updated.state, [event.cause for event in updated.events]) == ("RUNNING", [cause])
    assert decide(updated, replace(snapshot, since_exit={"master-0": 29.9})) is None
    over = advance(updated, replace(snapshot, since_exit={"master-0": 30.0}))
    assert (over.state, over.errorMessage) == ("SUCCEEDED", "")
    hint = "to wait longer, set a longer gracePeriod, or successPolicy: all"
    assert over.events[-1].cause == f"worker-0 still worked when the job ended, and was stopped: {hint}"
    several = advance(updated, view(CHIEF_DONE, plan=GRACE, since_exit={"master-0": 30.0})).events[-1].cause
    assert several == f"worker-0, worker-1 still worked when the job ended, and were stopped: {hint}"


@pytest.mark.parametrize(
    "other",
    [
        record("worker-0", "EXITED", 0),
        record("worker-0", "EXITED", 1),
        record("worker-0", "EXITED", 137),
        record("worker-0", preempted=True),
    ],
)
def test_a_job_does_not_wait_for_replicas_that_do_not_work(other: ReplicaRecord) -> None:
    ended = advance(job(), view(CHIEF_DONE, other, *succeeded("worker-1"), plan=GRACE))
    assert ended.state == "SUCCEEDED"
    assert not [event for event in ended.events if "still worked" in event.cause]


def test_the_grace_period_is_for_replicas_other_than_parameter_servers() -> None:
    for changes, waits in (({}, True), ({"droppedReplicas": ["worker-0"]}, False)):
        new = advance(job(**changes), view(CHIEF_DONE, *succeeded("worker-1"), plan=GRACE))
        assert (new.state == "RUNNING") == waits
    assert advance(job(), view(CHIEF_DONE, *succeeded("worker-0", "worker-1"), plan=GRACE)).state == "SUCCEEDED", (
        "a ps does not count"
    )
    late = advance(job(), view(CHIEF_DONE, record("worker-0", "PREPARING"), *succeeded("worker-1"), plan=GRACE))
    assert late.state == "RUNNING", "its host was slow to start it"
    cancelled = view(CHIEF_DONE, plan=GRACE, cancel_requested=True)
    assert advance(job(), cancelled).state == "SUCCEEDED", "a cancelled job has no grace period"


def test_failures_during_the_grace_period_do_not_fail_the_job() -> None:
    others = [record("worker-0", "EXITED", 1), record("ps-0", "EXITED", 137, crashLooping=True)]
    snapshot = view(CHIEF_DONE, *others, plan=GRACE, since_exit={"worker-0": 9.0}, silence={"ps-0": 500.0})
    for state in (JobState.RUNNING, JobState.PREPARING):
        before, after = job(state), decide(job(state), snapshot)
        while after is not None:
            assert (after.state, after.attempt) in (("RUNNING", 0), ("PREPARING", 0))
            before, after = after, decide(after, snapshot)
        assert advance(before, replace(snapshot, since_exit={"master-0": 30.0})).state == "SUCCEEDED"


def test_success_policy_all_exempts_servers_and_optional_roles() -> None:
    plan = replace(ALL, replicas=[*NAMES, "evaluator-0"])
    evaluator = record("evaluator-0")
    snapshot = view(CHIEF_DONE, *succeeded("worker-0"), evaluator, plan=plan, since_exit={"master-0": 1e6, "worker-0": 1e6})
    assert decide(job(), snapshot) is None
    failed = record("worker-1", "EXITED", 1)
    exited = {**snapshot.since_exit, "worker-1": 9.0}
    assert (
        advance(job(), replace(snapshot, replicas={**snapshot.replicas, "worker-1": failed}, since_exit=exited)).state
        == "FAILED"
    )
    cancelled = advance(job(), replace(snapshot, cancel_requested=True))
    assert cancelled.state == "CANCELLING", "nothing is done yet"
    last = view(*succeeded("master-0", "worker-0", "worker-1"), evaluator, plan=plan, since_exit=exited | {"worker-1": 0.0})
    assert "evaluator-0 still worked" in advance(job(), last).events[-1].cause
    assert advance(job(), replace(last, since_exit=exited | {"worker-1": 30.0})).state == "SUCCEEDED"
    needed = replace(plan, optionalRoles=[])
    assert decide(job(), replace(last, plan=needed)) is None


@pytest.mark.parametrize(("policy", "state"), [("replica", "SUCCEEDED"), ("all", "RUNNING")])
def test_success_in_an_earlier_attempt_counts_unless_all_restart(policy: str, state: str) -> None:
    plan = replace(ALL, restartPolicy=policy)
    others = [record(name, "EXITED", 0, attempt=1) for name in ("worker-0", "worker-1")]
    after = decide(job(attempt=1), view(CHIEF_DONE, *others, plan=plan))
    assert (after.state if after else "RUNNING") == state
    chief = replace(CHIEF_DONE, attempt=1)
    assert advance(job(attempt=1), view(chief, *others, plan=plan)).state == "SUCCEEDED"


# An exit


@pytest.mark.parametrize(("name", "code"), [("worker-0", 1), ("ps-0", 127), ("master-0", 3), ("worker-0", 255)])
def test_an_exit_fails_the_job_after_one_second(name: str, code: int) -> None:
    failed = record(name, "EXITED", code, errorMessage="Traceback\nValueError: x", firstError=ERROR)
    snapshot = view(failed, since_exit={name: 0.99})
    assert decide(job(), snapshot) is None
    new = advance(job(), replace(snapshot, since_exit={name: 1.0}))
    sentence = f"The replica {name.replace('-', ' ')} exited with a non-zero status of {code}. First error: ValueError: x"
    assert (new.state, new.errorMessage) == ("FAILED", f"{sentence}\nTraceback\nValueError: x")


def test_a_program_that_failed_without_an_error_has_its_last_line() -> None:
    quiet = record("master-0", "EXITED", 1, errorMessage="step 1\nno data in /bucket/data\n\n")
    sentence = "The replica master 0 exited with a non-zero status of 1."
    assert exit_message(quiet) == f"{sentence} Last line: no data in /bucket/data\n{quiet.errorMessage}"
    assert exit_message(replace(quiet, errorMessage=" ")) == f"{sentence}\n "
    bold = replace(
        quiet, errorMessage="\x1b[1mno such column\x1b[0m\nArguments", firstError=replace(ERROR, message="no such column")
    )
    assert exit_message(bold).startswith(f"{sentence} First error: no such column\n")
    long_ago = replace(quiet, firstError=ERROR)
    assert exit_message(long_ago) == exit_message(quiet)


def test_the_wait_after_an_exit_is_at_most_one_heartbeat() -> None:
    quick = replace(PLAN, heartbeatSeconds=0.1)
    assert advance(job(), view(record("ps-0", "EXITED", 1), plan=quick, since_exit={"ps-0": 0.1})).state == "FAILED"


def test_the_first_to_exit_is_named() -> None:
    snapshot = view(
        record("worker-0", "EXITED", 1), record("worker-1", "EXITED", 2), since_exit={"worker-0": 2.0, "worker-1": 3.0}
    )
    assert advance(job(), snapshot).errorMessage == "The replica worker 1 exited with a non-zero status of 2."


@pytest.mark.parametrize(
    ("exited", "killed", "again"),
    [
        (2.0, 32.0, True),  # 30 s before the exit
        (2.0, 32.1, False),
        (2.0, 1.0, True),  # it was reported after the exit that it caused
        (0.0, 0.0, True),
    ],
)
@pytest.mark.parametrize("plan", [PLAN, RESTART_ALL])
def test_an_exit_soon_after_a_kill_is_attributed_to_it(exited: float, killed: float, again: bool, plan: Plan) -> None:
    failed, restarted = record("worker-0", "EXITED", 1), record("ps-0", restarts=1)
    snapshot = view(failed, restarted, plan=plan, since_exit={"worker-0": exited}, since_disruption={"ps-0": killed})
    new = advance(job(), snapshot)
    if again:
        assert (new.state, new.attempt, new.restartsUsed, new.faults) == ("RUNNING", 1, 1, 0)
        assert new.events == [Event(NOW, "ps 0 was killed, and the others could not continue without it")]
    else:
        assert new.state == "FAILED"


@pytest.mark.parametrize("plan", [PLAN, RESTART_ALL])
def test_a_restart_code_before_an_exit_restarts_the_job(plan: Plan) -> None:
    failed = record("master-0", "EXITED", 1, errorMessage="no such column")
    asks = record("worker-0", "EXITED", 42, awaits_restart=True, terminationReason="status 42")
    late = view(failed, asks, plan=plan, since_exit={"master-0": 5.0, "worker-0": 4.9}, since_disruption={"worker-0": 4.9})
    assert (
        advance(job(), late).errorMessage
        == "The replica master 0 exited with a non-zero status of 1. Last line: no such column\nno such column"
    )
    first = replace(late, since_disruption={"worker-0": 5.0})
    again = advance(job(), first)
    assert (again.state, again.attempt) == ("RUNNING", 1)
    assert again.events == [Event(NOW, "worker 0 ended (status 42), and the others could not continue without it")]
    exhausted = advance(job(restartsUsed=2), first)
    assert exhausted.errorMessage == (
        "Worker 0 ended (status 42), and the others could not continue without it, and the job was started again "
        f"{2 if plan.restarts_all else 1} time{'s' if plan.restarts_all else ''}. "
        "The replica master 0 exited with a non-zero status of 1. Last line: no such column\nno such column"
    )


@pytest.mark.parametrize(
    ("reason", "since", "attempt"),
    [
        ("signal 15 (SIGTERM)", 4.9, 0),
        ("signal 15 (SIGTERM)", 5.9, 0),  # a little earlier: an end takes up to 1 s to be reported
        ("signal 15 (SIGTERM)", 6.1, 1),
        ("signal 9 (SIGKILL)", 4.9, 1),
        ("signal 11 (SIGSEGV)", 4.9, 1),
        ("", 4.9, 1),  # its host was lost
    ],
)
@pytest.mark.parametrize("plan", [PLAN, RESTART_ALL])
def test_a_sigterm_soon_before_an_exit_may_be_caused_by_it(reason: str, since: float, attempt: int, plan: Plan) -> None:
    failed, ended = record("master-0", "EXITED", 1), record("worker-0", "EXITED", 143, terminationReason=reason)
    snapshot = view(
        failed, ended, plan=plan, since_exit={"master-0": 5.0, "worker-0": since}, since_disruption={"worker-0": since}
    )
    assert advance(job(), snapshot).attempt == attempt


def test_a_sigterm_restarts_the_job_once_no_exit_can_be_its_cause() -> None:
    ended = record("worker-0", "EXITED", 143, terminationReason="signal 15 (SIGTERM)")
    assert decide(job(), view(ended, plan=RESTART_ALL, since_disruption={"worker-0": 0.9})) is None
    assert advance(job(), view(ended, plan=RESTART_ALL, since_disruption={"worker-0": 1.0})).attempt == 1
    killed = record("worker-1", "EXITED", 137)
    new = advance(job(), view(ended, killed, plan=RESTART_ALL, since_disruption={"worker-0": 0.9, "worker-1": 0.1}))
    assert new.events == [Event(NOW, "worker 1 was killed (signal 9 (SIGKILL))")]


def test_an_exit_is_not_attributed_to_the_replica_s_own_kill() -> None:
    snapshot = view(
        record("worker-0", "EXITED", 1, restarts=1), since_exit={"worker-0": 2.0}, since_disruption={"worker-0": 5.0}
    )
    assert advance(job(), snapshot).state == "FAILED"


def test_a_verdict_waits_for_unresponsive_hosts() -> None:
    failed = record("worker-0", "EXITED", 1)
    for name, silence, waits in (("ps-0", 12.5, True), ("ps-0", 4.9, False), ("ps-0", 600.0, True), ("worker-0", 600.0, False)):
        snapshot = view(failed, since_exit={"worker-0": 5.0}, silence={name: silence}, plan=replace(PLAN, maxWaitTime=1e9))
        new = decide(replace(job(), lostReplicas=[]), snapshot)
        assert (new is None or new.state == "RUNNING") == waits, (name, silence)
    peer_done = view(failed, record("ps-0", "EXITED", 0), since_exit={"worker-0": 5.0}, silence={"ps-0": 60.0})
    assert advance(job(), peer_done).state == "FAILED"
    optional = view(failed, plan=replace(PLAN, optionalRoles=["ps"]), since_exit={"worker-0": 5.0}, silence={"ps-0": 60.0})
    assert advance(job(), optional).state == "FAILED"


@pytest.mark.parametrize(
    ("peer", "silence", "waits"),
    [
        (record("ps-0"), 4.9, False),
        (record("ps-0"), 5.0, True),  # in one poll with the exit: it may have been sent before
        (record("ps-0"), 12.4, True),
        (record("ps-0", "PREPARING"), 5.0, True),
        (record("ps-0", "EXITED", 143, terminationReason="signal 15 (SIGTERM)"), 5.0, False),
        (record("ps-0", "EXITED", 0), 5.0, False),
    ],
)
@pytest.mark.parametrize("roles", [[], ["ps"]])
def test_a_verdict_waits_for_a_heartbeat_of_each_running_peer(
    peer: ReplicaRecord, silence: float, waits: bool, roles: list[str]
) -> None:
    failed, plan = record("worker-0", "EXITED", 1), replace(PLAN, optionalRoles=roles)
    snapshot = view(failed, peer, plan=plan, since_exit={"worker-0": 5.0}, silence={"ps-0": silence})
    assert (decide(job(), snapshot) is None) == waits
    killed = replace(
        snapshot, replicas={**snapshot.replicas, "ps-0": record("ps-0", restarts=1)}, since_disruption={"ps-0": 0.0}
    )
    assert advance(job(), killed).attempt == 1


def test_ends_in_an_earlier_attempt_are_ignored() -> None:
    old = [
        record("worker-0", "EXITED", 1),
        record("worker-1", "EXITED", 137, restartsUsed=2),
        record("ps-0", "EXITED", 137, crashLooping=True),
    ]
    assert decide(job(attempt=1), view(*old, since_exit={"worker-0": 9.0})) is None


# A kill


def test_a_kill_that_the_host_restarts_is_ignored_by_the_leader() -> None:
    assert (
        decide(job(), view(record("ps-0", "PREPARING", 137, restarts=1, restartsUsed=1), since_disruption={"ps-0": 0.0}))
        is None
    )


def test_a_stopped_unit_is_expected_back() -> None:
    assert decide(job(), view(record("ps-0", "EXITED", 143, restarts=1, restartsUsed=1))) is None
    assert decide(job(), view(record("worker-0", "EXITED", 143, restartsUsed=1), plan=OPTIONAL_WORKERS)) is None


def test_kills_beyond_the_restarts_restart_the_job_and_then_fail_it() -> None:
    killed = record("ps-0", "EXITED", 137, restarts=2, restartsUsed=2, errorMessage="last line")
    again = advance(job(droppedReplicas=["worker-1"]), view(killed))
    assert (again.state, again.attempt, again.restartsUsed, again.droppedReplicas) == ("RUNNING", 1, 1, [])
    assert again.events == [Event(NOW, "ps 0 ended (signal 9 (SIGKILL)) after 2 restarts")]
    assert decide(again, view(killed)) is None
    failed = advance(again, view(replace(killed, attempt=1)))
    reason = "a non-zero status of 137 (signal 9 (SIGKILL)), and the job was started again 1 time.\nlast line"
    assert (failed.state, failed.errorMessage) == ("FAILED", f"The replica ps 0 exited with {reason}")
    out_of_memory = advance(again, view(replace(killed, attempt=1, outOfMemory=True)))
    assert "137 (signal 9 (SIGKILL), out of memory), and the job" in out_of_memory.errorMessage


def test_ten_good_minutes_reset_the_restarts() -> None:
    killed = view(record("ps-0", "EXITED", 137, attempt=1, restartsUsed=2), in_state=599.9)
    assert advance(job(attempt=1, restartsUsed=1), killed).state == "FAILED"
    again = advance(job(attempt=1, restartsUsed=1), replace(killed, in_state=600.0))
    assert (again.state, again.attempt, again.restartsUsed) == ("RUNNING", 2, 1)


def test_restart_codes_count_however_long_the_attempt_ran() -> None:
    ended = record("worker-0", "EXITED", 42, awaits_restart=True)
    late = view(ended, plan=RESTART_ALL, in_state=1e4)
    first = advance(job(restartsUsed=2), late)
    assert (first.attempt, first.restartsUsed, first.faults) == (1, 1, 1)
    assert first.events[-1].cause == "worker 0 ended (status 42)"
    again = advance(replace(first, attempt=0), late)
    assert (again.restartsUsed, again.faults) == (2, 2)
    failed = advance(replace(again, attempt=0), late)
    message = "The replica worker 0 exited with a non-zero status of 42, and the job was started again 2 times."
    assert (failed.state, failed.errorMessage) == ("FAILED", message)
    killed = view(record("worker-0", "EXITED", 137), plan=RESTART_ALL, in_state=1e4)
    other = advance(job(restartsUsed=2, faults=1), killed)
    assert (other.restartsUsed, other.faults) == (2, 1), "a kill after a good attempt resets the restarts used by kills"
    assert advance(job(restartsUsed=2, faults=2), killed).state == "FAILED"


@pytest.mark.parametrize(
    "cause",
    [
        view(record("worker-0", "EXITED", 134), plan=RESTART_ALL, in_state=1e4),
        view(record("worker-0", "EXITED", 137, outOfMemory=True), plan=RESTART_ALL, in_state=1e4),
        view(record("worker-0", "EXITED", 137, restartsUsed=2, faults=1), in_state=1e4),
        view(
            record("worker-0", faults=1, terminationReason="signal 11 (SIGSEGV)"),
            record("worker-1", "EXITED", 1),
            since_exit={"worker-1": 9.0},
            since_disruption={"worker-0": 9.0},
            in_state=1e4,
        ),
        view(plan=replace(PLAN, stallTimeout=900.0), since_output=900.0, in_state=1e4),
    ],
    ids=["abort", "memory", "a kill after a fault", "a peer's fault", "a stall"],
)
def test_faults_of_programs_do_not_restart_the_job_forever(cause: View) -> None:
    first = advance(job(restartsUsed=1), cause)
    assert (first.state, first.attempt, first.restartsUsed, first.faults) == ("RUNNING", 1, 1, 1)
    limit = cause.plan.maxRestarts if cause.plan.restarts_all else cause.plan.maxRetries
    assert advance(job(restartsUsed=limit, faults=limit), cause).state == "FAILED"


def test_restart_policy_all_restarts_the_job_at_the_first_kill() -> None:
    killed = view(record("worker-0", "EXITED", 137), plan=RESTART_ALL)
    again = advance(job(restartsUsed=1), killed)
    assert (again.attempt, again.restartsUsed) == (1, 2)
    assert again.events == [Event(NOW, "worker 0 was killed (signal 9 (SIGKILL))")]
    assert advance(job(restartsUsed=2), killed).state == "FAILED"  # maxRestarts, not maxRetries
    optional = replace(RESTART_ALL, optionalRoles=["worker"])
    assert decide(job(), replace(killed, plan=optional)) is None
    assert advance(job(), view(record("worker-0", "EXITED", 137, restartsUsed=2), plan=optional)).droppedReplicas == [
        "worker-0"
    ]


def test_the_job_continues_without_an_optional_replica() -> None:
    killed = view(record("worker-1", "EXITED", 137, restartsUsed=2), plan=OPTIONAL_WORKERS)
    new = advance(job(), killed)
    assert (new.state, new.attempt, new.droppedReplicas) == ("RUNNING", 0, ["worker-1"])
    assert new.events == [Event(NOW, "continues without worker-1 (signal 9 (SIGKILL)) after 2 restarts")]
    assert decide(new, killed) is None
    crash_looping = record("worker-1", "EXITED", 137, crashLooping=True, consecutiveFailures=3)
    new = advance(job(), view(crash_looping, plan=OPTIONAL_WORKERS))
    assert new.events == [Event(NOW, "continues without worker-1 (signal 9 (SIGKILL)), the same 3 times in a row")]
    assert decide(new, view(crash_looping, plan=OPTIONAL_WORKERS)) is None


def test_a_crash_loop_fails_the_job() -> None:
    crash_looping = record("ps-0", "EXITED", 139, crashLooping=True, consecutiveFailures=3, errorMessage="last line")
    new = advance(job(), view(crash_looping))
    assert (new.state, new.errorMessage) == (
        "FAILED",
        "The replica ps 0 exited with a non-zero status of 139 (signal 11 (SIGSEGV)), the same 3 times in a row.\nlast line",
    )


@pytest.mark.parametrize(
    ("code", "memory", "reason"),
    [(137, False, "signal 9 (SIGKILL)"), (137, True, "signal 9 (SIGKILL), out of memory"), (255, False, "status 255")],
)
def test_the_termination_reason(code: int, memory: bool, reason: str) -> None:
    assert termination_reason(record("ps-0", "EXITED", code, outOfMemory=memory)) == reason


@pytest.mark.parametrize(
    ("name", "limit", "hint"),
    [
        ("ps-0", 2_000_000_000, "2.0 GB: set a larger parameterServerType, or memory.ps for local hosts"),
        ("worker-0", None, "its host has: set a larger workerType, or memory.worker for local hosts"),
    ],
)
def test_a_trainer_out_of_memory_has_a_remedy(name: str, limit: int | None, hint: str) -> None:
    ended = record(name, "EXITED", 1, outOfMemory=True, memoryLimit=limit, errorMessage="sh: 1: ffmpeg: not found")
    remedy = f"This trainer needs more memory than {hint}, by pulumi config, and run pulumi up."
    sentence = f"The replica {name.replace('-', ' ')} exited with a non-zero status of 1, so."
    assert exit_message(ended, ", so") == f"{sentence} {remedy}\nsh: 1: ffmpeg: not found"


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Error initializing torch.distributed using env://: environment variable RANK expected, but not set",
        "KeyError: 'RANK'",
        "ValueError: coordinator_address should be defined.",
    ],
)
def test_a_program_that_misses_its_rank_has_a_remedy(line: str) -> None:
    remedy = "Only the master and workers have RANK and MASTER_ADDR: --replicas master, or worker if there are some, is enough."
    assert remedy in exit_message(record("ps-0", "EXITED", 1, errorMessage=line))
    assert remedy not in exit_message(record("worker-0", "EXITED", 1, errorMessage=line))
    for name in ("HOST", "JAX_PLATFORMS"):
        assert remedy not in exit_message(record("ps-0", "EXITED", 1, errorMessage=f"KeyError: '{name}'"))


def test_a_program_that_removes_its_own_folder_has_a_remedy() -> None:
    error = "OSError: [Errno 16] Device or resource busy: '/bucket/jobs/job01/output'"
    remedy = "JOB_DIR, HOME and /tmp cannot be removed or renamed: remove what is in them, or a folder below."
    sentence = f"The replica master 0 exited with a non-zero status of 1. {remedy}\n{error}"
    assert exit_message(record("master-0", "EXITED", 1, errorMessage=error)) == sentence
    assert remedy in exit_message(record("ps-0", "EXITED", 1, errorMessage="rm: cannot remove '/tmp': Device or resource busy"))
    own = (
        "/bucket/jobs/job01/output",
        "/bucket/jobs/job01/output/3",
        "/var/lib/scaletier/jobs/job01/home",
        "/tmp/",
        "/var/tmp",
    )
    python = [f"OSError: [Errno 30] Read-only file system: '{folder}'" for folder in own]
    for error in (*python, f"{python[0]} -> '/tmp/a'", "mv: cannot move '/tmp' to 'a': Read-only file system"):
        assert remedy in exit_message(record("ps-0", "EXITED", 1, errorMessage=f"Traceback\n{error}")), error
    read_only = (
        "/bucket/data",
        "/tmp2",
        "/bucket/jobs/job02/output/model",
        "/var/lib/scaletier/jobs/job01/package",
        "/etc/tmp",
    )
    elsewhere = [f"OSError: [Errno 30] Read-only file system: '{path}'" for path in read_only]
    busy = ("nvmlInit: Device or resource busy", "[Errno 16] Device or resource busy: '/dev/nvidia0'")
    for other in (*busy, *elsewhere):
        assert remedy not in exit_message(record("ps-0", "EXITED", 1, errorMessage=f"It's all: 'x'\n{other}"))


def test_a_program_that_ran_out_of_disk_has_a_remedy() -> None:
    remedy = ": fab doctor names the full disk or bucket, and the jobs that use most of the bucket\n"
    for error in ("OSError: [Errno 28] No space left on device: '/bucket/x'", "cp: /tmp/x: Disk quota exceeded"):
        assert f"{error}{remedy}" in exit_message(record("ps-0", "EXITED", 1, errorMessage=f"Saving\n{error}"))
    other = "No space left on device\nValueError: bad shape"
    assert remedy not in exit_message(record("ps-0", "EXITED", 1, errorMessage=other))


# A lost host, silence, and limits


def test_a_lost_host_fails_the_job_after_max_wait_time() -> None:
    for silence in (59.0, 60.0, 160.0):
        new = decide(job(), view(silence={"worker-1": silence}))
        assert new is None or (new.state, new.attempt) == ("RUNNING", 0)
    new = advance(job(), view(silence={"worker-1": 160.1}))
    assert (new.state, new.errorMessage) == ("FAILED", "The replica worker 1 is lost: no heartbeat for 160 s.")
    assert [r["state"] for r in new.replicas] == ["RUNNING", "RUNNING", "LOST", "RUNNING"]
    two = advance(job(), view(silence={"worker-1": 161.0, "ps-0": 161.0}))
    assert two.errorMessage == "The replicas worker 1, ps 0 are lost: no heartbeat for 160 s."
    finished = view(record("worker-1", "EXITED", 0), silence={"worker-1": 500.0})
    assert decide(job(), finished) is None
    optional = decide(job(), view(plan=OPTIONAL_WORKERS, silence={"worker-1": 500.0}))
    assert optional is None or optional.state == "RUNNING"


def test_an_optional_replica_that_exits_with_a_code_ends_the_job() -> None:
    """Its role lets the job continue only after crashes and losses."""
    for plan in (OPTIONAL_WORKERS, replace(OPTIONAL_WORKERS, restartPolicy="all")):
        failed = view(record("worker-1", "EXITED", 1), plan=plan, since_exit={"worker-1": 5.0})
        assert advance(job(), failed).state == "FAILED"


def test_a_lost_replica_is_reported_once_and_its_return_too() -> None:
    lost = view(silence={"ps-0": 60.0})
    new = advance(job(), lost)
    assert (new.state, new.lostReplicas) == ("RUNNING", ["ps-0"])
    assert new.events[-1].cause.startswith(
        "ps-0 is lost, no heartbeat for 60 s: run pulumi up to start its host, else the job is FAILED in 100 s"
    )
    assert decide(new, lost) is None
    back = advance(new, view())
    assert (back.lostReplicas, back.events[-1].cause) == ([], "ps-0 sends heartbeats again")


def test_preparing_has_a_time_limit() -> None:
    up = view(plan=PLAN, in_state=300.1)
    up = replace(up, replicas={name: up.replicas[name] for name in NAMES[:2]})
    new = advance(job(JobState.PREPARING), up)
    assert new.errorMessage == "The replicas worker 1, ps 0 did not start within 300 s after the first one."
    assert decide(job(JobState.PREPARING), replace(up, in_state=300.0)) is None


def test_a_job_waits_without_a_limit_for_an_earlier_program_on_a_host() -> None:
    busy = record("ps-0", "PREPARING", hostBusy=True)
    up = view(busy, plan=PLAN, in_state=1e6)
    assert decide(job(JobState.PREPARING), up) is None
    for bad in (view(busy, record("worker-0", "PREPARING"), in_state=1e6), view(busy, in_state=1e6, silence={"ps-0": 60.0})):
        assert advance(job(JobState.PREPARING), bad).state == "FAILED"


def test_the_wait_for_an_optional_replica_has_a_time_limit() -> None:
    snapshot = view(record("worker-1", "PREPARING"), plan=OPTIONAL_WORKERS, in_state=299.0)
    assert decide(job(JobState.PREPARING), snapshot) is None
    new = advance(job(JobState.PREPARING), replace(snapshot, in_state=300.0))
    assert new.state == "RUNNING"
    assert new.events == [Event(NOW, "continues without worker-1, which did not start")]


def test_a_job_that_runs_too_long_is_cancelled() -> None:
    assert decide(job(runSeconds=604799.9), view()) is None
    new = advance(job(runSeconds=604800.0), view())
    assert (new.state, new.errorMessage) == ("CANCELLING", "The job ran for longer than maxRunningTime, 604800 s.")
    ended = advance(new, view(*(record(name, "EXITED", 143) for name in NAMES)))
    assert (ended.state, ended.errorMessage) == ("CANCELLED", new.errorMessage)


def test_a_stalled_job_is_restarted() -> None:
    plan = replace(PLAN, stallTimeout=60.0)
    assert decide(job(), view(since_output=1e9)) is None
    assert decide(job(), view(plan=plan, since_output=59.9)) is None
    new = advance(job(), view(plan=plan, since_output=60.0))
    assert (new.attempt, new.events[0].cause) == (1, "no replica printed a line for 60 s (stallTimeout)")
    failed = advance(job(restartsUsed=1), view(plan=plan, since_output=60.0))
    assert failed.errorMessage == "No replica printed a line for 60 s (stallTimeout), and the job was started again 1 time."
    lost = decide(job(), view(plan=plan, since_output=60.0, silence={"ps-0": 70.0}))
    assert lost is None or lost.attempt == 0


def test_cancel_waits_for_responsive_replicas() -> None:
    cancelling = advance(job(), view(cancel_requested=True))
    assert cancelling.state == "CANCELLING"
    ended = [record(name, "EXITED", 143) for name in NAMES[:3]]
    assert decide(cancelling, view(*ended, silence={"ps-0": 29.9})) is None
    cancelled = advance(cancelling, view(*ended, silence={"ps-0": 30.0}))  # two leases
    assert (cancelled.state, cancelled.endTime) == ("CANCELLED", NOW)
    assert advance(job(JobState.QUEUED), view(cancel_requested=True)).state == "CANCELLING"
    assert advance(job(JobState.PREPARING), view(cancel_requested=True)).state == "CANCELLING"


def test_an_ended_job_has_a_cost_if_hosts_have_a_price() -> None:
    snapshot = view(record("master-0", "EXITED", 0))
    new = advance(job(hourlyCost=2.18), snapshot)
    assert (new.state, new.cost) == ("SUCCEEDED", 1.09)
    assert advance(job(), snapshot) == replace(new, hourlyCost=None, cost=None)


def test_only_the_replicas_change_after_the_end() -> None:
    ended = advance(job(), view(record("master-0", "EXITED", 0)))
    assert decide(ended, view(record("master-0", "EXITED", 0))) is None
    after = advance(ended, view(record("master-0", "EXITED", 0), record("ps-0", "EXITED", 143)))
    assert replace(after, replicas=ended.replicas) == ended
    assert after.replicas[3]["exitCode"] == 143


def test_stopped_ignores_lost_hosts() -> None:
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
    awaits_restart=st.booleans(),
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
    lambda records: {name: replace(r, name=name) for name, r in records.items()}
)
_views = st.builds(View, _plans, _replicas, st.just(NOW), _per_name, _per_name, _per_name, _seconds, _seconds, st.booleans())
_jobs = st.builds(
    job,
    st.sampled_from([JobState.RUNNING, JobState.PREPARING, JobState.CANCELLING]) | st.sampled_from(JobState),
    attempt=st.integers(0, 2),
    restartsUsed=st.integers(0, 2),
    runSeconds=st.sampled_from([0.0, 1e6]),
    droppedReplicas=st.lists(st.sampled_from(["worker-0", "ps-0"]), unique=True),
)


@given(_jobs, _views)
@example(job(), view(record("worker-1", "EXITED", 137, restartsUsed=2)))  # the job is restarted
@example(job(), view(record("worker-1", "EXITED", 137, restartsUsed=2), plan=OPTIONAL_WORKERS))  # it continues without it
def test_decide_makes_only_valid_transitions(before: JobRecord, snapshot: View) -> None:
    after = decide(before, snapshot)
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
        assert snapshot.plan.chief not in after.droppedReplicas
    limit = snapshot.plan.maxRestarts if snapshot.plan.restarts_all else snapshot.plan.maxRetries
    assert after.restartsUsed <= max(limit, before.restartsUsed)


@given(_jobs, _views)
@example(
    job(), View(PLAN, {"worker-0": record("worker-0", "EXITED", 1)}, NOW, since_disruption={"master-0": 0.0})
)  # its record is lost
def test_decide_reaches_a_fixed_point(before: JobRecord, snapshot: View) -> None:
    # For a new attempt the leader sets `in_state` and `since_output` to 0.
    steps = 0
    while (after := decide(before, snapshot)) is not None:
        if after.attempt != before.attempt:
            snapshot = replace(snapshot, in_state=0.0, since_output=0.0)
        before, steps = after, steps + 1
        assert steps < 16


@given(_jobs, _views)
def test_a_job_whose_chief_is_done_never_fails(before: JobRecord, snapshot: View) -> None:
    chief = record("master-0", "EXITED", 0)
    snapshot = replace(
        snapshot, plan=replace(snapshot.plan, successPolicy="chief"), replicas={**snapshot.replicas, "master-0": chief}
    )
    if before.state != JobState.FAILED:
        while (after := decide(before, snapshot)) is not None:
            assert after.state != JobState.FAILED
            before = after


@given(_jobs, _views)
def test_an_exit_without_a_kill_never_restarts_the_job(before: JobRecord, snapshot: View) -> None:
    failed = record("worker-0", "EXITED", 1, attempt=before.attempt)
    snapshot = replace(
        snapshot,
        since_disruption={},
        silence={},
        replicas={**snapshot.replicas, "worker-0": failed},
        since_exit={"worker-0": 60.0},
    )
    after = decide(before, snapshot)
    assert after is None or after.attempt == before.attempt


def test_a_failed_study_has_its_own_error_message() -> None:
    tuned = replace(PLAN, study=Study([]))
    failed = record("worker-0", "EXITED", 1, errorMessage="Trial 3: x\nerror: trial 3 FAILED\nerror: 3 of 4 trials FAILED\nbye")
    ended = advance(job(), view(failed, plan=tuned, since_exit={"worker-0": 60.0}))
    assert (ended.state, ended.errorMessage) == (JobState.FAILED, "3 of 4 trials FAILED")
    ended = advance(job(), view(failed, since_exit={"worker-0": 60.0}))
    assert ended.errorMessage.startswith("The replica worker 0 exited with a non-zero status of 1.")


# A host that is preempted or stopped


def test_a_preempted_host_is_lost_at_once_and_started_once_it_stopped() -> None:
    preempted = record("worker-0", "EXITED", 143, preempted=True)
    snapshot = view(preempted, startable=NAMES)
    new = advance(job(), snapshot)
    cause = "worker-0 is preempted: its host will be started, else the job is FAILED in 100 s"
    assert (new.state, new.lostReplicas, new.events[-1].cause) == ("RUNNING", ["worker-0"], cause)
    assert replicas_to_start(new, snapshot) == []
    off = replace(snapshot, silence={"worker-0": 12.5})
    assert replicas_to_start(new, off) == ["worker-0"]
    assert replicas_to_start(new, replace(off, startable=())) == []
    for other in (job(JobState.CANCELLING), job(JobState.FAILED), job(droppedReplicas=["worker-0"])):
        assert replicas_to_start(other, off) == []
    assert replicas_to_start(new, replace(off, cancel_requested=True)) == []


def test_an_unresponsive_host_is_started() -> None:
    silent = view(startable=NAMES, silence={"worker-0": 60.0, "ps-0": 59.9})
    assert replicas_to_start(job(), silent) == ["worker-0"]
    never = View(PLAN, {"master-0": record("master-0")}, NOW, silence={"ps-0": 60.0}, startable=NAMES)
    assert replicas_to_start(job(JobState.PREPARING), never) == ["ps-0"]
    finished = view(record("worker-0", "EXITED", 0), startable=NAMES, silence={"worker-0": 600.0})
    assert replicas_to_start(job(), finished) == []


@pytest.mark.parametrize("plan", [PLAN, RESTART_ALL])
def test_an_exit_after_a_preemption_waits_for_the_host(plan: Plan) -> None:
    preempted, failed = record("worker-0", "EXITED", 143, preempted=True), record("ps-0", "EXITED", 1)
    known = job(lostReplicas=["worker-0"])
    assert (
        decide(known, view(preempted, failed, plan=plan, since_exit={"ps-0": 50.0}, since_disruption={"worker-0": 50.0}))
        is None
    )
    restarted = record("worker-0", restarts=1, terminationReason=PREEMPTED)
    back = advance(known, view(restarted, failed, plan=plan, since_exit={"ps-0": 50.0}, since_disruption={"worker-0": 0.0}))
    assert (back.attempt, back.restartsUsed) == (1, 0)
    assert back.events[-1].cause == "worker 0 was preempted, and the others could not continue without it"


def test_preemptions_do_not_count_as_restarts() -> None:
    ended = record("worker-0", "EXITED", 143, terminationReason=PREEMPTED)
    new = advance(job(restartsUsed=2), view(ended, plan=RESTART_ALL))
    assert (new.state, new.attempt, new.restartsUsed, new.events[-1].cause) == ("RUNNING", 1, 2, "worker 0 was preempted")
    assert advance(job(restartsUsed=2), view(replace(ended, terminationReason=""), plan=RESTART_ALL)).state == "FAILED"


def test_peers_restart_when_the_preempted_replica_is_back() -> None:
    peer, preempted = record("master-0", "EXITED", 143), record("worker-0", "EXITED", 143, preempted=True)
    known = job(restartsUsed=2, lostReplicas=["worker-0"])
    assert decide(known, view(peer, preempted, plan=RESTART_ALL)) is None
    back = replace(preempted, preempted=False, terminationReason=PREEMPTED)
    new = advance(known, view(peer, back, plan=RESTART_ALL))
    assert (new.state, new.attempt, new.restartsUsed, new.events[-1].cause) == ("RUNNING", 1, 2, "worker 0 was preempted")


def test_a_preparing_job_waits_longer_for_starting_hosts() -> None:
    snapshot = view(plan=PLAN, in_state=399.0, startable=NAMES, silence={"ps-0": 60.0})
    snapshot = replace(snapshot, replicas={name: snapshot.replicas[name] for name in NAMES[:3]})
    assert decide(job(JobState.PREPARING), snapshot) is None
    assert advance(job(JobState.PREPARING), replace(snapshot, startable=())).state == "FAILED"
    too_long = advance(job(JobState.PREPARING), replace(snapshot, in_state=400.1))
    assert too_long.errorMessage == "The replica ps 0 did not start within 400 s after the first one."
