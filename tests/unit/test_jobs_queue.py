"""The queue: no host twice, priority and then time, never past a job that waits for a shared host; the assignment of hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.queue import Queue, QueueEntry, place

HOSTS = ["master-0", "worker-0", "worker-1", "ps-0"]


def held(queue: Queue) -> list[str]:
    return [entry.jobId for entry in queue.entries if entry.held]


def ahead(queue: Queue, job_id: str) -> list[str]:
    return [entry.jobId for entry in queue.ahead_of(job_id)]


def test_all_hosts_or_none() -> None:
    queue = Queue().added(QueueEntry("a", ["m", "w"])).added(QueueEntry("b", ["w", "p"])).added(QueueEntry("c", ["x"]))
    assert held(queue) == ["a", "c"]
    assert ahead(queue, "b") == ["a"]
    assert (ahead(queue, "a"), ahead(queue, "c"), ahead(queue, "none")) == ([], [], [])
    holders = {host: entry.jobId if (entry := queue.holder(host)) else None for host in "mwpx"}
    assert holders == {"m": "a", "w": "a", "p": None, "x": "c"}
    assert [[entry.jobId for entry in queue.entries_for(host)] for host in "wpy"] == [["a", "b"], ["b"], []]
    after = queue.without(QueueEntry("a", []))
    assert held(after) == ["b", "c"]
    assert (after.entry("a"), after.entry("b")) == (None, QueueEntry("b", ["w", "p"], held=True))


def test_priority_then_time() -> None:
    queue = Queue().added(QueueEntry("now", ["m"]))
    for job_id, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        queue = queue.added(QueueEntry(job_id, ["m"], priority=priority))
    assert ahead(queue, "c") == ["now", "b", "d", "a"]
    order = []
    while queue.entries:
        (first,) = held(queue)
        order.append(first)
        queue = queue.without(QueueEntry(first, []))
    assert order == ["now", "b", "d", "a", "c"]


def test_no_job_takes_a_part_of_another_s_reserved_hosts() -> None:
    queue = Queue().added(QueueEntry("a", ["m"])).added(QueueEntry("b", ["m", "w"])).added(QueueEntry("c", ["w"]))
    assert held(queue) == ["a"]
    assert ahead(queue, "c") == ["b"]
    assert held(queue.added(QueueEntry("urgent", ["w"], priority=1))) == ["a", "urgent"]


def test_another_submission_of_the_same_id_stays() -> None:
    queue = Queue().added(QueueEntry("a", ["m"], token="mine"))
    assert queue.without(QueueEntry("a", ["m"], token="other")) == queue
    assert queue.without(QueueEntry("a", [], token="mine")).entries == []


_entries = st.lists(
    st.builds(
        QueueEntry, st.just(""), st.lists(st.sampled_from(HOSTS), min_size=1, unique=True), priority=st.integers(0, 2)
    ),
    max_size=7,
).map(lambda entries: [replace(entry, jobId=f"job{n}") for n, entry in enumerate(entries)])  # fmt: skip


def check(queue: Queue) -> None:
    hosts = Counter(host for entry in queue.entries if entry.held for host in entry.hosts)
    assert max(hosts.values(), default=0) <= 1
    waiting = [entry for entry in queue.entries if not entry.held]
    for number, entry in enumerate(waiting):
        before = {e.jobId for e in waiting[:number] if e.priority >= entry.priority}
        before |= {e.jobId for e in waiting if e.priority > entry.priority}
        shared = {e.jobId for e in queue.entries if (e.held or e.jobId in before) and not set(e.hosts).isdisjoint(entry.hosts)}
        assert shared, f"{entry} waits for nobody"
        assert {e.jobId for e in queue.ahead_of(entry.jobId)} == shared
    assert queue.promoted() == queue


@given(_entries, st.lists(st.integers(0, 6)))
def test_whoever_comes_and_goes(entries: list[QueueEntry], order: list[int]) -> None:
    queue = Queue()
    came: list[QueueEntry] = []
    for number in [*range(len(entries)), *order]:
        was = set(held(queue))
        if number < len(entries) and entries[number] not in came:
            queue = queue.added(entries[number])
            came.append(entries[number])
            assert was <= set(held(queue))
            new = set(held(queue)) - was
            assert new <= {entries[number].jobId}  # who comes frees nothing for others
        elif queue.entries:
            gone = queue.entries[number % len(queue.entries)]
            queue = queue.without(gone)
            assert queue.without(gone) == queue
            assert was - {gone.jobId} <= set(held(queue))
            assert queue.entry(gone.jobId) is None
        check(queue)
    while queue.entries:
        if not held(queue):
            raise AssertionError("all wait for one another")
        queue = queue.without(QueueEntry(held(queue)[0], []))
        check(queue)


# Which hosts a job gets

ROLE_HOSTS = ("m", "w0", "w1", "w2", "p")
# A master may have a worker's host, a worker none but those, a parameter server its own alone.
MASTER, WORKER, PS = ["m", "w0", "w1", "w2"], ["w0", "w1", "w2"], ["p"]


def wants(workers: int, ps: int = 0) -> dict[str, list[str]]:
    """Return the candidates of a job's replicas, the hosts of their own names first."""
    own = {f"worker-{n}": [f"w{n}", *(host for host in WORKER if host != f"w{n}")] for n in range(workers)}
    return {"master-0": MASTER, **own, **({"ps-0": PS} if ps else {})}


