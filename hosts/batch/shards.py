"""The shards of the input: pure functions of the files' sizes, so that all replicas compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More than one a replica, so that a restarted one has little to do over again.
PER_REPLICA = 4
_ENDLESS = 2**62
_NOT_JOINED = "cannot be read from here on: damaged, changed since the scan, or its records contain TFRecords (gzip the file)"


@dataclass(frozen=True)
class InputFile:
    """A file of the input: TFRecords, or lines, perhaps in gzip.

    Attributes:
        size: bytes, without gzip.
        damage: why nothing of it can be read.
    """

    path: str
    size: int = 0
    records: bool = False
    packed: bool = False
    damage: str = ""


@dataclass(frozen=True)
class Shard:
    """The records that begin at the bytes from `start` to `end` of a file, one of `total` shards; numbers are from 0."""

    number: int
    total: int
    file: int
    start: int
    end: int


def cut(files: Sequence[InputFile], replicas: int) -> list[Shard]:
    """Cut the files into about PER_REPLICA shards per replica.

    Each byte is in one shard, in order, and no shard spans two files. An empty file has a shard, too. The last shard of a gzip
    file has no end, as the file's size is only a hint.
    """
    size = max(1, -(-sum(file.size for file in files) // (PER_REPLICA * replicas)))
    pieces = [max(1, -(-file.size // size)) for file in files]
    shards: list[Shard] = []
    for index, (file, count) in enumerate(zip(files, pieces, strict=True)):
        for piece in range(count):
            end = _ENDLESS if file.packed and piece == count - 1 else file.size * (piece + 1) // count
            shards.append(Shard(len(shards), sum(pieces), index, file.size * piece // count, end))
    return shards


def shards_of(shards: Sequence[Shard], rank: int, replicas: int) -> list[Shard]:
    """Return the shards of one replica."""
    return [shard for shard in shards if shard.number % replicas == rank]


@dataclass(frozen=True)
class Count:
    """Records in a shard: count, byte where the first begins, byte after the last, and why reading stopped."""

    records: int
    start: int
    end: int
    damage: str = ""


class Tally:
    """Counts records before a shard: `line` in its file, `key` in the whole input."""

    def __init__(self) -> None:
        self.line = self.key = self._byte = 0
        self._readable = True

    def add(self, shard: Shard, count: Count) -> tuple[bool, str]:
        """Add the next shard.

        Returns:
            Whether its records are valid; if not, the new damage before it, empty if that was reported.
        """
        if shard.start == 0:
            self.line, self._byte, self._readable = 0, 0, True
        if not self._readable:
            return False, ""
        # A record that does not begin at the end of another was found inside a record's data.
        if count.start != self._byte and (count.records or not count.damage):
            self._readable = False
            return False, _NOT_JOINED
        self.line, self.key, self._byte = self.line + count.records, self.key + count.records, count.end
        self._readable = not count.damage
        return True, ""


@dataclass(frozen=True)
class ShardOutcome:
    """The outcome of a shard: its records, the number of results, and line and reason of each error."""

    count: Count
    instances: int
    errors: Sequence[Mapping[str, Any]] = ()
