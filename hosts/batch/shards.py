"""The shards of the input: pure functions of the files' counts, so that all replicas compute the same."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# More than one a replica, so that who is started again has little to do over again.
PER_REPLICA = 4


@dataclass(frozen=True)
class InputFile:
    """A file of the input: TFRecords, or lines, perhaps in gzip.

    Attributes:
        count: how many records, or lines, can be read.
        damage: what is wrong behind them.
        size: bytes, as they were counted.
        marks: some records, evenly spread, each with the byte that it begins at; of a large file that is not in gzip.
    """

    path: str
    records: bool = False
    packed: bool = False
    count: int = 0
    damage: str = ""
    size: int = 0
    marks: Sequence[tuple[int, int]] = ()

    def mark(self, record: int) -> tuple[int, int]:
        """Return the last marked record up to one, and the byte that it begins at."""
        place = bisect_right(self.marks, record, key=lambda mark: mark[0])
        return self.marks[place - 1] if place else (0, 0)


@dataclass(frozen=True)
class Shard:
    """Records of one file, `count` from the `first` on; that one is record `key` of the input.

    All numbers are from 0.
    """

    number: int
    file: int
    first: int
    count: int
    key: int

    @property
    def end(self) -> int:
        """The first record behind it."""
        return self.first + self.count


def cut(counts: Sequence[int], replicas: int) -> list[Shard]:
    """Return shards with every record in one, in order, about PER_REPLICA a replica, none across files.

    A file without a record has a shard, too.
    """
    size = max(1, -(-sum(counts) // (PER_REPLICA * replicas)))
    shards: list[Shard] = []
    for file, count in enumerate(counts):
        pieces = max(1, -(-count // size))
        for piece in range(pieces):
            first, end = count * piece // pieces, count * (piece + 1) // pieces
            shards.append(Shard(len(shards), file, first, end - first, sum(counts[:file]) + first))
    return shards


def mine(shards: Sequence[Shard], rank: int, replicas: int) -> list[Shard]:
    """Return the shards of one replica."""
    return [shard for shard in shards if shard.number % replicas == rank]


@dataclass(frozen=True)
class Done:
    """The outcome of a shard: the number of results, and file, line and reason of each error."""

    instances: int
    errors: Sequence[dict[str, object]] = ()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Done:
        data = json.loads(content)
        return cls(data["instances"], data["errors"])


def plan_to_json(files: Sequence[InputFile]) -> bytes:
    return json.dumps([asdict(file) for file in files]).encode()


def plan_from_json(content: bytes) -> list[InputFile]:
    return [InputFile(**{**data, "marks": tuple(map(tuple, data.get("marks", ())))}) for data in json.loads(content)]