@pytest.mark.parametrize(
    ("wanted", "taken", "placed"),
    [
        (wants(0), "", {"master-0": "m"}),
        (wants(0), "m", {"master-0": "w0"}),
        (wants(2, 1), "", {"master-0": "m", "worker-0": "w0", "worker-1": "w1", "ps-0": "p"}),
        (wants(2), "m w0", {"master-0": "w1", "worker-0": "w2"}),
        (wants(3), "", {"master-0": "m", "worker-0": "w0", "worker-1": "w1", "worker-2": "w2"}),
        (wants(2), "m", {"master-0": "w0", "worker-0": "w1", "worker-1": "w2"}),
        (wants(0), "m w0 w1 w2", {}),
    ],
)
def test_the_best_host_that_is_free(wanted: dict[str, list[str]], taken: str, placed: dict[str, str]) -> None:
    assert place(wanted, taken.split()) == placed


@given(st.integers(0, 3), st.integers(0, 1), st.sets(st.sampled_from(ROLE_HOSTS)))
def test_whoever_can_be_placed_is(workers: int, ps: int, taken: set[str]) -> None:
    placed = place(wants(workers, ps), taken)
    assert len(set(placed.values())) == len(placed)
    assert not set(placed.values()) & taken
    free_workers, free_masters = len(set(WORKER) - taken), len(set(MASTER) - taken)
    enough = workers <= free_workers and workers + 1 <= free_masters and (not ps or "p" not in taken)
    assert (len(placed) == 1 + workers + ps) == enough


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    """Return a queue after some jobs have come and gone."""
    queue = Queue()
    for number in range(draw(st.integers(1, 8))):
        asked = wants(draw(st.integers(0, 3)), draw(st.integers(0, 1)))
        queue = queue.added(QueueEntry(f"job{number}", [], priority=draw(st.integers(0, 1)), candidates=asked))
        if draw(st.booleans()):
            queue = queue.without(draw(st.sampled_from(queue.entries)))
    return queue


@given(queues())
def test_no_host_has_two_jobs_and_none_is_idle_for_whom_it_would_do(queue: Queue) -> None:
    held = [host for entry in queue.entries if entry.held for host in entry.hosts]
    assert len(set(held)) == len(held)
    for entry in queue.entries:
        assert entry.held == bool(entry.hosts)
        assert all(host in entry.candidates[replica] for replica, host in entry.placement.items())
        assert bool(queue.ahead_of(entry.jobId)) != entry.held
    waiting = sorted((entry for entry in queue.entries if not entry.held), key=lambda entry: -entry.priority)
    if waiting:
        assert len(place(waiting[0].candidates, held)) < len(waiting[0].candidates)


@given(queues())
def test_every_job_has_its_turn(queue: Queue) -> None:
    for _ in range(len(queue.entries)):
        queue = queue.without(next(entry for entry in queue.entries if entry.held))
    assert queue.entries == []


def test_jobs_side_by_side_and_one_that_waits_for_several_hosts_is_not_passed() -> None:
    queue = Queue()
    for number in range(4):
        queue = queue.added(QueueEntry(f"one{number}", [], candidates=wants(0)))
    assert [entry.placement for entry in queue.entries] == [{"master-0": host} for host in ("m", "w0", "w1", "w2")]
    queue = queue.added(QueueEntry("three", [], candidates=wants(2))).added(QueueEntry("late", [], candidates=wants(0)))
    assert [entry.jobId for entry in queue.ahead_of("late")] == ["one0", "one1", "one2", "one3", "three"]
    assert queue.reserved_hosts() == {}
    assert queue.without(QueueEntry("one3", [])).reserved_hosts() == {"w2": "three"}
    for gone in ("one3", "one1"):
        queue = queue.without(QueueEntry(gone, []))
        assert [entry.jobId for entry in queue.entries if not entry.held] == ["three", "late"]
    queue = queue.without(QueueEntry("one0", []))
    three = queue.entry("three")
    assert three is not None
    assert three.placement == {"master-0": "m", "worker-0": "w0", "worker-1": "w2"}
    assert [(entry.jobId, entry.replica_on("w2")) for entry in queue.entries_for("w2")] == [
        ("three", "worker-1"),
        ("late", ""),
    ]
