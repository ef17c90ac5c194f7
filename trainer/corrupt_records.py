"""Find the corrupt records of TFRecord files, and the ranges between them that can be read.

A record is its length (uint64), a checksum of the length (uint32), its data, and a checksum of it (uint32), little-endian.
Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scaletier.tensorflow_setup import import_tensorflow, say
from trainer.progress import with_progress

tf = import_tensorflow()

_HEADER, _FOOTER = 12, 4
_BUFFER_BYTES = 1 << 18
_BATCH = 1000
_MAX_LISTED = 5


class RecordRange(NamedTuple):
    """Consecutive intact records of a TFRecord file, gzip if it ends in .gz: `records`, all if -1, from byte `offset` on."""

    file: str
    offset: int = 0
    records: int = -1

    @property
    def compression(self) -> str:
        return "GZIP" if self.file.endswith(".gz") else ""


class Damage(NamedTuple):
    """A corrupt record: its number in the file, from 0, and the offset of its first byte after decompression.

    `rest` is True if no later record can be read either: the length is corrupt, or the file is compressed.
    """

    file: str
    number: int
    offset: int
    rest: bool

    def __str__(self) -> str:
        return f"byte {self.offset} (record {self.number})"


def tensors(parts: Sequence[RecordRange]) -> tuple[Any, ...]:
    """Return the ranges as four tensors, [N] each, one for each argument of `read`."""
    return (
        tf.constant([record_range.file for record_range in parts], tf.string),
        tf.constant([record_range.offset for record_range in parts], tf.int64),
        tf.constant([record_range.records for record_range in parts], tf.int64),
        tf.constant([record_range.compression for record_range in parts], tf.string),
    )


def read(file: Any, offset: Any, count: Any, compression: Any) -> Any:
    """Return a dataset of the serialized records of one range.

    Call it only in interleave or flat_map: elsewhere TensorFlow's optimizer rewrites this dataset and loses the offset.
    """
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=file[None], compression_type=compression, buffer_size=_BUFFER_BYTES, byte_offsets=offset[None]
    )
    return tf.data.experimental.from_variant(records, tf.TensorSpec([], tf.string)).take(count)


def record_ranges(files: Sequence[str], skip: bool) -> list[RecordRange]:
    """Return the ranges to read: whole files, or with `skip` the ranges between corrupt records.

    With `skip`, read every file first and print a line about the records that are skipped.
    """
    if not skip:
        return [RecordRange(file) for file in files]
    intact = []
    for file in with_progress(files, "looking for corrupt records, file", len(files)):
        parts = list(_scan(file))
        intact += [record_range for record_range, _ in parts if record_range.records]
        damages = [damage for _, damage in parts if damage]
        if damages:
            say(_skip_line(damages))
    return intact


def locate(files: Sequence[str]) -> Damage | None:
    """Return the first corrupt record of the files, reading them up to it; None if there is none."""
    return next((damage for file in files for _, damage in _scan(file) if damage), None)


def _skip_line(damages: Sequence[Damage]) -> str:
    records = "1 corrupt record" if len(damages) == 1 else f"{len(damages)} corrupt records"
    places = ", ".join(str(damage) for damage in damages[:_MAX_LISTED])
    more = f" and {len(damages) - _MAX_LISTED} more" if len(damages) > _MAX_LISTED else ""
    rest = ", and all that follows the last" if damages[-1].rest else ""
    return f"Skipping {records} of {damages[0].file}: {places}{more}{rest}"


def _scan(file: str) -> Iterator[tuple[RecordRange, Damage | None]]:
    """Yield a file's intact ranges in order, each with the corrupt record after it, if any."""
    offset = number = 0
    while True:
        whole = RecordRange(file, offset)
        columns = [column[0] for column in tensors([whole])]
        try:
            _count(*columns)
        except tf.errors.DataLossError:
            count, size = map(int, _count_to_error(*columns))
        else:
            yield whole, None
            return
        number += count
        next_offset = None if whole.compression else _next_record(file, offset + size)
        yield RecordRange(file, offset, count), Damage(file, number, offset + size, next_offset is None)
        if next_offset is None:
            return
        number, offset = number + 1, next_offset


def _counter(to_error: bool) -> Any:
    """Return a function that counts the records and bytes of a range, whose tensors are the arguments.

    At a corrupt record the function raises DataLossError, or with `to_error` returns the counts before it.
    """

    def add(totals: Any, records: Any) -> Any:
        sizes = _HEADER + tf.cast(tf.strings.length(records), tf.int64) + _FOOTER
        return totals[0] + tf.size(records, tf.int64), totals[1] + tf.reduce_sum(sizes)

    def count(*record_range: Any) -> Any:
        records = tf.data.Dataset.from_tensors(record_range).flat_map(read)
        if to_error:
            records = records.ignore_errors()
        zero = tf.constant(0, tf.int64)
        return records.batch(_BATCH).reduce((zero, zero), add)

    return tf.function(count, autograph=False)


_count, _count_to_error = _counter(False), _counter(True)


def _next_record(file: str, offset: int) -> int | None:
    """Return the offset of the record after the corrupt one, at most the file's size; None if unknown."""
    with tf.io.gfile.GFile(file, "rb") as source:
        size = int(source.size())
        source.seek(offset)
        header = source.read(_HEADER)
    if len(header) < _HEADER:
        return size  # the file ends in the header
    length, checksum = struct.unpack("<QI", header)
    return min(offset + _HEADER + length + _FOOTER, size) if checksum == _masked_crc(header[:8]) else None


def _masked_crc(data: bytes) -> int:
    """Return TFRecord's checksum of a few bytes: CRC-32C, rotated, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
