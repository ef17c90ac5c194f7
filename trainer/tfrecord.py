"""TFRecord files of `tf.train.Example` without TensorFlow, for a machine that only makes records.

Formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/example.proto.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c

_MASK_DELTA = 0xA282EAD8
_ALL_BITS = 0xFFFFFFFF
_BYTES_LIST, _INT64_LIST = 1, 3  # of a Feature
_HEAD, _TAIL = 12, 4  # bytes before a record's data (its length and a checksum) and after it (a checksum)
_NO_GZIP = gzip.BadGzipFile, EOFError, zlib.error  # another format, or damaged


def write(path: Path, records: Iterable[bytes]) -> None:
    """Write one file of these records, gzip if its name ends in `.gz`; equal records make equal files."""
    framed = b"".join(map(_framed, records))
    path.write_bytes(gzip.compress(framed, mtime=0) if path.suffix == ".gz" else framed)


def example(image: bytes, label: int) -> bytes:
    """Return a `tf.train.Example` with the features `image_raw` and `label`."""
    image_raw = _feature("image_raw", _BYTES_LIST, _field(1, image))
    return _field(1, image_raw + _feature("label", _INT64_LIST, _field(1, _varint(label))))


def read(path: Path) -> Iterator[tuple[bytes, int]]:
    """Read the image and label of each example in a file, gzip if its name ends in `.gz`; ValueError for other content."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            while head := file.read(_HEAD):
                (size,) = struct.unpack_from("<Q", head)
                features = _features(file.read(size + _TAIL)[:size])
                label, _ = _read_varint(features["label"], 0)
                yield features["image_raw"], label
        except (*_NO_GZIP, struct.error, LookupError, UnicodeDecodeError, MemoryError, OverflowError):
            raise ValueError(f"{path} is no TFRecord file of images and labels") from None


def _features(example: bytes) -> dict[str, bytes]:
    """Return the first value of each feature by name; that of an Int64List is a varint."""
    features = {}
    for _, content in _fields(_fields(example)[0][1]):
        entry = dict(_fields(content))
        features[entry[1].decode()] = _fields(_fields(entry[2])[0][1])[0][1]
    return features


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Split a protobuf message whose fields all have a length into field numbers and contents."""
    fields, at = [], 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        size, at = _read_varint(message, at)
        fields.append((tag >> 3, message[at : at + size]))
        at += size
    return fields


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number at index `at` and the index after it."""
    number = shift = 0
    while True:
        number |= (content[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not content[at - 1] & 0x80:
            return number, at


def _feature(name: str, kind: int, values: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, _field(kind, values)))


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field with a length."""
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
