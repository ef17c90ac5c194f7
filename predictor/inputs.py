"""The files of the input: what each is, how many records it has, and a part of them; TensorFlow reads, and so any bucket."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterator
from itertools import islice

from predictor.library import tensorflow
from predictor.shards import File, Shard

_GZIP = b"\x1f\x8b"
_HEAD = 4096
_ENDED_EARLY = "cannot be read from here on"
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between the attempts to read what fails, for what is over in a moment."""


class UnreadableError(Exception):
    """A file cannot be read, which says nothing about what is in it: one line, and whether that may change by itself."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"{path} cannot be read: {why(error)}")
        errors = tensorflow().errors
        lasting = (errors.NotFoundError, errors.PermissionDeniedError, errors.UnauthenticatedError)
        wrong = (errors.InvalidArgumentError, errors.FailedPreconditionError, errors.UnimplementedError)
        self.passing = not isinstance(error, (*lasting, *wrong))


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
    """A file with what is found out of it; one that is damaged has the records in front of the damage.

    UnreadableError where it cannot be read, for whatever else, for half a minute.
    """
    patience = _Patience(path)
    while True:
        try:
            return _looked_at(path)
        except tensorflow().errors.OpError as error:
            patience.wait(error)


def _looked_at(path: str) -> File:
    damages: tuple[type[Exception], ...] = (ValueError, *_damages())
    try:
        with tensorflow().file_io.FileIO(path, "rb") as opened:
            records, packed = kind_of(opened.read(_HEAD))
    except damages as error:
        return File(path, damage=_said(error))
    count = 0
    try:
        for _ in _all(path, records, packed):
            count += 1
    except _damages() as error:
        return File(path, records, packed, count, _said(error))
    return File(path, records, packed, count)


class Reader:
    """Reads a file once for all the shards of it that are asked for in their order."""

    def __init__(self) -> None:
        self._path = ""
        self._at = 0
        self._damage = ""
        self._rest: Iterator[bytes] = iter(())

    def read(self, file: File, shard: Shard) -> Iterator[bytes]:
        """The records, or lines without their ends, of a shard. What the shard before was not read of is passed over.

        UnreadableError as of `looked_at`. Where the file has fewer by now they end early, and `lacking` says so.
        """
        if file.path != self._path or shard.first < self._at:
            self._path, self._at, self._damage = file.path, 0, ""
            self._rest = _all(file.path, file.records, file.packed)
        while self._at < shard.end and (record := self._next(file)) is not None:
            self._at += 1
            if self._at > shard.first:
                yield record

    def lacking(self, file: File, shard: Shard) -> list[dict[str, object]]:
        """An error, where a shard that was read to its end has fewer records than were counted: the file was changed since."""
        if self._at >= shard.end:
            return []
        said = self._damage or f"{_ENDED_EARLY}: it was changed, and has {self._at} where {file.count} were counted"
        return [{"file": file.path, "line": max(self._at, shard.first) + 1, "error": said}]

    def _next(self, file: File) -> bytes | None:
        """None at the end, and where there is damage."""
        patience = _Patience(file.path)
        while True:
            try:
                return next(self._rest, None)
            except _damages() as error:
                self._damage = _said(error)
                return None
            except tensorflow().errors.OpError as error:
                patience.wait(error)
                self._rest = islice(_all(file.path, file.records, file.packed), self._at, None)


class _Patience:
    """How long an attempt to read a file is made again."""

    def __init__(self, path: str) -> None:
        self._path, self._tries = path, 0

    def wait(self, error: Exception) -> None:
        """Until the next attempt; UnreadableError behind the last one."""
        if self._tries == len(_PAUSES):
            raise UnreadableError(self._path, error) from None
        time.sleep(_PAUSES[self._tries])
        self._tries += 1


def _damages() -> tuple[type[Exception], ...]:
    """The errors that tell of a file's content; all others are of the way to it."""
    errors = tensorflow().errors
    return (errors.DataLossError, errors.OutOfRangeError, zlib.error, EOFError, gzip.BadGzipFile)


def _all(path: str, records: bool, packed: bool) -> Iterator[bytes]:
    """All records of a file, or its lines; an error where it is damaged."""
    if records:
        yield from tensorflow().record_io.RecordIterator(path, "GZIP" if packed else "")
        return
    with tensorflow().file_io.FileIO(path, "rb") as opened:
        for line in gzip.GzipFile(fileobj=opened) if packed else opened:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _said(error: Exception) -> str:
    return f"{_ENDED_EARLY}: {why(error)}"


def why(error: Exception) -> str:
    """A line of what an error of TensorFlow says."""
    return str(getattr(error, "message", error)).partition("\n")[0].partition(" [Op:")[0].strip()
