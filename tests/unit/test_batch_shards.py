"""The shards of a batch: every record in one shard, in order, on any replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hosts.batch.request import Request
from hosts.batch.shards import PER_REPLICA, Done, InputFile, cut, mine, plan_from_json, plan_to_json

COUNTS = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(COUNTS, st.integers(1, 20))
def test_every_record_is_in_one_shard_and_the_order_is_kept(counts: list[int], replicas: int) -> None:
    shards = cut(counts, replicas)
    found = [(shard.file, record) for shard in shards for record in range(shard.first, shard.end)]
    assert found == [(file, record) for file, count in enumerate(counts) for record in range(count)]
    keys = [key for shard in shards for key in range(shard.key, shard.key + shard.count)]
    assert keys == list(range(sum(counts)))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert {shard.file for shard in shards} == set(range(len(counts))), "an empty file is not forgotten"
    assert len(shards) <= PER_REPLICA * replicas + len(counts)


@given(COUNTS, st.integers(1, 20))
def test_every_shard_is_one_replica_s(counts: list[int], replicas: int) -> None:
    shards = cut(counts, replicas)
    taken = [shard.number for rank in range(replicas) for shard in mine(shards, rank, replicas)]
    assert sorted(taken) == list(range(len(shards)))


def test_one_large_file_is_shared_evenly() -> None:
    assert {shard.count for shard in cut([10_000], 5)} == {500}
    assert [len(mine(cut([10_000], 5), rank, 5)) for rank in range(5)] == [PER_REPLICA] * 5


def test_what_is_written_is_read_again() -> None:
    files = [InputFile("/bucket/a", True, True, 7, "cannot be read"), InputFile("/bucket/é", marks=((0, 0), (7, 99)))]
    assert plan_from_json(plan_to_json(files)) == files
    done = Done(3, [{"file": "/bucket/a", "line": 2, "error": "é"}])
    assert Done.from_json(done.to_json()) == done
    request = Request(("/bucket/a", "/bucket/b"), {"saved_model.pb": "00"})
    assert Request.from_json(request.to_json()) == request
