"""Steps of concurrent replicas: the job ends at its last step; and the exact log lines."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import limit

from scaletier.loop import (
    DivergedError,
    EvalInterval,
    ReplicaLoop,
    Round,
    StepBudget,
    eval_line,
    final_line,
    run_rounds,
    train_line,
)
from scaletier.sync_period import SyncPeriod


@given(st.integers(1, 500), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64)), max_size=200))
def test_overlapping_rounds_take_no_step_past_the_last(max_steps: int, replicas: int, turns: list[tuple[int, int]]) -> None:
    budget, server_step, pending = StepBudget(0, max_steps, replicas), 0, dict[str, int]()
    for index, period in turns:
        name = f"replica/{index % replicas}"
        if name in pending:  # its round ends, and its delta reaches the servers
            server_step += pending.pop(name)
            budget.commit(name, server_step)
        elif server_step + sum(pending.values()) < max_steps:
            pending[name] = budget.reserve(name, period)
            assert 1 <= pending[name] <= period
        assert server_step + sum(pending.values()) <= max_steps
    for name, steps in pending.items():
        server_step += steps
        budget.commit(name, server_step)
    while server_step < max_steps:
        server_step += budget.reserve("replica/0", 64)
        budget.commit("replica/0", server_step)
    assert server_step == max_steps
    assert budget.reserve("replica/0", 64) == 0


def test_a_round_near_the_end_gets_a_share_of_the_free_steps() -> None:
    budget = StepBudget(900, 1000, 4)
    assert [budget.reserve(name, 64) for name in "abcd"] == [25, 18, 14, 10]


def test_the_last_steps_are_awaited_and_freed_if_their_round_fails() -> None:
    budget, reserved = StepBudget(0, 10, 1, clock=lambda: 0.0), list[int]()
    assert budget.reserve("worker/0", 10) == 10
    thread = threading.Thread(target=lambda: reserved.append(budget.reserve("master/0", 64)))
    thread.start()
    thread.join(0.3)
    assert reserved == []
    budget.commit("worker/0", None)
    thread.join(limit())
    assert reserved == [10]


def test_a_hanging_round_does_not_delay_the_job() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.4  # each read advances the clock
        return now

    budget = StepBudget(0, 10, 1, clock=clock)
    assert budget.reserve("worker/0", 8) == 8  # and then its host is gone
    assert budget.reserve("master/0", 8) == 2
    budget.commit("master/0", 2)
    assert budget.reserve("master/0", 8) == 8
    budget.commit("worker/0", 10)  # it was only late
    assert budget.reserve("worker/0", 8) == 0


def test_the_wait_for_a_round_follows_the_replica_s_usual_time() -> None:
    now = 0.0
    budget = StepBudget(0, 20, 1, clock=lambda: now)
    assert budget.reserve("slow", 10) == 10
    now = 100.0
    budget.commit("slow", 10)
    assert budget.reserve("slow", 10) == 10
    now = 490.0
    assert not budget.overdue()
    now = 501.0
    assert budget.overdue() == {"slow"}


def test_stopping_a_job_releases_a_waiting_replica() -> None:
    budget, reserved = StepBudget(0, 10, 1, clock=lambda: 0.0), list[int]()
    assert budget.reserve("worker/0", 10) == 10
    thread = threading.Thread(target=lambda: reserved.append(budget.reserve("master/0", 10)))
    thread.start()
    budget.stop()
    thread.join(limit())
    assert reserved == [0]


def test_replicas_wait_for_an_evaluation_which_the_chief_reaches_by_single_steps() -> None:
    budget, reserved = StepBudget(3, 20, 1, steps_between_evaluations=10, clock=lambda: 0.0), list[int]()
    assert budget.reserve("worker/0", 64) == 7
    thread = threading.Thread(target=lambda: reserved.append(budget.reserve("worker/1", 64)))
    thread.start()
    assert budget.reserve("master/0", 64, True) == 1
    budget.commit("worker/0", 10)
    budget.commit("master/0", 11)
    thread.join(0.3)
    assert reserved == []
    budget.allow_until()
    thread.join(limit())
    assert reserved == [9]
    budget.commit("worker/1", 20)
    assert budget.reserve("master/0", 64, True) == 0


def test_the_chief_is_left_a_step_of_the_last_epoch() -> None:
    budget = StepBudget(0, 30, 2, steps_between_evaluations=20)
    assert [budget.reserve("worker/0", 99), budget.reserve("worker/1", 99)] == [10, 5]
    budget.allow_until(40)
    assert budget.reserve("worker/2", 99) == (30 - 15 - 1) // 2
    assert budget.reserve("master/0", 99, True) == (30 - 15 - 7) // 2
    assert budget.reserve("worker/3", 99) == (30 - 15 - 7 - 4) // 2


def test_the_chief_takes_no_step_past_the_last() -> None:
    budget = StepBudget(0, 10, 1, steps_between_evaluations=10)
    assert budget.reserve("worker/0", 10) == 10
    threading.Timer(0.1, budget.stop).start()
    assert budget.reserve("master/0", 10, True) == 0


def replica(name: str, run_round: Any, emit: Any = lambda line: None, seconds: float = 1.0) -> ReplicaLoop:
    return ReplicaLoop(name, run_round, SyncPeriod(8, True), seconds, {name: emit}, name == "master/0")


def test_a_round_reserves_steps_and_frees_them_if_its_host_is_lost() -> None:
    calls = list[tuple[int, int]]()

    def run_round(steps: int, live_hosts: int) -> Round:
        calls.append((steps, budget.step))
        if len(calls) == 2:
            raise ConnectionError
        return Round(steps, budget.step + steps, 1.0)

    budget = StepBudget(91, 100)
    rounds = run_rounds(replica("master/0", run_round), budget)
    assert next(rounds)
    with pytest.raises(ConnectionError):
        next(rounds)
    assert budget.training == set()
    assert len(list(run_rounds(replica("master/0", run_round), budget))) == 2
    assert calls == [(1, 91), (8, 92), (1, 92), (7, 93)]


def test_a_replica_starts_with_a_single_step_and_continues_with_its_period() -> None:
    calls, lines = list[tuple[int, int]](), list[str]()
    budget = StepBudget(0, 40, 2)

    def run_round(steps: int, live_hosts: int) -> Round:
        calls.append((steps, live_hosts))
        return Round(steps, budget.step + steps, 0.5, {"mae": 0.25}, local_loss=0.75)

    budget.training.add("master/0")
    rounds = run_rounds(replica("worker/0", run_round, lines.append, 1e9), budget)
    assert [next(rounds).steps, next(rounds).steps] == [1, 8]
    budget.training.discard("master/0")
    assert next(rounds).steps == 8
    assert calls == [(1, 2), (8, 2), (8, 1)]
    assert budget.rounds == 3
    assert len(lines) == 1
    assert lines[0].startswith("Train [worker/0], step 1: loss: 0.750, mae: 0.250 (")
    budget.stop()
    assert list(rounds) == []


def test_a_replica_that_does_not_print_its_line_does_not_count_as_live() -> None:
    now, live = 0.0, list[int]()
    budget = StepBudget(0, 100, 2, clock=lambda: now)
    budget.training.add("master/0")

    def emit(line: str) -> None:
        nonlocal now
        now += 1000.0
        live.append(budget.live_hosts)

    worker = replica("worker/0", lambda steps, live: Round(steps, steps, 1.0), emit)
    rounds = run_rounds(worker, budget)
    next(rounds)
    assert live == [1]
    assert budget.live_hosts == 2


def test_a_line_covers_the_steps_since_the_previous_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines, budget = 0.0, list[str](), StepBudget(0, 100)
    monkeypatch.setattr("time.monotonic", lambda: now)

    def run_round(steps: int, live_hosts: int) -> Round:
        nonlocal now
        now += 0.5
        return Round(steps, budget.step + 2 * steps, 1.0, {}, steps)

    measured = ReplicaLoop("master/0", run_round, SyncPeriod.of(None, 2, 10_000), 1.0, {"master/0": lines.append})
    rounds = run_rounds(measured, budget)
    for _ in range(4):
        next(rounds)
    rates = [re.search(r"step (\d+): .* \((.*) sec\) (\S+) global steps/s, (\S+) local", line) for line in lines]
    assert [match and match.groups() for match in rates] == [("2", "0.500", "4.0", "2.0"), ("18", "1.500", "16.0", "8.0")]
    assert budget.rates["master/0"].staleness == 4
    for _ in range(4):
        next(rounds)
    assert measured.period.line.startswith("Exchange every ")
    assert measured.period.line in lines


@pytest.mark.parametrize(("local_loss", "owner"), [(float("nan"), "worker/1"), (1.0, "another replica")])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_nan_loss_ends_the_rounds(loss: float, local_loss: float, owner: str) -> None:
    rounds = run_rounds(replica("worker/1", lambda *_: Round(1, 7, loss, local_loss=local_loss)), StepBudget(0, 20))
    with pytest.raises(
        DivergedError, match=rf"^the loss of {owner} is {loss} at step 7; try a lower learning rate, or look for "
    ):
        next(rounds)


@pytest.mark.parametrize(("seconds", "timeout"), [(0.5, 5.0), (30.0, 120.0)])
def test_the_master_waits_longer_on_slow_hosts(monkeypatch: pytest.MonkeyPatch, seconds: float, timeout: float) -> None:
    budget, timeouts = StepBudget(0, 400, 2), list[float | None]()
    monkeypatch.setattr(budget._changed, "wait_for", lambda _, timeout=None: timeouts.append(timeout))
    budget.begin(True, seconds)
    assert timeouts == [timeout, None]


def test_formats_of_log_lines() -> None:
    assert train_line("worker/0", 348, 0.7291, {"accuracy": 0.8339}, 1.0371, 200.44, 99.66) == (
        "Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s"
    )
    assert eval_line(990, 0.4, {"f1": np.array([0.5, 1.0])}) == "Eval, step 990: loss: 0.400, f1: 0.750"
    assert eval_line(990, 0.4, {"accuracy": 0.89}) == "Eval, step 990: loss: 0.400, accuracy: 0.890"
    assert final_line(5006, 0.228, {"accuracy": 0.9351}) == "Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935"


def test_formats_of_lines_with_and_without_metrics() -> None:
    assert train_line("master/0", 1, 2.0, {}, 0.5, 1, 1).startswith("Train [master/0], step 1: loss: 2.000 (0.500 sec) ")
    assert eval_line(9, 1e9, {"mae": 1.5, "top 3": 0.1}) == "Eval, step 9: loss: 1000000000.000, mae: 1.500, top 3: 0.100"
    assert final_line(9, 0.1, {}) == "Final metrics after 9 steps, loss: 0.100"


def test_the_interval_grows_to_twenty_evaluations() -> None:
    interval = EvalInterval(1.0)
    assert not interval.is_due(10.0)
    assert not interval.is_due(10.9)
    assert interval.is_due(11.0)
    line = "The evaluation took 0.26 s: next in 5.26 s, not 1.00 s, for at most 5 % of the time"
    assert interval.record(11.0, 11.263) == line
    assert not interval.is_due(16.5)
    assert interval.is_due(16.6)


def test_the_interval_stays_for_a_quick_evaluation() -> None:
    interval = EvalInterval(1.0)
    assert interval.record(1.0, 1.04) is None
    assert interval.seconds == 1.0
