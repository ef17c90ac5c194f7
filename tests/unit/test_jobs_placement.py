"""The assignment of hosts to replicas, and the peers in each task."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.checked import RecordError
from jobs.queue import Queue, QueueEntry, place
from jobs.records import JobRecord, Plan, Task

HOSTS = ("m", "w0", "w1", "w2", "p")
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


@given(st.integers(0, 3), st.integers(0, 1), st.sets(st.sampled_from(HOSTS)))
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
        queue = queue.added(QueueEntry(f"job{number}", [], priority=draw(st.integers(0, 1)), wants=asked))
        if draw(st.booleans()):
            queue = queue.without(draw(st.sampled_from(queue.entries)))
    return queue


@given(queues())
def test_no_host_has_two_jobs_and_none_is_idle_for_whom_it_would_do(queue: Queue) -> None:
    held = [host for entry in queue.entries if entry.held for host in entry.hosts]
    assert len(set(held)) == len(held)
    for entry in queue.entries:
        assert entry.held == bool(entry.hosts)
        assert all(host in entry.wants[replica] for replica, host in entry.placement.items())
        assert bool(queue.ahead_of(entry.jobId)) != entry.held
    waiting = sorted((entry for entry in queue.entries if not entry.held), key=lambda entry: -entry.priority)
    if waiting:
        assert len(place(waiting[0].wants, held)) < len(waiting[0].wants)


@given(queues())
def test_every_job_has_its_turn(queue: Queue) -> None:
    for _ in range(len(queue.entries)):
        queue = queue.without(next(entry for entry in queue.entries if entry.held))
    assert queue.entries == []


def test_jobs_side_by_side_and_one_that_waits_for_several_hosts_is_not_passed() -> None:
    queue = Queue()
    for number in range(4):
        queue = queue.added(QueueEntry(f"one{number}", [], wants=wants(0)))
    assert [entry.placement for entry in queue.entries] == [{"master-0": host} for host in ("m", "w0", "w1", "w2")]
    queue = queue.added(QueueEntry("three", [], wants=wants(2))).added(QueueEntry("late", [], wants=wants(0)))
    assert [entry.jobId for entry in queue.ahead_of("late")] == ["one0", "one1", "one2", "one3", "three"]
    assert queue.kept() == {}
    assert queue.without(QueueEntry("one3", [])).kept() == {"w2": "three"}
    for gone in ("one3", "one1"):
        queue = queue.without(QueueEntry(gone, []))
        assert [entry.jobId for entry in queue.entries if not entry.held] == ["three", "late"]
    queue = queue.without(QueueEntry("one0", []))
    three = queue.entry("three")
    assert three is not None
    assert three.placement == {"master-0": "m", "worker-0": "w0", "worker-1": "w2"}
    assert [(entry.jobId, entry.replica_on("w2")) for entry in queue.concerning("w2")] == [
        ("three", "worker-1"),
        ("late", ""),
    ]


def test_a_record_of_an_older_version_names_hosts_alone() -> None:
    old = JobRecord.from_json('{"jobId": "job01", "hosts": ["master-0", "ps-0"]}')
    assert old.wanted == {"master-0": ["master-0"], "ps-0": ["ps-0"]}
    assert old.placement == {"master-0": "master-0", "ps-0": "ps-0"}
    assert JobRecord("job02", wants={"master-0": ["w"]}).placement == {}


def test_a_task_is_told_the_addresses_of_the_hosts_that_the_job_got() -> None:
    config = {"cluster": {"chief": ["master-0:2222"], "worker": ["worker-0:2222"]}, "task": {"type": "chief", "index": 0}}
    told = {"MASTER_ADDR": "master-0", "RANK": "0", "MINE": "master-0", "JAX_COORDINATOR_ADDRESS": "master-0:2223"}
    tasks = {"master-0": Task(json.dumps(config), told), "worker-0": Task(json.dumps(config))}
    plan = Plan("job01", ["master-0", "worker-0"], "m", [], tasks, addresses={"w0": "10.0.0.1", "w1": "10.0.0.2"})
    placed = plan.placed({"master-0": "w1", "worker-0": "w0"})
    assert json.loads(placed.tasks["worker-0"].tfConfig) == {
        "cluster": {"chief": ["10.0.0.2:2222"], "worker": ["10.0.0.1:2222"]},
        "task": {"type": "chief", "index": 0},
    }
    addresses = {"MASTER_ADDR": "10.0.0.2", "JAX_COORDINATOR_ADDRESS": "10.0.0.2:2223"}
    assert placed.tasks["master-0"].environment == {"RANK": "0", "MINE": "master-0"} | addresses
    assert placed.address("master-0") == "10.0.0.2"
    assert placed.tasks["worker-0"].environment == {}
    assert placed.hosts == {"master-0": "w1", "worker-0": "w0"}
    assert plan.peers("master-0") == {}
    assert (placed.peers("master-0"), placed.peers("worker-0")) == ({"w0": "10.0.0.1"}, {"w1": "10.0.0.2"})
    damaged = replace(plan, tasks={"master-0": Task("no JSON")})
    for text in ("{", "null", "[]", '{"cluster": {"chief": [1]}}', '{"cluster": []}'):
        with pytest.raises(RecordError, match=r"plan\.json has a TF_CONFIG that is none"):
            replace(damaged, tasks={"master-0": Task(text)}).placed({"master-0": "w1"})
    older = Plan("job01", ["master-0"], "m", [], {"master-0": Task("no JSON", told)})
    assert older.placed({"master-0": "master-0"}).tasks == older.tasks
