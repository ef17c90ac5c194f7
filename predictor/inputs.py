"""The files of the input: what each is, how many records it has, and a part of them; TensorFlow reads, and so any bucket."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator

from predictor.library import tensorflow
from predictor.shards import File, Shard

_GZIP = b"\x1f\x8b"
_HEAD = 4096
_ENDED_EARLY = "cannot be read from here on"


def kind_of(head: bytes) -> tuple[bool, bool]:
    """Whether a file that begins so has TFRecords and no lines, and whether it is in gzip; ValueError where it is broken.

    A TFRecord begins with its length in eight bytes, of which the last are 0; no text has a 0. Source: TensorFlow, tf_record.
    """
    packed = head.startswith(_GZIP)
    try:
        begin = zlib.decompressobj(wbits=31).decompress(head, 8) if packed else head[:8]
    except zlib.error as error:
        raise ValueError(f"is broken: {error}") from None
    return b"\0" in begin, packed


def looked_at(path: str) -> File:
    """A file with what is found out of it; one that is damaged has the records in front of the damage."""
    errors = tensorflow().errors
    try:
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            records, packed = kind_of(opened.read(_HEAD))
    except (errors.OpError, ValueError) as error:
        return File(path, damage=_said(error))
    count = 0
    try:
        for _ in _all(path, records, packed):
            count += 1
    except (errors.OpError, OSError, EOFError, zlib.error) as error:
        return File(path, records, packed, count, _said(error))
    return File(path, records, packed, count)


class Reader:
    """Reads a file once for all the shards of it that are asked for in their order."""

    def __init__(self) -> None:
        self._path = ""
        self._at = 0
        self._rest: Iterator[bytes] = iter(())

    def read(self, file: File, shard: Shard) -> Iterator[bytes]:
        """The records, or lines without their ends, of a shard. What the shard before was not read of is passed over."""
        if file.path != self._path or shard.first < self._at:
            self._path, self._at, self._rest = file.path, 0, _all(file.path, file.records, file.packed)
        while self._at < shard.end and (record := next(self._rest, None)) is not None:
            self._at += 1
            if self._at > shard.first:
                yield record


def _all(path: str, records: bool, packed: bool) -> Iterator[bytes]:
    """All records of a file, or its lines; an error where it is damaged."""
    if records:
        yield from tensorflow().record_io.RecordIterator(path, "GZIP" if packed else "")
        return
    with tensorflow().file_io.FileIO(path, "rb") as opened:
        for line in gzip.GzipFile(fileobj=opened) if packed else opened:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _said(error: Exception) -> str:
    why = str(getattr(error, "message", error)).partition("\n")[0].partition(" [Op:")[0].strip()
    return f"{_ENDED_EARLY}: {why}"
