"""The queue: no host twice, priority before time, no job overtakes one that waits for a shared host; host assignment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.queue import Queue, QueueEntry, place

HOSTS = ["master-0", "worker-0", "worker-1", "ps-0"]


def held_jobs(queue: Queue) -> list[str]:
    return [entry.jobId for entry in queue.entries if entry.has_hosts]


def jobs_ahead(queue: Queue, job_id: str) -> list[str]:
    return [entry.jobId for entry in queue.ahead_of(job_id)]


def test_a_job_gets_all_its_hosts_or_none() -> None:
    queue = Queue().added(QueueEntry("a", ["m", "w"])).added(QueueEntry("b", ["w", "p"])).added(QueueEntry("c", ["x"]))
    assert held_jobs(queue) == ["a", "c"]
    assert jobs_ahead(queue, "b") == ["a"]
    assert (jobs_ahead(queue, "a"), jobs_ahead(queue, "c"), jobs_ahead(queue, "none")) == ([], [], [])
    holders = {host: entry.jobId if (entry := queue.holder(host)) else None for host in "mwpx"}
    assert holders == {"m": "a", "w": "a", "p": None, "x": "c"}
    assert [[entry.jobId for entry in queue.entries_for(host)] for host in "wpy"] == [["a", "b"], ["b"], []]
    after = queue.without(QueueEntry("a", []))
    assert held_jobs(after) == ["b", "c"]
    assert (after.entry("a"), after.entry("b")) == (None, QueueEntry("b", ["w", "p"], has_hosts=True))


def test_jobs_are_ordered_by_priority_and_then_time() -> None:
    queue = Queue().added(QueueEntry("now", ["m"]))
    for job_id, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        queue = queue.added(QueueEntry(job_id, ["m"], priority=priority))
    assert jobs_ahead(queue, "c") == ["now", "b", "d", "a"]
    order = []
    while queue.entries:
        (first,) = held_jobs(queue)
        order.append(first)
        queue = queue.without(QueueEntry(first, []))
    assert order == ["now", "b", "d", "a", "c"]


def test_no_job_takes_hosts_that_a_waiting_job_needs() -> None:
    queue = Queue().added(QueueEntry("a", ["m"])).added(QueueEntry("b", ["m", "w"])).added(QueueEntry("c", ["w"]))
    assert held_jobs(queue) == ["a"]
    assert jobs_ahead(queue, "c") == ["b"]
    assert held_jobs(queue.added(QueueEntry("urgent", ["w"], priority=1))) == ["a", "urgent"]


def test_the_hosts_that_a_job_can_use_and_those_that_it_needs() -> None:
    waits = QueueEntry("a", [], candidates={"master-0": ["m", "w"], "worker-0": ["w"], "ps-0": ["p"]})
    assert (waits.usable_hosts(), waits.required_hosts(), waits.placement) == ({"m", "w", "p"}, {"w", "p"}, {})
    held = replace(waits, hosts=["m", "w", "p"], has_hosts=True)
    assert held.usable_hosts() == held.required_hosts() == {"m", "w", "p"}
    assert held.placement == {"master-0": "m", "worker-0": "w", "ps-0": "p"}
    assert [held.replica_on(host) for host in "mwpx"] == ["master-0", "worker-0", "ps-0", ""]
    old = QueueEntry("a", ["m", "w"])
    assert old.usable_hosts() == old.required_hosts() == {"m", "w"}


def test_another_submission_of_the_same_id_is_not_removed() -> None:
    queue = Queue().added(QueueEntry("a", ["m"], submission_id="mine"))
    assert queue.without(QueueEntry("a", ["m"], submission_id="other")) == queue
    assert queue.without(QueueEntry("a", [], submission_id="mine")).entries == []


_entries = st.lists(
    st.builds(
        QueueEntry, st.just(""), st.lists(st.sampled_from(HOSTS), min_size=1, unique=True), priority=st.integers(0, 2)
    ),
    max_size=7,
).map(lambda entries: [replace(entry, jobId=f"job{n}") for n, entry in enumerate(entries)])  # fmt: skip


def check(queue: Queue) -> None:
    hosts = Counter(host for entry in queue.entries if entry.has_hosts for host in entry.hosts)
    assert max(hosts.values(), default=0) <= 1
    waiting = [entry for entry in queue.entries if not entry.has_hosts]
    for number, entry in enumerate(waiting):
        before = {other.jobId for other in waiting[:number] if other.priority >= entry.priority}
        before |= {other.jobId for other in waiting if other.priority > entry.priority}
        shared = {
            other.jobId
            for other in queue.entries
            if (other.has_hosts or other.jobId in before) and not set(other.hosts).isdisjoint(entry.hosts)
        }
        assert shared, f"{entry} waits for no job"
        assert {other.jobId for other in queue.ahead_of(entry.jobId)} == shared
    assert queue.promoted() == queue


@given(_entries, st.lists(st.integers(0, 6)))
def test_any_order_of_additions_and_removals_keeps_the_rules(entries: list[QueueEntry], order: list[int]) -> None:
    queue = Queue()
    added: list[QueueEntry] = []
    for number in [*range(len(entries)), *order]:
        held_before = set(held_jobs(queue))
        if number < len(entries) and entries[number] not in added:
            queue = queue.added(entries[number])
            added.append(entries[number])
            assert held_before <= set(held_jobs(queue))
            new = set(held_jobs(queue)) - held_before
            assert new <= {entries[number].jobId}  # an addition frees no host for others
        elif queue.entries:
            removed = queue.entries[number % len(queue.entries)]
            queue = queue.without(removed)
            assert queue.without(removed) == queue
            assert held_before - {removed.jobId} <= set(held_jobs(queue))
            assert queue.entry(removed.jobId) is None
        check(queue)
    while queue.entries:
        if not held_jobs(queue):
            raise AssertionError("all wait for one another")
        queue = queue.without(QueueEntry(held_jobs(queue)[0], []))
        check(queue)


# The hosts that a job gets

ROLE_HOSTS = ("m", "w0", "w1", "w2", "p")
# A master may use a worker's host, a worker only those, a parameter server only its own.
MASTER, WORKER, PS = ["m", "w0", "w1", "w2"], ["w0", "w1", "w2"], ["p"]


def candidates_for(workers: int, ps: int = 0) -> dict[str, list[str]]:
    """Return the candidates of a job's replicas, the hosts of their own names first."""
    workers_candidates = {f"worker-{n}": [f"w{n}", *(host for host in WORKER if host != f"w{n}")] for n in range(workers)}
    return {"master-0": MASTER, **workers_candidates, **({"ps-0": PS} if ps else {})}


