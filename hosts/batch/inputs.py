"""The input files: their kind, their number of records, and parts of them.

TensorFlow reads them, from any bucket.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice

from hosts.batch.library import tensorflow
from hosts.batch.shards import InputFile, Shard

_GZIP = b"\x1f\x8b"
_HEAD = 4096
# Bytes of a TFRecord beside its data.
_FRAME = 16
_LARGE = 1 << 20
_BLOCK = 1 << 20
_MOST_MARKS = 256
_ENDED_EARLY = "cannot be read from here on"
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between the attempts to read what fails, for what is over in a moment."""


class UnreadableError(Exception):
    """A file that cannot be read: one line, and whether a retry may succeed.

    It says nothing about the file's content.
    """

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"{path} cannot be read: {why(error)}")
        errors = tensorflow().errors
        lasting = (errors.NotFoundError, errors.PermissionDeniedError, errors.UnauthenticatedError)
        wrong = (errors.InvalidArgumentError, errors.FailedPreconditionError, errors.UnimplementedError)
        self.passing = not isinstance(error, (*lasting, *wrong))


def kind_of(head: bytes) -> tuple[bool, bool]:
    """Return whether a file with this head has TFRecords, not lines, and whether it is in gzip.

    A TFRecord begins with its length in eight bytes, of which the last are 0; no text has a 0. Source: TensorFlow, tf_record.

    Raises:
        ValueError: it is corrupt.
    """
    packed = head.startswith(_GZIP)
    try:
        begin = zlib.decompressobj(wbits=31).decompress(head, 8) if packed else head[:8]
    except zlib.error as error:
        raise ValueError(f"is broken: {error}") from None
    return b"\0" in begin, packed


def looked_at(path: str) -> InputFile:
    """Return a file with its kind and count; a corrupt one has the records in front of the damage.

    Raises:
        UnreadableError: it cannot be read for half a minute, for another reason.
    """
    patience = _Patience(path)
    while True:
        try:
            return _looked_at(path)
        except tensorflow().errors.OpError as error:
            patience.wait(error)


def _looked_at(path: str) -> InputFile:
    damages: tuple[type[Exception], ...] = (ValueError, *_damages())
    try:
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            records, packed = kind_of(opened.read(_HEAD))
    except damages as error:
        return InputFile(path, damage=_said(error))
    size = int(tensorflow().file_io.stat_v2(path).length)
    index = _Index(size >= _LARGE)
    try:
        if records or packed:
            index.count_records(_raw(path, records, packed), packed)
        else:
            index.count_lines(path)
    except _damages() as error:
        return InputFile(path, records, packed, index.count, _said(error), size, index.marks)
    return InputFile(path, records, packed, index.count, "", size, index.marks)


class _Index:
    """Counts records, and keeps the bytes at which some of them begin, evenly spread and few."""

    def __init__(self, wanted: bool) -> None:
        self.count, self.marks = 0, list[tuple[int, int]]()
        self._wanted, self._seen, self._step = wanted, 0, 1

    def count_records(self, found: Iterable[bytes], packed: bool) -> None:
        """Count records, or lines in gzip, in which no byte can be sought."""
        byte = 0
        for record in found:
            if not packed:
                self._mark(self.count, byte)
            self.count += 1
            byte += len(record) + _FRAME

    def count_lines(self, path: str) -> None:
        """Count lines by their ends, ten times as fast as one by one."""
        byte, last = 0, b"\n"
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            while block := opened.read(_BLOCK):
                if end := block.find(b"\n") + 1:
                    self._mark(self.count + 1, byte + end)
                self.count += block.count(b"\n")
                byte += len(block)
                last = block[-1:]
        self.count += last != b"\n"

    def _mark(self, record: int, byte: int) -> None:
        if self._wanted and self._seen % self._step == 0:
            if len(self.marks) == _MOST_MARKS:
                self.marks, self._step = self.marks[::2], self._step * 2
            self.marks.append((record, byte))
        self._seen += 1


