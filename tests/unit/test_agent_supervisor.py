"""The supervisor: starts, restarts and stops a trainer by the rules, without the bucket."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replicahosts import PATIENCE
from shared_fakes import Clock
from waiting import until

from hosts.agent import supervisor
from hosts.agent.process import HostBusyError
from hosts.agent.replica_rules import Exit
from hosts.agent.supervisor import Assignment, Supervisor
from jobs.background import Background
from jobs.firsterror import FirstError
from jobs.progress import JobProgress
from jobs.records import Event, Plan, ReplicaRecord
from jobs.states import ReplicaState
from jobs.study import Study

PLAN = Plan("job01", ["master-0", "worker-0"], "task", ["--x", "a b"], {}, stopSeconds=7.0)
NOW = "2026-01-31T12:00:00.000Z"


class Child:
    """A trainer that ends when the test sets its code."""

    def __init__(self, pid: int) -> None:
        self.pid, self.lines, self.tail, self.out_of_memory = pid, 0, "last line", False
        self.first_error: FirstError | None = None
        self.progress: JobProgress | None = None
        self.code: int | None = None
        self.stops: list[float] = []
        self.next = 9.0

    @property
    def stopping(self) -> bool:
        return bool(self.stops)

    def stop(self, seconds: float) -> None:
        self.stops.append(seconds)

    def poll(self) -> Exit | None:
        return None if self.code is None else Exit(self.code, self.out_of_memory)

    def due(self) -> float:
        return self.next


class Host:
    """A supervisor, its clock, its children and its log."""

    def __init__(self, name: str = "worker-0", plan: Plan = PLAN, record: ReplicaRecord | None = None) -> None:
        self.clock = Clock()
        self.children: list[Child] = []
        self.messages: list[tuple[str, str]] = []
        self.fails: Exception | None = None
        assignment = Assignment(plan, name, Path("/package"), {}, "python", self)
        self.supervisor = Supervisor(assignment, record or ReplicaRecord(name), self.spawn, self.clock, lambda: NOW)

    def spawn(self, assignment: Assignment) -> Child:
        if self.fails:
            raise self.fails
        self.children.append(Child(len(self.children) + 1))
        return self.children[-1]

    def write_message(self, message: str, severity: str = "INFO") -> None:
        self.messages.append((severity, message))

    @property
    def child(self) -> Child:
        return self.children[-1]

    @property
    def record(self) -> ReplicaRecord:
        return self.supervisor.record

    def orders(self, attempt: int, ending: str = "") -> None:
        self.supervisor.set_target_state(attempt, ending)
        self.supervisor.step()

    def ends(self, code: int, after: float = 60.0) -> float:
        self.clock.sleep(after)
        self.child.code = code
        return self.supervisor.step()


@pytest.fixture
def host() -> Host:
    """Return a host whose trainer runs."""
    host = Host()
    host.orders(0)
    return host


def test_a_slow_start_holds_up_neither_the_watchdog_nor_the_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_STEP_SECONDS", 0.01)
    host, started = Host(), threading.Event()

    def spawn(assignment: Assignment) -> Child:
        assert started.wait(PATIENCE)
        return host.spawn(assignment)

    host.supervisor._spawn = spawn
    host.orders(0)
    assert host.supervisor.step() == 0.0, "it goes on with the start"
    read = Background(lambda: host.record.state).join(PATIENCE)
    assert read == "PREPARING"
    host.supervisor.set_facts({"x": 1})
    host.supervisor.set_target_state(0, "the job is cancelled")
    started.set()
    until(lambda: host.supervisor.step() > 0)
    assert (host.record.state, host.record.facts, host.record.starts) == ("RUNNING", {"x": 1}, 1)
    assert (len(host.children), host.child.stops) == (1, [7.0]), "what was ordered meanwhile follows"


def test_a_start_that_timed_out_is_repeated() -> None:
    host = Host()
    host.fails = TimeoutError("the launcher did not answer")
    host.supervisor.set_target_state(0, "")
    assert host.supervisor.step() == 0.0
    assert (host.record.state, host.record.exitCode, host.record.restarts) == ("PREPARING", 137, 1)
    assert host.supervisor.step() == 1.0, "the second restart waits"
    assert (host.record.state, host.record.restarts) == ("PREPARING", 2)
    host.fails = None
    host.clock.sleep(1.0)
    assert host.supervisor.step() == 9.0
    assert host.record.state == "RUNNING"
    message = "the trainer cannot start: the launcher did not answer"
    assert host.messages == [("ERROR", message)] * 2 + [("INFO", "started trainer pid 1: python -m task --x 'a b'")]


def test_a_busy_host_uses_up_no_restart() -> None:
    """A program that SIGKILL did not end may hold up the next job for hours."""
    host = Host()
    host.fails = HostBusyError("an earlier program has not ended")
    host.supervisor.set_target_state(0, "")
    for _ in range(2 * PLAN.maxRestarts):
        host.clock.sleep(host.supervisor.step() + 40.0)
    record = host.record
    assert (record.state, record.hostBusy, record.starts, record.restarts, record.events) == ("PREPARING", True, 0, 0, [])
    assert host.messages == [("WARNING", "the trainer waits to start: an earlier program has not ended")]
    host.fails = None
    until(lambda: host.supervisor.step() > 0)
    assert (host.record.state, host.record.hostBusy, host.record.starts) == ("RUNNING", False, 1)


def test_a_job_can_be_cancelled_while_its_host_is_busy() -> None:
    host = Host()
    host.fails = HostBusyError("an earlier program has not ended")
    host.orders(0)
    host.orders(0, "job CANCELLING")
    host.supervisor.step()
    assert (host.supervisor.idle, host.record.exitCode, host.children) == (True, None, [])


def test_a_stop_after_a_long_run_ends_a_series_of_early_ends(host: Host) -> None:
    host.ends(42, after=5.0)
    host.clock.sleep(host.ends(42, after=5.0))
    host.supervisor.step()
    assert (host.record.state, host.record.consecutiveFailures) == ("RUNNING", 2)
    host.clock.sleep(1e5)
    assert host.supervisor.run_seconds == 1e5
    host.orders(1)
    host.ends(143, after=1.0)
    assert (host.record.state, host.record.attempt, host.record.consecutiveFailures) == ("RUNNING", 1, 0)
    host.ends(42, after=5.0)
    assert (host.record.state, host.record.consecutiveFailures, host.supervisor.run_seconds) == ("RUNNING", 1, 0.0)


def test_slow_starts_are_no_crash_loop() -> None:
    host = Host()

    def spawn(assignment: Assignment) -> Child:
        host.clock.sleep(60.0)
        raise TimeoutError("the launcher did not answer in 60 s")

    host.supervisor._spawn = spawn
    host.orders(0)
    for _ in range(PLAN.maxRestarts - 1):
        host.clock.sleep(host.supervisor.step())
    assert (host.record.state, host.record.restartsUsed, host.record.consecutiveFailures) == ("PREPARING", PLAN.maxRestarts, 0)
    host.clock.sleep(100.0)
    host.supervisor.step()
    assert (host.record.state, host.record.awaits_restart, host.record.crashLooping) == ("EXITED", True, False), (
        "the leader decides"
    )


def test_no_trainer_runs_before_the_job_s_record_was_read() -> None:
    host = Host()
    assert host.supervisor.step() == float("inf")
    assert (host.children, host.record.state, host.supervisor.idle) == ([], "PREPARING", False)
    host.supervisor.set_target_state(0, "")
    assert host.supervisor.step() == 9.0
    assert (len(host.children), host.record.state, host.record.startTime) == (1, "RUNNING", NOW)
    assert host.messages == [("INFO", "started trainer pid 1: python -m task --x 'a b'")]


def test_a_killed_trainer_is_restarted_without_the_bucket(host: Host) -> None:
    for restarts in (1, 2):
        host.ends(-9)
        assert host.record.restarts == restarts
        if restarts == 2:
            assert len(host.children) == 2  # the second restart waits for a second
            host.clock.sleep(0.5)
            assert host.supervisor.step() == pytest.approx(0.5)
            host.clock.sleep(0.5)
            host.supervisor.step()
        assert len(host.children) == restarts + 1
        assert host.record.state == "RUNNING"
    assert [text for severity, text in host.messages if severity == "WARNING"] == [
        "restarting after signal 9 (SIGKILL) (1 of 5)",
        "restarting after signal 9 (SIGKILL) (2 of 5), in 1 s",
    ]


def test_a_restart_s_event_has_the_seconds_until_the_next_output(host: Host) -> None:
    host.ends(-9)
    host.clock.sleep(2.5)
    assert host.record.events[-1].seconds is None
    host.child.lines = 1
    assert host.record.events[-1].seconds == 2.5
    host.clock.sleep(100.0)
    assert host.record.events[-1].seconds == 2.5
    host.ends(-9)
    assert [event.seconds for event in host.record.events] == [2.5, None]
    host.clock.sleep(1.0)
    host.supervisor.step()  # it is restarted
    host.child.lines = 1
    host.child.code = 0
    host.clock.sleep(0.5)
    host.supervisor.step()  # it printed and ended between two steps
    assert [event.seconds for event in host.record.events] == [2.5, 1.5]


def test_a_restart_that_an_earlier_incarnation_began_is_continued() -> None:
    events = [Event(NOW, "signal 9 (SIGKILL)", 1.0), Event(NOW, "signal 9 (SIGKILL)")]
    host = Host(record=ReplicaRecord("worker-0", restarts=3, restartsUsed=3, events=events))
    host.supervisor.set_target_state(0, "")
    assert host.supervisor.step() == 2.0
    host.clock.sleep(2.0)
    host.supervisor.step()
    host.clock.sleep(0.5)
    host.child.lines = 1
    assert [event.seconds for event in host.record.events] == [1.0, 2.5]


def test_lines_are_counted_across_restarts() -> None:
    host = Host(record=ReplicaRecord("worker-0", lines=100))
    assert host.supervisor.lines == 100
    host.orders(0)
    host.child.lines = 7
    assert host.supervisor.lines == 107
    host.ends(-9)
    host.child.lines = 2
    assert host.supervisor.lines == 109


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, ("INFO", "trainer exited with status 0")),
        (3, ("ERROR", "trainer exited with status 3")),
        (255, ("ERROR", "trainer exited with status 255")),
    ],
)
def test_an_exit_is_not_restarted(host: Host, code: int, message: tuple[str, str]) -> None:
    assert host.ends(code) == float("inf")
    assert (host.record.state, host.record.exitCode, len(host.children)) == ("EXITED", code, 1)
    assert host.supervisor.idle
    assert host.messages[-1] == message


def test_three_equal_early_ends_are_final(host: Host) -> None:
    for _ in range(3):
        while host.record.state is ReplicaState.PREPARING:
            host.clock.sleep(1.0)
            host.supervisor.step()
        host.ends(-11, after=5.0)
    assert (host.record.crashLooping, host.record.state, len(host.children)) == (True, "EXITED", 3)
    assert host.messages[-1] == ("ERROR", "trainer ended by signal 11 (SIGSEGV), the same 3 times in a row")


def test_out_of_memory_is_recorded(host: Host) -> None:
    host.child.out_of_memory = True
    host.ends(-9)
    assert host.record.outOfMemory
    assert ("WARNING", "restarting after signal 9 (SIGKILL), out of memory (1 of 5)") in host.messages


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no python"), "no python"),
        (ValueError("embedded null byte"), "embedded null byte"),
        (FileNotFoundError(2, "No such file or directory"), "python: No such file or directory"),
    ],
)
def test_a_trainer_that_cannot_start_is_an_exit(error: Exception, reason: str) -> None:
    host = Host()
    host.fails = error
    host.orders(0)
    assert (host.record.state, host.record.exitCode) == ("EXITED", 127)
    assert host.record.errorMessage == f"the trainer cannot start: {reason}"
    assert host.messages == [("ERROR", host.record.errorMessage)]


def test_trials_are_run_by_the_tuner_with_the_agent_s_python() -> None:
    plan = replace(PLAN, study=Study("accuracy", "MAXIMIZE", []))
    tuner = Path(__file__).resolve().parents[2] / "hosts/tuner/__main__.py"
    argv = Assignment(plan, "worker-0", Path("/package"), {}, "python", Host()).argv
    assert argv == [sys.executable, "-I", str(tuner), "job01", "worker-0"]


def test_the_end_of_the_job_stops_the_trainer_once(host: Host) -> None:
    host.supervisor.set_target_state(0, "job CANCELLING")
    for _ in range(3):
        host.supervisor.step()
    assert host.child.stops == [7.0]
    assert not host.supervisor.idle
    host.ends(143)
    assert (host.record.state, host.record.exitCode, host.record.restarts) == ("EXITED", 143, 0)
    assert host.supervisor.idle
    assert host.messages[-1] == ("INFO", "stopping: job CANCELLING")


def test_a_job_that_ended_before_its_start_starts_no_trainer() -> None:
    host = Host()
    host.orders(0, "job CANCELLED")
    assert (host.children, host.record.state, host.record.exitCode) == ([], "EXITED", None)


def test_a_stopped_unit_stops_its_trainer(host: Host) -> None:
    host.supervisor.terminate()
    host.supervisor.step()
    assert host.child.stops == [7.0]
    host.ends(0)
    assert (host.record.state, host.record.exitCode) == ("EXITED", 143)  # an exit with 0 after SIGTERM is no success
    assert host.messages[-1] == ("INFO", "stopping: the unit is stopped")
    host.orders(1)
    assert len(host.children) == 1


def test_a_trainer_that_exits_with_143_on_a_preempted_host_is_restarted(host: Host) -> None:
    assert not host.record.awaits_restart
    host.supervisor.set_preempted()
    host.ends(143)  # SIGTERM came from the machine, not from the agent
    assert (host.record.state, host.record.restarts) == ("RUNNING", 1)


def test_a_unit_stopped_before_its_start_starts_no_trainer() -> None:
    host = Host()
    host.supervisor.terminate()
    host.supervisor.step()
    assert (host.children, host.record.state, host.record.exitCode) == ([], "EXITED", 143)


def test_another_attempt_restarts_the_trainer(host: Host) -> None:
    host.orders(1)
    assert host.child.stops == [7.0]
    host.ends(143)
    assert len(host.children) == 2
    assert (host.record.attempt, host.record.state, host.record.restarts) == (1, "RUNNING", 0)
    host.supervisor.set_target_state(0, "")  # a late answer
    host.supervisor.step()
    assert (host.child.stops, host.record.attempt) == ([], 1)
    host.ends(3)
    host.orders(2)
    assert (len(host.children), host.record.attempt, host.record.exitCode) == (3, 2, None)
    assert host.messages[-2:] == [
        ("WARNING", "the whole job starts again, attempt 2"),
        ("INFO", "started trainer pid 3: python -m task --x 'a b'"),
    ]


@pytest.mark.parametrize("name", ["master-0", "worker-0"])
def test_an_exit_with_0_at_another_attempt_is_no_success(name: str) -> None:
    host = Host(name)
    host.orders(0)
    host.orders(1)
    host.ends(0)
    assert (len(host.children), host.record.attempt, host.record.state) == (2, 1, "RUNNING")


def test_a_late_order_does_not_revert_to_an_earlier_attempt(host: Host) -> None:
    host.supervisor.set_target_state(1, "")
    host.orders(0)
    assert host.child.stops == [7.0]


def test_a_chief_that_is_done_stays_done() -> None:
    host = Host("master-0")
    host.orders(0)
    host.ends(0)
    host.orders(1)
    assert (len(host.children), host.record.attempt, host.record.succeeded) == (1, 0, True)


def test_restart_policy_all_waits_for_the_leader() -> None:
    host = Host(plan=replace(PLAN, restartPolicy="all"))
    host.orders(0)
    host.ends(-9)
    assert (len(host.children), host.record.awaits_restart) == (1, True)
    assert host.messages[-1] == ("ERROR", "trainer ended by signal 9 (SIGKILL)")
    host.orders(1)
    assert (len(host.children), host.record.attempt) == (2, 1)


def test_callers_do_not_wait_for_another_thread(host: Host) -> None:
    """A signal handler may run while the other thread reads the record: that thread does not wait."""
    records: list[Any] = []
    with host.supervisor._lock:
        host.supervisor.terminate()  # in a signal handler, on the thread that holds the lock
        host.supervisor.step()
        reader = threading.Thread(target=lambda: records.append(host.supervisor.record))
        reader.start()
    reader.join(PATIENCE)
    assert [record.state for record in records] == [ReplicaState.RUNNING]


def test_progress_survives_a_restart_and_trials_have_none(host: Host) -> None:
    host.child.progress = JobProgress(5)
    host.ends(-9)
    host.supervisor.step()
    assert (len(host.children), host.supervisor.progress) == (2, JobProgress(5))
    host.child.progress = JobProgress(3)
    assert host.supervisor.progress == JobProgress(3)
    assert Host(record=ReplicaRecord("worker-0", progress=JobProgress(7))).supervisor.progress == JobProgress(7)
    tuned = Host(
        plan=replace(PLAN, study=Study("accuracy", "MAXIMIZE", [])), record=ReplicaRecord("worker-0", progress=JobProgress(7))
    )
    assert tuned.supervisor.progress is None


def test_the_first_error_is_recorded_with_its_last_line_and_survives_a_restart(host: Host) -> None:
    partial, complete, later = FirstError("1", "Traceback"), FirstError("1", "ValueError: x"), FirstError("2", "y")
    for error in (None, partial, complete):
        host.child.first_error = error
        assert host.record.firstError == error
    host.ends(-9)
    host.supervisor.step()
    host.child.first_error = later
    assert host.record.firstError == complete
    last = Host()
    last.orders(0)
    last.child.first_error = complete
    last.ends(1)
    assert last.record.firstError == complete
