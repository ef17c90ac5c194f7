"""The queue: no host twice, priority and then time, never past somebody who waits for a shared host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jobs.queue import Queue, QueueEntry

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
    assert [[entry.jobId for entry in queue.concerning(host)] for host in "wpy"] == [["a", "b"], ["b"], []]
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


def test_nobody_takes_a_part_of_what_another_waits_for() -> None:
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
