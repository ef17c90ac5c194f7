"""Steps of concurrent replicas: how many each may take, so that the job ends at its last step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletier.local_steps import DivergedError, Round
from scaletier.period import SyncPeriod
from scaletier.replica import ReplicaLoop, Rounds, StepProgress, train
from scaletier.step_budget import StepBudget

GOING, STOPPED = threading.Event(), threading.Event()
STOPPED.set()


@given(st.integers(1, 500), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64)), max_size=200))
def test_however_rounds_overlap_no_step_is_taken_past_the_last(
    max_steps: int, replicas: int, turns: list[tuple[int, int]]
) -> None:
    claims, centre, walking = StepBudget(0, max_steps, replicas), 0, dict[str, int]()
    for index, period in turns:
        name = f"replica/{index % replicas}"
        if name in walking:  # its round ends, and it comes to the servers
            centre += walking.pop(name)
            claims.settle(name, centre)
        elif centre + sum(walking.values()) < max_steps:
            walking[name] = claims.claim(name, period, GOING)
            assert 1 <= walking[name] <= period
        assert centre + sum(walking.values()) <= max_steps
    for name, steps in walking.items():
        centre += steps
        claims.settle(name, centre)
    while centre < max_steps:
        centre += claims.claim("replica/0", 64, GOING)
        claims.settle("replica/0", centre)
    assert centre == max_steps
    assert claims.claim("replica/0", 64, GOING) == 0


def test_a_round_near_the_end_is_a_part_of_what_is_free() -> None:
    claims = StepBudget(900, 1000, 4)
    assert [claims.claim(name, 64, GOING) for name in "abcd"] == [25, 18, 14, 10]


def test_the_last_steps_are_waited_for_and_free_again_where_their_round_fails() -> None:
    claims, taken = StepBudget(0, 10, 1), list[int]()
    assert claims.claim("worker/0", 10, GOING) == 10
    thread = threading.Thread(target=lambda: taken.append(claims.claim("master/0", 64, GOING)))
    thread.start()
    thread.join(0.3)
    assert taken == []
    claims.settle("worker/0", None)
    thread.join(5)
    assert taken == [10]


def test_a_round_that_does_not_end_does_not_hold_the_job_up() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.4  # time goes on whenever it is looked at
        return now

    claims = StepBudget(0, 10, 1, clock)
    assert claims.claim("worker/0", 8, GOING) == 8  # and then its host is gone
    assert claims.claim("master/0", 8, GOING) == 2
    claims.settle("master/0", 2)
    assert claims.claim("master/0", 8, GOING) == 8
    claims.settle("worker/0", 10)  # it was only late
    assert claims.claim("worker/0", 8, GOING) == 0


def test_a_round_is_waited_for_as_long_as_the_replica_usually_takes() -> None:
    now = 0.0
    claims = StepBudget(0, 20, 1, lambda: now)
    assert claims.claim("slow", 10, GOING) == 10
    now = 100.0
    claims.settle("slow", 10)
    assert claims.claim("slow", 10, GOING) == 10
    now = 490.0
    assert not claims._give_up_late()
    now = 501.0
    assert claims._give_up_late()


def test_a_job_that_is_stopped_lets_a_waiting_replica_go() -> None:
    claims, stopped = StepBudget(0, 10, 1), threading.Event()
    assert claims.claim("worker/0", 10, stopped) == 10
    stopped.set()
    assert claims.claim("master/0", 10, stopped) == 0


def test_all_wait_for_an_evaluation_but_the_chief_which_comes_to_it_by_single_steps() -> None:
    claims, taken = StepBudget(3, 20, 1, every=10), list[int]()
    assert claims.claim("worker/0", 64, GOING) == 7
    thread = threading.Thread(target=lambda: taken.append(claims.claim("worker/1", 64, GOING)))
    thread.start()
    assert claims.claim("master/0", 64, GOING, True) == 1
    claims.settle("worker/0", 10)
    claims.settle("master/0", 11)
    assert claims.claim("worker/2", 64, STOPPED) == 0
    thread.join(0.3)
    assert taken == []
    claims.release()
    thread.join(5)
    assert taken == [9]
    assert claims.claim("worker/0", 64, STOPPED) == 0
    claims.settle("worker/1", 20)
    assert claims.claim("master/0", 64, GOING, True) == 0


def test_the_chief_takes_no_step_past_the_last() -> None:
    claims, stopped = StepBudget(0, 10, 1, every=10), threading.Event()
    assert claims.claim("worker/0", 10, GOING) == 10
    thread = threading.Timer(0.1, stopped.set)
    thread.start()
    assert claims.claim("master/0", 10, stopped, True) == 0


def test_a_walk_claims_its_steps_and_gives_them_back_when_its_host_is_lost() -> None:
    asked = list[tuple[int, int]]()

    def take(state: Any, steps: int, position: int, live: int) -> tuple[Any, Round]:
        asked.append((steps, position))
        if len(asked) == 2:
            raise ConnectionError
        return state + 1, Round(steps, position + steps, 1.0)

    progress = StepProgress(90, 100, 0)
    rounds = Rounds(ReplicaLoop("master/0", True, take, SyncPeriod(8, True), 1.0, lambda line: None), 0, progress)
    assert rounds.take(8, 1)
    with pytest.raises(ConnectionError):
        rounds.take(8, 1)
    assert rounds.take(8, 1)
    assert rounds.take(8, 1) is None
    assert asked == [(8, 90), (2, 98), (2, 98)]
    assert rounds.state == 2


def test_a_replica_begins_with_a_single_step_and_goes_on_with_its_period() -> None:
    asked, lines = list[tuple[Any, int, int]](), list[str]()
    progress = StepProgress(0, 40, 1)

    def take(state: Any, steps: int, position: int, live: int) -> tuple[Any, Round]:
        asked.append((state, steps, live))
        return state + 1, Round(steps, position + steps, 0.5, {"mae": 0.25})

    with progress.training("master/0"):
        rounds = train(ReplicaLoop("worker/0", False, take, SyncPeriod(8, True), 1e9, lines.append), 0, progress)
        assert [next(rounds).steps, next(rounds).steps] == [1, 8]
    assert next(rounds).steps == 8
    assert asked == [(0, 1, 2), (1, 8, 2), (2, 8, 1)]
    assert progress.rounds == 3
    assert len(lines) == 1
    assert lines[0].startswith("Train [worker/0], step 1: loss: 0.500, mae: 0.250 (")
    progress.stopped.set()
    assert list(rounds) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_walk(loss: float) -> None:
    rounds = Rounds(
        ReplicaLoop(
            "worker/1", False, lambda state, *_: (state, Round(1, 7, loss)), SyncPeriod(8, True), 1.0, lambda line: None
        ),
        None,
        StepProgress(0, 20, 1),
    )
    with pytest.raises(DivergedError, match=rf"^the loss of worker/1 is {loss} at step 7; try a lower learning rate$"):
        rounds.take(8, 1)
