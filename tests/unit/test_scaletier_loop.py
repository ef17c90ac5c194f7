"""Steps of concurrent replicas, so that the job ends at its last step; and its lines, to the character."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletier.loop import (
    DivergedError,
    EvalInterval,
    Progress,
    ReplicaLoop,
    Round,
    eval_line,
    final_line,
    train,
    train_line,
)
from scaletier.sync_period import SyncPeriod


@given(st.integers(1, 500), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64)), max_size=200))
def test_however_rounds_overlap_no_step_is_taken_past_the_last(
    max_steps: int, replicas: int, turns: list[tuple[int, int]]
) -> None:
    progress, centre, walking = Progress(0, max_steps, replicas), 0, dict[str, int]()
    for index, period in turns:
        name = f"replica/{index % replicas}"
        if name in walking:  # its round ends, and it comes to the servers
            centre += walking.pop(name)
            progress.commit(name, centre)
        elif centre + sum(walking.values()) < max_steps:
            walking[name] = progress.reserve(name, period)
            assert 1 <= walking[name] <= period
        assert centre + sum(walking.values()) <= max_steps
    for name, steps in walking.items():
        centre += steps
        progress.commit(name, centre)
    while centre < max_steps:
        centre += progress.reserve("replica/0", 64)
        progress.commit("replica/0", centre)
    assert centre == max_steps
    assert progress.reserve("replica/0", 64) == 0


def test_a_round_near_the_end_is_a_part_of_what_is_free() -> None:
    progress = Progress(900, 1000, 4)
    assert [progress.reserve(name, 64) for name in "abcd"] == [25, 18, 14, 10]


def test_the_last_steps_are_waited_for_and_free_again_where_their_round_fails() -> None:
    progress, taken = Progress(0, 10, 1), list[int]()
    assert progress.reserve("worker/0", 10) == 10
    thread = threading.Thread(target=lambda: taken.append(progress.reserve("master/0", 64)))
    thread.start()
    thread.join(0.3)
    assert taken == []
    progress.commit("worker/0", None)
    thread.join(5)
    assert taken == [10]


def test_a_round_that_does_not_end_does_not_hold_the_job_up() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.4  # time goes on whenever it is looked at
        return now

    progress = Progress(0, 10, 1, clock=clock)
    assert progress.reserve("worker/0", 8) == 8  # and then its host is gone
    assert progress.reserve("master/0", 8) == 2
    progress.commit("master/0", 2)
    assert progress.reserve("master/0", 8) == 8
    progress.commit("worker/0", 10)  # it was only late
    assert progress.reserve("worker/0", 8) == 0


def test_a_round_is_waited_for_as_long_as_the_replica_usually_takes() -> None:
    now = 0.0
    progress = Progress(0, 20, 1, clock=lambda: now)
    assert progress.reserve("slow", 10) == 10
    now = 100.0
    progress.commit("slow", 10)
    assert progress.reserve("slow", 10) == 10
    now = 490.0
    assert not progress.overdue()
    now = 501.0
    assert progress.overdue() == {"slow"}


def test_a_job_that_is_stopped_lets_a_waiting_replica_go() -> None:
    progress, taken = Progress(0, 10, 1), list[int]()
    assert progress.reserve("worker/0", 10) == 10
    thread = threading.Thread(target=lambda: taken.append(progress.reserve("master/0", 10)))
    thread.start()
    progress.stop()
    thread.join(5)
    assert taken == [0]


def test_all_wait_for_an_evaluation_but_the_chief_which_comes_to_it_by_single_steps() -> None:
    progress, taken = Progress(3, 20, 1, every=10), list[int]()
    assert progress.reserve("worker/0", 64) == 7
    thread = threading.Thread(target=lambda: taken.append(progress.reserve("worker/1", 64)))
    thread.start()
    assert progress.reserve("master/0", 64, True) == 1
    progress.commit("worker/0", 10)
    progress.commit("master/0", 11)
    thread.join(0.3)
    assert taken == []
    progress.release()
    thread.join(5)
    assert taken == [9]
    progress.commit("worker/1", 20)
    assert progress.reserve("master/0", 64, True) == 0


def test_the_chief_takes_no_step_past_the_last() -> None:
    progress = Progress(0, 10, 1, every=10)
    assert progress.reserve("worker/0", 10) == 10
    threading.Timer(0.1, progress.stop).start()
    assert progress.reserve("master/0", 10, True) == 0


def replica(name: str, take: Any, emit: Any = lambda line: None, seconds: float = 1.0) -> ReplicaLoop:
    return ReplicaLoop(name, take, SyncPeriod(8, True), seconds, {name: emit}, name == "master/0")


def test_a_round_claims_its_steps_and_gives_them_back_when_its_host_is_lost() -> None:
    asked = list[tuple[int, int, int]]()

    def take(state: Any, steps: int, position: int, live: int) -> tuple[Any, Round]:
        asked.append((state, steps, position))
        if len(asked) == 2:
            raise ConnectionError
        return state + 1, Round(steps, position + steps, 1.0)

    progress = Progress(91, 100)
    rounds = train(replica("master/0", take), 0, progress)
    assert next(rounds)
    with pytest.raises(ConnectionError):
        next(rounds)
    assert progress.training == set()
    assert len(list(train(replica("master/0", take), 1, progress))) == 2
    assert asked == [(0, 1, 91), (1, 8, 92), (1, 1, 92), (2, 7, 93)]


def test_a_replica_begins_with_a_single_step_and_goes_on_with_its_period() -> None:
    asked, lines = list[tuple[Any, int, int]](), list[str]()
    progress = Progress(0, 40, 2)

    def take(state: Any, steps: int, position: int, live: int) -> tuple[Any, Round]:
        asked.append((state, steps, live))
        return state + 1, Round(steps, position + steps, 0.5, {"mae": 0.25}, local_loss=0.75)

    progress.training.add("master/0")
    rounds = train(replica("worker/0", take, lines.append, 1e9), 0, progress)
    assert [next(rounds).steps, next(rounds).steps] == [1, 8]
    progress.training.discard("master/0")
    assert next(rounds).steps == 8
    assert asked == [(0, 1, 2), (1, 8, 2), (2, 8, 1)]
    assert progress.rounds == 3
    assert len(lines) == 1
    assert lines[0].startswith("Train [worker/0], step 1: loss: 0.750, mae: 0.250 (")
    progress.stop()
    assert list(rounds) == []


def test_a_line_says_what_came_since_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines, progress = 0.0, list[str](), Progress(0, 100)
    monkeypatch.setattr("time.monotonic", lambda: now)

    def take(state: Any, steps: int, position: int, live: int) -> tuple[Any, Round]:
        nonlocal now
        now += 0.5
        return state, Round(steps, position + 2 * steps, 1.0, {}, steps)

    measured = ReplicaLoop("master/0", take, SyncPeriod.of(None, 2, 10_000), 1.0, {"master/0": lines.append})
    rounds = train(measured, None, progress)
    for _ in range(4):
        next(rounds)
    rates = [re.search(r"step (\d+): .* \((.*) sec\) (\S+) global steps/s, (\S+) local", line) for line in lines]
    assert [found and found.groups() for found in rates] == [("2", "0.500", "4.0", "2.0"), ("18", "1.500", "16.0", "8.0")]
    assert progress.paces["master/0"].staleness == 4
    for _ in range(4):
        next(rounds)
    assert measured.period.line.startswith("Exchange every ")
    assert measured.period.line in lines


@pytest.mark.parametrize(("local_loss", "whose"), [(float("nan"), "worker/1"), (1.0, "another replica")])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_rounds(loss: float, local_loss: float, whose: str) -> None:
    rounds = train(
        replica("worker/1", lambda state, *_: (state, Round(1, 7, loss, local_loss=local_loss))), None, Progress(0, 20)
    )
    with pytest.raises(DivergedError, match=rf"^the loss of {whose} is {loss} at step 7; try a lower learning rate$"):
        next(rounds)


@pytest.mark.parametrize(("seconds", "waits"), [(0.5, 5.0), (30.0, 120.0)])
def test_the_master_waits_longer_on_slow_hosts(monkeypatch: pytest.MonkeyPatch, seconds: float, waits: float) -> None:
    progress, waited = Progress(0, 400, 2), list[float | None]()
    monkeypatch.setattr(progress._changed, "wait_for", lambda _, timeout=None: waited.append(timeout))
    progress.begin(True, seconds)
    assert waited == [waits, None]


def test_lines() -> None:
    assert train_line("worker/0", 348, 0.7291, {"accuracy": 0.8339}, 1.0371, 200.44, 99.66) == (
        "Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s"
    )
    assert eval_line(990, 0.4, {"accuracy": 0.89}) == "Eval, step 990: loss: 0.400, accuracy: 0.890"
    assert final_line(5006, 0.228, {"accuracy": 0.9351}) == "Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935"


def test_lines_of_any_metrics_and_of_none() -> None:
    assert train_line("master/0", 1, 2.0, {}, 0.5, 1, 1).startswith("Train [master/0], step 1: loss: 2.000 (0.500 sec) ")
    assert eval_line(9, 1e9, {"mae": 1.5, "top 3": 0.1}) == "Eval, step 9: loss: 1000000000.000, mae: 1.500, top 3: 0.100"
    assert final_line(9, 0.1, {}) == "Final metrics after 9 steps, loss: 0.100"


def test_the_interval_grows_to_twenty_evaluations() -> None:
    interval = EvalInterval(1.0)
    assert not interval.due(10.0)
    assert not interval.due(10.9)
    assert interval.due(11.0)
    assert interval.record(11.0, 11.263) == "Adjusting eval interval from 1.00s to 5.26s"
    assert not interval.due(16.5)
    assert interval.due(16.6)


def test_the_interval_stays_for_a_quick_evaluation() -> None:
    interval = EvalInterval(1.0)
    assert interval.record(1.0, 1.04) is None
    assert interval.seconds == 1.0
