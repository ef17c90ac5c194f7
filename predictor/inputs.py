"""The files of the input: what each is, how many records it has, and a part of them; TensorFlow reads, and so any bucket."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from predictor.shards import File, Shard
from serving.saved import tensorflow

_GZIP = b"\x1f\x8b"
_HEAD = 4096
_AT_ONCE = 4096
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
    tf = tensorflow()
    try:
        with tf.io.gfile.GFile(path, "rb") as opened:
            records, packed = kind_of(opened.read(_HEAD))
    except (tf.errors.OpError, ValueError) as error:
        return File(path, damage=_said(error))
    found = File(path, records, packed)
    try:
        many = _dataset(found).batch(_AT_ONCE)
        return File(
            path, records, packed, int(many.reduce(tf.constant(0, tf.int64), lambda n, rows: n + tf.size(rows, tf.int64)))
        )
    except tf.errors.OpError as error:
        return File(path, records, packed, _readable(found), _said(error))


def _readable(file: File) -> int:
    """How many records come before the damage."""
    count = 0
    try:
        for _ in _dataset(file).as_numpy_iterator():
            count += 1
    except tensorflow().errors.OpError:
        pass
    return count


def read(file: File, shard: Shard) -> Iterator[bytes]:
    """The records, or lines without their ends, of a shard."""
    found: Iterator[bytes] = _dataset(file).skip(shard.first).take(shard.count).as_numpy_iterator()
    return found


def _dataset(file: File) -> Any:
    data = tensorflow().data
    make = data.TFRecordDataset if file.records else data.TextLineDataset
    return make(file.path, compression_type="GZIP" if file.packed else "")


def _said(error: Exception) -> str:
    why = str(getattr(error, "message", error)).partition("\n")[0].partition(" [Op:")[0].strip()
    return f"{_ENDED_EARLY}: {why}"
