"""Divide the input into shards: pure functions of the files' sizes, so all replicas compute the same shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More than one, so that a restarted replica repeats only a part of its work.
SHARDS_PER_REPLICA = 4
_NO_END = 2**62
_NOT_CONTINUOUS = (
    "cannot be read from here on: it is damaged, it changed after the scan, or a record contains TFRecords (then gzip the file)"
)


@dataclass(frozen=True)
class InputFile:
    """A file of the input.

    Attributes:
        size: its bytes; of a gzip file those after unpacking, as a hint.
        records: True if it has TFRecords, False if it has lines.
        packed: True if it is compressed with gzip.
        damage: the reason if nothing of it can be read; else empty.
    """

    path: str
    size: int = 0
    records: bool = False
    packed: bool = False
    damage: str = ""


@dataclass(frozen=True)
class Shard:
    """The records of a file that begin at byte `start` or later and before byte `end`.

    This is shard `number`, from 0, of `total`; `file` is the index of the file in the input.
    """

    number: int
    total: int
    file: int
    start: int
    end: int


def cut(files: Sequence[InputFile], replicas: int) -> list[Shard]:
    """Cut the files into about SHARDS_PER_REPLICA shards per replica.

    Each byte is in one shard, in order, and no shard spans two files. An empty file has a shard, too. The last shard of a gzip
    file is unlimited, because the file's size is only a hint.
    """
    size = max(1, -(-sum(file.size for file in files) // (SHARDS_PER_REPLICA * replicas)))
    counts = [max(1, -(-file.size // size)) for file in files]
    shards: list[Shard] = []
    for index, (file, count) in enumerate(zip(files, counts, strict=True)):
        for part in range(count):
            end = _NO_END if file.packed and part == count - 1 else file.size * (part + 1) // count
            shards.append(Shard(len(shards), sum(counts), index, file.size * part // count, end))
    return shards


def shards_of(shards: Sequence[Shard], rank: int, replicas: int) -> list[Shard]:
    return [shard for shard in shards if shard.number % replicas == rank]


@dataclass(frozen=True)
class RecordCount:
    """The number of records that were read of a shard, from byte `start` of the first to `end` after the last.

    `damage` is the reason if reading stopped at a damaged part; else empty.
    """

    records: int
    start: int
    end: int
    damage: str = ""


class InputPosition:
    """A position in the input: pass shards in order, count their records, and check that each continues the one before.

    `line` is the number of records so far of the current file, `key` of the whole input. So before a shard is passed,
    `key` is the number of its first record, from 0.
    """

    def __init__(self) -> None:
        self.line = self.key = self._byte = 0
        self._readable = True

    def advance(self, shard: Shard, count: RecordCount) -> tuple[bool, str]:
        """Pass the next shard.

        Returns:
            True if its records are valid and were counted; if not, the reason, or "" if it was returned for an earlier shard.
        """
        if shard.start == 0:
            self.line, self._byte, self._readable = 0, 0, True
        if not self._readable:
            return False, ""
        # A record that begins elsewhere than where the last one ended was found inside another's data, or the file has changed.
        if count.start != self._byte and (count.records or not count.damage):
            self._readable = False
            return False, _NOT_CONTINUOUS
        self.line, self.key, self._byte = self.line + count.records, self.key + count.records, count.end
        self._readable = not count.damage
        return True, ""


@dataclass(frozen=True)
class ShardOutcome:
    """The outcome of a shard: what was read, the number of instances with a result, the line and reason of each error."""

    count: RecordCount
    instances: int
    errors: Sequence[Mapping[str, Any]] = ()
