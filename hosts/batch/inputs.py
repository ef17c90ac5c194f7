"""Read the input files: detect their kind and size, and yield the records of each shard.

TensorFlow reads the files, so they may be in any bucket that it supports.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hosts.batch.shards import InputFile, RecordCount, Shard
from hosts.serving.saved import tensorflow

T = TypeVar("T")
Record = tuple[int, int, bytes | None]
"""The byte at which a record begins, the byte after its end, and its content, which is None at the file's end."""

_GZIP = b"\x1f\x8b"
_HEAD = 4096
# Bytes of a TFRecord: the length, its checksum, the data, the data's checksum. Source: TensorFlow, record_writer.h.
_LENGTH, _LENGTH_CRC, _DATA_CRC = 8, 4, 4
_BLOCK = 65_536
_MAX_GZIP_RATIO = 1032
"""One byte of gzip unpacks to at most this many bytes."""
_UNREADABLE_FROM_HERE = "cannot be read from here on"
_RETRY_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between attempts to read after a temporary failure."""


class UnreadableError(Exception):
    """A file cannot be accessed; the message is one line. `temporary` is True if a later attempt may succeed.

    Damaged content raises no such error: `RecordCount.damage` and `InputFile.damage` have the reason.
    """

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"{path} cannot be read: {error_line(error)}")
        errors = tensorflow().errors
        permanent = (errors.NotFoundError, errors.PermissionDeniedError, errors.UnauthenticatedError)
        invalid = (errors.InvalidArgumentError, errors.FailedPreconditionError, errors.UnimplementedError)
        self.temporary = not isinstance(error, (*permanent, *invalid))


class _TruncatedError(Exception):
    """A file has fewer bytes than at its inspection."""


def detect_kind(head: bytes) -> tuple[bool, bool]:
    """Return True if a file with this head has TFRecords, False for lines, and True if it is compressed with gzip.

    A TFRecord begins with its length in eight bytes, the last of which are 0; text has no 0. Source: TensorFlow, tf_record.
    ValueError if the gzip data is damaged.
    """
    packed = head.startswith(_GZIP)
    try:
        begin = zlib.decompressobj(wbits=31).decompress(head, 8) if packed else head[:8]
    except zlib.error as error:
        raise ValueError(f"its gzip data is damaged: {error}") from None
    return b"\0" in begin, packed


def inspect_file(path: str) -> InputFile:
    """Return a file with its kind and size; UnreadableError if access still fails after retries for half a minute."""

    def read() -> InputFile:
        size = int(tensorflow().file_io.stat_v2(path).length)
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            try:
                records, packed = detect_kind(opened.read(_HEAD))
            except _damage_errors(ValueError) as error:
                return InputFile(path, damage=_describe(error))
            if packed and size >= 4:
                opened.seek(size - 4)
                # gzip stores the unpacked size modulo 4 GiB, and only of the file's last member: RFC 1952. It is a hint.
                size = min(int.from_bytes(opened.read(4), "little"), _MAX_GZIP_RATIO * size)
            return InputFile(path, size, records, packed)

    return _retry(path, read)


class InputReader:
    """Read shards in order, so that a gzip file is unpacked only once for all its shards."""

    def __init__(self) -> None:
        self._path = ""
        self._records: Iterator[Record] = iter(())
        self._lookahead: Record | None = None
        self._at: int
        self._end: int
        self.count: RecordCount
        """The records that were read of the last shard, and any damage; set when `read` has yielded its last record."""

    def read(self, file: InputFile, shard: Shard) -> Iterator[bytes]:
        """Yield a shard's records or lines; stop at damage, which `count` reports. UnreadableError as by `inspect_file`."""
        if not file.packed or file.path != self._path or shard.start < self._end:
            self._path, self._at, self._lookahead = file.path, shard.start, None
            self._records = records(file, shard.start)
        self._end = shard.end
        number, start, damage = 0, None, file.damage
        try:
            while not damage and (record := self._lookahead or self._next(file)):
                begin, end, content = record
                if content is None or begin >= shard.end:
                    self._at, self._lookahead = begin, record
                    break
                self._at, self._lookahead = end, None
                if begin >= shard.start:  # an earlier record belongs to the previous shard
                    start = begin if start is None else start
                    number += 1
                    yield content
        except _damage_errors(_TruncatedError) as error:
            damage = _describe(error)
        self.count = RecordCount(number, self._at if start is None else start, self._at, damage)

    def _next(self, file: InputFile) -> Record | None:
        def read() -> Record | None:
            try:
                return next(self._records, None)
            except tensorflow().errors.OpError as error:
                if not isinstance(error, _damage_errors()):
                    self._records = records(file, self._at)
                raise

        return _retry(file.path, read)