@pytest.mark.parametrize(
    ("candidates", "taken", "placement"),
    [
        (candidates_for(0), "", {"master-0": "m"}),
        (candidates_for(0), "m", {"master-0": "w0"}),
        (candidates_for(2, 1), "", {"master-0": "m", "worker-0": "w0", "worker-1": "w1", "ps-0": "p"}),
        (candidates_for(2), "m w0", {"master-0": "w1", "worker-0": "w2"}),
        (candidates_for(3), "", {"master-0": "m", "worker-0": "w0", "worker-1": "w1", "worker-2": "w2"}),
        (candidates_for(2), "m", {"master-0": "w0", "worker-0": "w1", "worker-1": "w2"}),
        (candidates_for(0), "m w0 w1 w2", {}),
    ],
)
def test_a_replica_gets_its_best_free_host(candidates: dict[str, list[str]], taken: str, placement: dict[str, str]) -> None:
    assert place(candidates, taken.split()) == placement


@given(st.integers(0, 3), st.integers(0, 1), st.sets(st.sampled_from(ROLE_HOSTS)))
def test_a_job_is_placed_if_that_is_possible(workers: int, ps: int, taken: set[str]) -> None:
    placement = place(candidates_for(workers, ps), taken)
    assert len(set(placement.values())) == len(placement)
    assert not set(placement.values()) & taken
    free_workers, free_masters = len(set(WORKER) - taken), len(set(MASTER) - taken)
    possible = workers <= free_workers and workers + 1 <= free_masters and (not ps or "p" not in taken)
    assert (len(placement) == 1 + workers + ps) == possible


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    """Return a queue after additions and removals of jobs."""
    queue = Queue()
    for number in range(draw(st.integers(1, 8))):
        candidates = candidates_for(draw(st.integers(0, 3)), draw(st.integers(0, 1)))
        queue = queue.added(QueueEntry(f"job{number}", [], priority=draw(st.integers(0, 1)), candidates=candidates))
        if draw(st.booleans()):
            queue = queue.without(draw(st.sampled_from(queue.entries)))
    return queue


@given(queues())
def test_no_host_has_two_jobs_and_no_usable_host_is_idle(queue: Queue) -> None:
    held_hosts = [host for entry in queue.entries if entry.has_hosts for host in entry.hosts]
    assert len(set(held_hosts)) == len(held_hosts)
    for entry in queue.entries:
        assert entry.has_hosts == bool(entry.hosts)
        assert all(host in entry.candidates[replica] for replica, host in entry.placement.items())
        assert bool(queue.ahead_of(entry.jobId)) != entry.has_hosts
    waiting = sorted((entry for entry in queue.entries if not entry.has_hosts), key=lambda entry: -entry.priority)
    if waiting:
        assert len(place(waiting[0].candidates, held_hosts)) < len(waiting[0].candidates)


@given(queues())
def test_every_job_is_eventually_held(queue: Queue) -> None:
    for _ in range(len(queue.entries)):
        queue = queue.without(next(entry for entry in queue.entries if entry.has_hosts))
    assert queue.entries == []


def test_a_job_that_waits_for_several_hosts_is_not_overtaken() -> None:
    queue = Queue()
    for number in range(4):
        queue = queue.added(QueueEntry(f"one{number}", [], candidates=candidates_for(0)))
    assert [entry.placement for entry in queue.entries] == [{"master-0": host} for host in ("m", "w0", "w1", "w2")]
    queue = queue.added(QueueEntry("three", [], candidates=candidates_for(2))).added(
        QueueEntry("late", [], candidates=candidates_for(0))
    )
    assert [entry.jobId for entry in queue.ahead_of("late")] == ["one0", "one1", "one2", "one3", "three"]
    assert queue.reserved_hosts() == {}
    assert queue.without(QueueEntry("one3", [])).reserved_hosts() == {"w2": "three"}
    for job_id in ("one3", "one1"):
        queue = queue.without(QueueEntry(job_id, []))
        assert [entry.jobId for entry in queue.entries if not entry.has_hosts] == ["three", "late"]
    queue = queue.without(QueueEntry("one0", []))
    three = queue.entry("three")
    assert three.placement == {"master-0": "m", "worker-0": "w0", "worker-1": "w2"}
    assert [(entry.jobId, entry.replica_on("w2")) for entry in queue.entries_for("w2")] == [("three", "worker-1"), ("late", "")]
