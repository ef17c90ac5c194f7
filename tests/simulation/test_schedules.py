"""Play the real rules in a hostile world, and prove that the checker detects violations."""

from __future__ import annotations

import pytest
from cluster import fingerprint, play
from old_rules import RULES, use_old_rule
from simulated import Violation
from soak import batch

SCHEDULES = 600
ALL_SCHEDULES = 3000
BATCH = 100
MAX_SCHEDULES = 1000
_MORE = pytest.mark.full(f"the first {SCHEDULES} schedules prove the same; more of them cover rarer orders of events")


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[_MORE] * (first >= SCHEDULES)) for first in range(0, ALL_SCHEDULES, BATCH)]
)
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    assert batch(first, BATCH) == (BATCH, [])


@pytest.mark.parametrize("rule", RULES)
def test_the_checker_detects_the_rules_of_an_earlier_version(rule: str) -> None:
    with use_old_rule(rule):
        for seed in range(MAX_SCHEDULES):
            try:
                play(seed)
            except Violation:
                return
    raise AssertionError(f"{rule}: not found in {MAX_SCHEDULES} schedules")


def test_a_seed_replays() -> None:
    for seed in (3, 17, 42):
        assert fingerprint(play(seed)) == fingerprint(play(seed))