def _retry(path: str, read: Callable[[], T]) -> T:
    """Call `read` until it succeeds, up to six times; raise at once if the content is damaged."""
    for pause in (*_RETRY_PAUSES, None):
        try:
            return read()
        except _damage_errors():
            raise
        except tensorflow().errors.OpError as error:
            if pause is None:
                raise UnreadableError(path, error) from None
            time.sleep(pause)
    raise AssertionError


def _damage_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the types of errors that mean damaged content, and `more`. Other errors mean that the access failed."""
    errors = tensorflow().errors
    return (*more, errors.DataLossError, errors.OutOfRangeError, zlib.error, EOFError, gzip.BadGzipFile)


def records(file: InputFile, start: int) -> Iterator[Record]:
    """Yield the records, or lines without line ends, that begin at byte `start` or later; the last item marks the file's end.

    Damaged content raises one of the errors of `_damage_errors`.
    """
    for begin, end, content in _tfrecords(file, start) if file.records else _lines(file, start):
        if begin >= start:
            yield begin, end, content


class _RawFile(io.RawIOBase):
    """Provide the bytes of a TensorFlow file to Python's line reader: TensorFlow's reader drops each \\r."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._opened.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _lines(file: InputFile, start: int) -> Iterator[Record]:
    with tensorflow().file_io.FileIO(file.path, "rb") as opened:
        byte = max(0, start - 1) if not file.packed else 0
        opened.seek(byte)
        source = gzip.GzipFile(fileobj=opened) if file.packed else io.BufferedReader(_RawFile(opened), _BLOCK)
        if byte:
            byte += len(source.readline())
        for line in source:
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            yield byte, byte + len(line), content if byte else content.removeprefix(BOM_UTF8)
            byte += len(line)
        if byte < file.size and not file.packed:
            raise _TruncatedError(f"it has changed: it has {byte} bytes and had {file.size}")
        yield byte, byte, None


def _tfrecords(file: InputFile, start: int) -> Iterator[Record]:
    if file.packed:
        byte = 0
        for record in tensorflow().record_io.RecordIterator(file.path, "GZIP"):
            end = byte + _LENGTH + _LENGTH_CRC + len(record) + _DATA_CRC
            yield byte, end, record
            byte = end
        if byte < file.size:  # TensorFlow does not notice if a file was truncated between two records
            raise _TruncatedError(f"it is truncated: it has {byte} bytes after unpacking and had {file.size}")
        yield byte, byte, None
        return
    reader = tensorflow().record_io.RandomRecordReader(file.path)
    byte = _find_first_record(file, reader, start) if start else 0
    while byte < file.size:
        try:
            record, end = reader.read(byte)
        except IndexError:
            raise _TruncatedError(f"it has changed: it has {byte} bytes and had {file.size}") from None
        yield byte, end, record
        byte = end
    yield byte, byte, None


def _find_first_record(file: InputFile, reader: Any, start: int) -> int:
    """Return the first byte of the first complete TFRecord at `start` or later; the file's size if there is none."""
    head = _LENGTH + _LENGTH_CRC
    with tensorflow().file_io.FileIO(file.path, "rb") as opened:
        opened.seek(start)
        block, byte = b"", start
        while more := opened.read(_BLOCK):
            block += more
            for place in map(int, _find_headers(block)):
                begin, length = byte + place, int.from_bytes(block[place : place + _LENGTH], "little")
                if begin + head + length + _DATA_CRC > file.size:
                    continue  # data can look like a header by chance, or contain a TFRecord
                with contextlib.suppress(*_damage_errors(IndexError)):
                    reader.read(begin)
                    return begin
            keep = block[1 - head :]
            byte, block = byte + len(block) - len(keep), keep
    return file.size


def _find_headers(block: bytes) -> Any:
    """Return each index of a block at which eight bytes precede their checksum: a possible header of a TFRecord."""
    if len(block) < _LENGTH + _LENGTH_CRC:
        return ()
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(block, np.uint8), _LENGTH + _LENGTH_CRC)
    table: np.ndarray[Any, Any] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(0x82F63B78)  # CRC-32C
    crc: np.ndarray[Any, Any] = np.full(len(windows), 0xFFFFFFFF, np.uint32)
    for column in range(_LENGTH):
        crc = table[(crc ^ windows[:, column]) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    masked = (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
    return np.flatnonzero(masked == np.ascontiguousarray(windows[:, _LENGTH:]).view("<u4")[:, 0])


def _describe(error: Exception) -> str:
    return f"{_UNREADABLE_FROM_HERE}: {error_line(error)}"


def error_line(error: Exception) -> str:
    """Return the message of a TensorFlow error as one line."""
    return str(getattr(error, "message", error)).partition("\n")[0].partition(" [Op:")[0].strip()
