"""Protocol buffers as their encoding has them, for the few fields that are wanted of a message.

Source: "Encoding" in the documentation of protocol buffers. IndexError, TypeError or ValueError for what is no message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def entry_of(entry: bytes) -> tuple[str, bytes]:
    """Return key and value of a map's entry."""
    (key,), (value,) = all_of(entry, 1) or [b""], all_of(entry, 2) or [b""]
    if not isinstance(key, bytes) or not isinstance(value, bytes):
        raise ValueError("an entry of a map whose key or value is a number")
    return key.decode(), value


def all_of(message: bytes, field: int) -> list[Any]:
    """Return the values of a field, in order: numbers as int, everything else as bytes."""
    return [value for number, value in _fields(message) if number == field]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message in order: numbers as int, everything else as bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a number, seven bits a byte; return it and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