class InputReader:
    """Reads a file once for all the shards of it that are asked for in their order."""

    def __init__(self) -> None:
        self._path = ""
        self._at = 0
        self._damage = ""
        self._rest: Iterator[bytes] = iter(())

    def read(self, file: InputFile, shard: Shard) -> Iterator[bytes]:
        """Return the records, or lines without their ends, of a shard.

        What the shard before was not read of is passed over.

        UnreadableError as of `looked_at`. Where the file has fewer by now they end early, and `lacking` says so.
        """
        near, byte = _start(file, shard.first)
        if file.path != self._path or not near <= self._at <= shard.first:
            self._path, self._at, self._damage = file.path, near, ""
            self._rest = _all(file.path, file.records, file.packed, byte)
        while self._at < shard.end and (record := self._next(file)) is not None:
            self._at += 1
            if self._at > shard.first:
                yield record

    def lacking(self, file: InputFile, shard: Shard) -> list[dict[str, object]]:
        """Return an error if a fully read shard has fewer records than counted: the file has changed."""
        if self._at >= shard.end:
            return []
        reason = self._damage or f"{_ENDED_EARLY}: it was changed, and has {self._at} where {file.count} were counted"
        return [{"file": file.path, "line": max(self._at, shard.first) + 1, "error": reason}]

    def _next(self, file: InputFile) -> bytes | None:
        """Return the next record, or None at the end and at damage."""
        patience = _Patience(file.path)
        while True:
            try:
                return next(self._rest, None)
            except _damages() as error:
                self._damage = _said(error)
                return None
            except tensorflow().errors.OpError as error:
                patience.wait(error)
                near, byte = _start(file, self._at)
                self._rest = islice(_all(file.path, file.records, file.packed, byte), self._at - near, None)


class _Patience:
    """A time limit for retries of a read."""

    def __init__(self, path: str) -> None:
        self._path, self._tries = path, 0

    def wait(self, error: Exception) -> None:
        """Wait until the next attempt.

        Raises:
            UnreadableError: it was the last one.
        """
        if self._tries == len(_PAUSES):
            raise UnreadableError(self._path, error) from None
        time.sleep(_PAUSES[self._tries])
        self._tries += 1


def _damages() -> tuple[type[Exception], ...]:
    """Return the errors that mean damage of a file's content; all others concern the access to it."""
    errors = tensorflow().errors
    return (errors.DataLossError, errors.OutOfRangeError, zlib.error, EOFError, gzip.BadGzipFile)


def _start(file: InputFile, record: int) -> tuple[int, int]:
    """Return a record at or before the given one, and its byte, where reading can start.

    It is the first record if the file has changed.
    """
    try:
        same = bool(file.marks) and int(tensorflow().file_io.stat_v2(file.path).length) == file.size
    except tensorflow().errors.OpError:
        same = False  # what is wrong the reading says
    return file.mark(record) if same else (0, 0)


def _all(path: str, records: bool, packed: bool, byte: int = 0) -> Iterator[bytes]:
    """Yield a file's records from a record's first byte on, or its lines without their ends.

    Raises an error for damage.
    """
    for record in _raw(path, records, packed, byte):
        yield record if records else record.removesuffix(b"\n").removesuffix(b"\r")


def _raw(path: str, records: bool, packed: bool, byte: int = 0) -> Iterator[bytes]:
    if records and byte:
        yield from _records_from(path, byte)
    elif records:
        yield from tensorflow().record_io.RecordIterator(path, "GZIP" if packed else "")
    else:
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            if byte:
                opened.seek(byte)
            yield from gzip.GzipFile(fileobj=opened) if packed else opened


def _records_from(path: str, byte: int) -> Iterator[bytes]:
    reader = tensorflow().record_io.RandomRecordReader(path)
    while True:
        try:
            record, byte = reader.read(byte)
        except IndexError:
            return
        yield record


def _said(error: Exception) -> str:
    return f"{_ENDED_EARLY}: {why(error)}"


def why(error: Exception) -> str:
    """Return the line of an error of TensorFlow."""
    return str(getattr(error, "message", error)).partition("\n")[0].partition(" [Op:")[0].strip()
