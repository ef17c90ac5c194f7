"""The shards of a batch: every byte in one shard, in order, on any replica; and their records' numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosts.batch.shards import SHARDS_PER_REPLICA, InputFile, InputPosition, RecordCount, Shard, cut, shards_of

FILES = st.lists(st.integers(0, 5000).map(lambda size: InputFile("/bucket/f", size)), min_size=1, max_size=12)


@given(FILES, st.integers(1, 20))
def test_every_byte_is_in_one_shard_and_the_order_is_kept(files: list[InputFile], replicas: int) -> None:
    shards = cut(files, replicas)
    positions = [(shard.file, byte) for shard in shards for byte in range(shard.start, shard.end)]
    assert positions == [(index, byte) for index, file in enumerate(files) for byte in range(file.size)]
    assert [(shard.number, shard.total) for shard in shards] == [(n, len(shards)) for n in range(len(shards))]
    assert {shard.file for shard in shards} == set(range(len(files))), "an empty file has a shard too"
    assert len(shards) <= SHARDS_PER_REPLICA * replicas + len(files)
    numbers = [shard.number for rank in range(replicas) for shard in shards_of(shards, rank, replicas)]
    assert sorted(numbers) == list(range(len(shards)))


def test_the_shards_of_files() -> None:
    assert cut([InputFile("a", 0)], 1) == [Shard(0, 1, 0, 0, 0)]
    assert cut([InputFile("a", 4)], 1) == [Shard(number, 4, 0, number, number + 1) for number in range(4)]
    assert cut([InputFile("a", 10), InputFile("b", 7, packed=True), InputFile("c", 0), InputFile("d", 3)], 1) == [
        Shard(0, 6, 0, 0, 5),
        Shard(1, 6, 0, 5, 10),
        Shard(2, 6, 1, 0, 3),
        Shard(3, 6, 1, 3, 1 << 62),
        Shard(4, 6, 2, 0, 0),
        Shard(5, 6, 3, 0, 3),
    ]


def test_one_large_file_is_shared_evenly() -> None:
    shards = cut([InputFile("/bucket/f", 10_000)], 5)
    assert {shard.end - shard.start for shard in shards} == {500}
    assert [len(shards_of(shards, rank, 5)) for rank in range(5)] == [SHARDS_PER_REPLICA] * 5


def test_the_last_shard_of_a_packed_file_is_open() -> None:
    plain, packed = cut([InputFile("/bucket/a", 100), InputFile("/bucket/b", 100, packed=True)], 1)[1::2]
    assert plain.end == 100
    assert packed.end > 1 << 50, "its size may be wrong"


def test_the_number_of_a_record() -> None:
    """Records after damage, or that start where no record ends, have no number."""
    first, second, third, other = cut([InputFile("/bucket/a", 300), InputFile("/bucket/b", 100)], 1)
    position = InputPosition()
    assert position.advance(first, RecordCount(5, 0, 110)) == (True, "")
    assert (position.line, position.key) == (5, 5)
    assert position.advance(second, RecordCount(3, 110, 170, "crc")) == (True, "")
    assert position.advance(third, RecordCount(9, 200, 300)) == (False, "")
    assert (position.line, position.key) == (8, 8)
    assert position.advance(other, RecordCount(1, 0, 100)) == (True, "")
    assert (position.line, position.key) == (1, 9)

    assert InputPosition().advance(second, RecordCount(1, 0, 110)) == (True, ""), "it may begin with any shard"

    with_gap = InputPosition()
    with_gap.advance(first, RecordCount(5, 0, 110))
    valid, damage = with_gap.advance(second, RecordCount(3, 100, 200))
    assert (valid, damage[:29]) == (False, "cannot be read from here on: ")
    assert with_gap.advance(third, RecordCount(0, 200, 200)) == (False, "")
    assert with_gap.key == 5


@pytest.mark.parametrize(
    ("count", "valid"),
    [
        (RecordCount(0, 110, 110), True),
        (RecordCount(0, 120, 120), False),
        (RecordCount(0, 120, 120, "crc"), True),
        (RecordCount(2, 110, 120, "crc"), True),
        (RecordCount(2, 120, 130, "crc"), False),
    ],
)
def test_a_shard_begins_where_the_last_one_ended(count: RecordCount, valid: bool) -> None:
    """Without a record in it, damage is reported where it was found."""
    first, second, third = cut([InputFile("/bucket/a", 300)], 1)[:3]
    position = InputPosition()
    position.advance(first, RecordCount(5, 0, 110))
    not_joined = (
        "cannot be read from here on: it is damaged, it changed after the scan, "
        "or a record contains TFRecords (then gzip the file)"
    )
    assert position.advance(second, count) == (valid, "" if valid else not_joined)
    assert (position.line, position.key) == (5 + count.records * valid,) * 2
    readable = valid and not count.damage
    assert position.advance(third, RecordCount(1, count.end, 300)) == (readable, "")
