"""The real rules in a hostile world: a few thousand schedules, and proof that the checker sees what it should."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
from cluster import fingerprint, play
from old_rules import RULES, put_back
from soak import batch
from world import Violation

SCHEDULES = 3000
BATCH = 250
FOUND_WITHIN = 1000


def test_no_schedule_breaks_an_invariant() -> None:
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(batch, range(0, SCHEDULES, BATCH), [BATCH] * (SCHEDULES // BATCH)))
    assert sum(count for count, _ in results) == SCHEDULES
    assert [line for _, broken in results for line in broken] == []


@pytest.mark.parametrize("rule", RULES)
def test_the_checker_finds_the_rules_of_an_earlier_version(rule: str) -> None:
    with put_back(rule):
        for seed in range(FOUND_WITHIN):
            try:
                play(seed)
            except Violation:
                return
    raise AssertionError(f"{rule}: not found in {FOUND_WITHIN} schedules")


def test_a_seed_replays() -> None:
    for seed in (3, 17, 42):
        assert fingerprint(play(seed)) == fingerprint(play(seed))
