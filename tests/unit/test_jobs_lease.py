"""Leases, and silence measured by the observer's own clock."""

from __future__ import annotations

import pytest
from shared_fakes import Clock

from jobs.lease import ChangeTimer, Lease


def test_a_lease_changes_its_holder() -> None:
    first = Lease().with_holder("fab 1", submitter=True)
    assert first == Lease("fab 1", 1, 0, True)
    assert first.renewed().renewed() == Lease("fab 1", 1, 2, True)
    free = first.renewed().with_holder("")
    assert free == Lease("", 2, 0, False)
    assert (free.free, first.free) == (True, False)
    assert free.with_holder("ps-0/1f") == Lease("ps-0/1f", 3, 0, False)


@pytest.mark.parametrize(
    ("lease", "assigned"),
    [
        (Lease("ps-0", 1), False),
        (Lease("ps-0/1f", 1), True),
        (Lease("ps-01/1f", 1), False),
        (Lease("worker-0/1f", 1), False),
        (Lease("", 1), False),
        (Lease("ps-0", 1, submitter=True), False),
    ],
)
def test_a_lease_is_assigned_to_all_incarnations_of_a_replica(lease: Lease, assigned: bool) -> None:
    assert lease.is_assigned_to("ps-0") == assigned


def test_only_observed_silence_counts() -> None:
    clock = Clock()
    watch = ChangeTimer(clock)
    silences = []
    for value, seconds in (("a", 0.0), ("a", 2.0), ("a", 3.0), ("b", 1.0), ("b", 4.0), ("a", 1.0)):
        clock.sleep(seconds)
        silences.append(watch.observe("x", value))
    assert silences == [0.0, 2.0, 5.0, 0.0, 4.0, 0.0]


def test_a_gap_between_observations_counts_as_five_seconds() -> None:
    clock = Clock()
    watch = ChangeTimer(clock)
    watch.observe("x", "a")
    clock.sleep(600.0)
    assert watch.observe("x", "a") == 5.0
    clock.sleep(1.0)
    assert watch.observe("x", "a") == 6.0


def test_keys_are_independent_and_can_be_reset() -> None:
    clock = Clock()
    watch = ChangeTimer(clock)
    watch.observe("x", None)
    clock.sleep(1.0)
    assert watch.observe("y", None) == 0.0
    clock.sleep(1.0)
    assert (watch.observe("x", None), watch.observe("y", None)) == (2.0, 1.0)
    watch.reset("x")
    watch.reset("never seen")
    assert (watch.observe("x", None), watch.observe("y", None)) == (0.0, 1.0)
