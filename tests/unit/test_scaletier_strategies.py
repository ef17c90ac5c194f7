"""The strategies' own decisions, without TensorFlow: stages, periods, shares, rates."""

from __future__ import annotations

import threading
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st
from waiting import limit, wait_for

from scaletier.loop import StepBudget
from scaletier.stages import partition
from scaletier.sync_period import SyncPeriod

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=9)


@given(SIZES, st.integers(1, 6))
def test_layers_are_split_into_non_empty_parts(sizes: list[int], parts: int) -> None:
    cuts = partition(sizes, parts)
    assert (cuts[0], cuts[-1]) == (0, len(sizes))
    assert len(cuts) - 1 == min(parts, len(sizes))
    assert all(start < end for start, end in pairwise(cuts))


@given(SIZES, st.integers(2, 4))
def test_no_other_partition_has_a_smaller_largest_part(sizes: list[int], parts: int) -> None:
    def largest(cuts: list[int]) -> int:
        return max(sum(sizes[start:end]) for start, end in pairwise(cuts))

    cuts = partition(sizes, parts)
    others = combinations(range(1, len(sizes)), len(cuts) - 2)
    assert largest(cuts) == min(largest([0, *inner, len(sizes)]) for inner in others)


def test_a_given_period_stays() -> None:
    period = SyncPeriod.of(3, 5, 10_000)
    for _ in range(20):
        period.observe(3, 1.0, 0.1)
    assert (period.steps, period.line) == (3, "")


def test_a_single_replica_checks_four_times_a_second() -> None:
    period = SyncPeriod.of(None, 1, 10_000)
    assert period.steps == 1
    for a_step, steps in ((0.001, 64), (0.01, 25), (0.1, 2), (4.0, 1)):
        period.observe(period.steps, period.steps * a_step + 0.5, period.steps * a_step)
        assert (period.steps, period.line) == (steps, "")


def test_a_round_of_slow_steps_is_short_for_any_exchange_time() -> None:
    period = SyncPeriod.of(None, 5, 3_000)
    period.observe(4, 4 * 1.1 + 60.0, 4 * 1.1)
    assert period.steps == 2
    period.observe(2, 2 * 9.0 + 60.0, 2 * 9.0)
    assert period.steps == 1


def test_a_period_grows_with_the_cost_of_an_exchange() -> None:
    period = SyncPeriod.of(None, 5, 3_000)
    for _ in range(8):
        period.observe(4, 0.04 + 0.1, 0.04)  # 10 ms a step, 100 ms an exchange: 67 steps would make it 0.15 of theirs
    assert period.steps == 3_000 // (15 * 5) == 40
    assert period.line == "Exchange every 40 steps: 10.0 ms a step, 100.0 ms an exchange"
    for _ in range(8):
        period.observe(40, 0.4 + 0.0185, 0.4)
    assert period.steps == 13
    for _ in range(8):
        period.observe(40, 4.0 + 0.01, 4.0)
    assert period.steps == 4


def test_a_short_job_synchronizes_often() -> None:
    period = SyncPeriod.of(None, 5, 300)
    for _ in range(8):
        period.observe(4, 1.0, 0.001)
    assert period.steps == 4


def test_training_replicas_are_counted() -> None:
    budget = StepBudget(0, 400, 3)
    assert budget.live_hosts == 1
    budget.training |= {"master/0", "worker/0", "worker/1"}
    assert budget.live_hosts == 3
    budget.training -= {"worker/0", "worker/1"}
    assert budget.live_hosts == 1


def test_a_replica_with_a_hanging_round_is_not_counted() -> None:
    now = 0.0
    budget = StepBudget(0, 400, 2, clock=lambda: now)
    budget.training |= {"master/0", "worker/0"}
    budget.reserve("worker/0", 4)
    assert budget.live_hosts == 2
    now = 60.0
    assert budget.live_hosts == 1
    budget.commit("worker/0", 4)
    assert budget.live_hosts == 2


def test_a_chief_that_evaluates_is_not_counted_and_a_replica_that_waits_for_it_is() -> None:
    now = 0.0
    budget = StepBudget(0, 400, 2, steps_between_evaluations=4, clock=lambda: now)
    budget.training |= {"master/0", "worker/0"}
    for name in ("master/0", "worker/0"):
        budget.reserve(name, 2)
        budget.commit(name, budget.step + 2)
    waiting = threading.Thread(target=budget.reserve, args=("worker/0", 4), daemon=True)
    waiting.start()
    wait_for(lambda: "worker/0" not in budget._reserved, "the worker's wait")
    assert budget.live_hosts == 2
    now = 2.1
    assert budget.overdue() == {"master/0"}
    assert budget.live_hosts == 1
    budget.reserve("master/0", 1, True)
    assert budget.live_hosts == 2
    budget.stop()
    waiting.join(limit())


def test_the_master_starts_after_the_workers_are_prepared() -> None:
    budget, order = StepBudget(0, 400, 2), list[str]()

    def worker() -> None:
        order.append("worker prepared")
        budget.begin(is_chief=False)
        order.append("worker begins")

    thread = threading.Thread(target=worker)
    thread.start()
    wait_for(lambda: len(order) > 0, "the worker's preparation")
    thread.join(0.3)
    assert order == ["worker prepared"]  # it waits for the master
    budget.begin(is_chief=True)
    thread.join(limit())
    assert order == ["worker prepared", "worker begins"]


def test_stopping_a_job_releases_a_waiting_worker() -> None:
    budget = StepBudget(0, 400, 3)
    budget.stop(RuntimeError("first"))
    budget.stop(RuntimeError("second"))
    budget.begin(is_chief=False)
    assert str(budget.failure) == "first"
