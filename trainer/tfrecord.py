"""TFRecord files of `tf.train.Example`, written without TensorFlow, which a machine that only makes records need not have.

Formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/example.proto.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

_MASK_DELTA = 0xA282EAD8
_ALL_BITS = 0xFFFFFFFF
_BYTES_LIST, _INT64_LIST = 1, 3  # of a Feature


def write(path: Path, records: Iterable[bytes]) -> None:
    """One file of these records, gzip where its name ends in `.gz`: the same records make the same file."""
    framed = b"".join(map(_framed, records))
    path.write_bytes(gzip.compress(framed, mtime=0) if path.suffix == ".gz" else framed)


def example(image: bytes, label: int) -> bytes:
    """A `tf.train.Example` with the features `image_raw` and `label`."""
    image_raw = _feature("image_raw", _BYTES_LIST, _field(1, image))
    return _field(1, image_raw + _feature("label", _INT64_LIST, _field(1, _varint(label))))


def _feature(name: str, kind: int, values: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, _field(kind, values)))


def _field(number: int, content: bytes) -> bytes:
    """A protobuf field that has a length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def _framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + _checksum(length) + record + _checksum(record)


def _checksum(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_BITS)
