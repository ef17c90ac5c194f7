"""Records as JSON, checked when they are read: a dataclass's annotations are its schema."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

SCHEMA = 4
"""The version of all records: one with a higher number was written by a newer scaletier, and is not understood here."""

# A check takes a value and the path of its key, and returns the value as the record holds it.
Check = Callable[[Any, str], Any]


class RecordError(ValueError):
    """One line: what is wrong with a record, with the full path of the key."""


class NewerSchemaError(RecordError):
    """A record was written by a newer scaletier."""


class Record:
    """A dataclass serialized as JSON. Unknown keys are dropped; a wrong type is a RecordError.

    A class may have a function `json_key`, which returns the key of a field. A field whose metadata has `stored` False is no
    part of the JSON.
    """

    kind: ClassVar[str] = "record"
    """The name of such a record in messages."""
    old_names: ClassVar[Mapping[str, str]] = {}
    """Keys of schema 3 and before, by the names that they have now."""

    def to_json(self) -> bytes:
        """Return the record as JSON. Bytes of a command line that were not UTF-8 stay escaped lone surrogates."""
        text = json.dumps({"schema": SCHEMA, **by_key(self)}, ensure_ascii=False, default=by_key, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for printing."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    @classmethod
    def from_json(cls, content: bytes | str) -> Self:
        """Return the record of this JSON; RecordError if it is not a record, or it has a newer version."""
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{cls.kind} is no JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the record of plain values; errors are those of `from_json`."""
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            newer = f"was written by a newer scaletier (schema {schema}, this one reads {SCHEMA})"
            raise NewerSchemaError(f"{cls.kind} {newer}: bring this one up to date")
        check: Check = _check(cls)  # type: ignore[arg-type]  # a class is hashable
        record: Self = check(data, cls.kind)
        return record


def by_key(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by the keys of its JSON."""
    json_key = getattr(record, "json_key", str)
    return {json_key(f.name): getattr(record, f.name) for f in fields(record) if f.metadata.get("stored", True)}


def _dataclass(cls: Any) -> Check:
    hints, json_key = get_type_hints(cls), getattr(cls, "json_key", str)
    stored = [f for f in fields(cls) if f.metadata.get("stored", True)]
    old_names = getattr(cls, "old_names", {})
    checks = [(f.name, json_key(f.name), _check(hints[f.name])) for f in stored]
    required = [json_key(f.name) for f in stored if f.default is MISSING and f.default_factory is MISSING]

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise RecordError(f"{path} must be a JSON object, not {_abbreviate(value)}")
        if old_names:
            value = {**{new: value[old] for new, old in old_names.items() if old in value}, **value}
        if missing := [name for name in required if name not in value]:
            raise RecordError(f"{path} lacks {', '.join(missing)}")
        return cls(**{name: check_field(value[key], f"{path}.{key}") for name, key, check_field in checks if key in value})

    return check


@cache
def _check(kind: Any) -> Check:  # cached for each type: polls mostly read records
    if kind is Any:
        return _anything
    if is_dataclass(kind):
        return _dataclass(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(_check(next(a for a in arguments if a is not type(None))))
    if origin is list:
        return _list(_check(arguments[0]))
    if origin is tuple:
        return _tuple(_list(_check(arguments[0])))
    if origin is dict:
        return _dict(_check(arguments[1]))
    if issubclass(kind, StrEnum):
        return _enum(kind)
    return _plain(kind)


def _anything(value: Any, _: str) -> Any:
    return value


def _plain(kind: type) -> Check:
    def check(value: Any, path: str) -> Any:
        fits = isinstance(value, int | float) and _finite(value) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise RecordError(f"{path} must be {_NAMES.get(kind, kind.__name__)}, not {_abbreviate(value)}")
        return value

    return check


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _enum(kind: type[StrEnum]) -> Check:
    def check(value: Any, path: str) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise RecordError(f"{path} is {_abbreviate(value)}; valid are {', '.join(kind)}") from None

    return check


def _optional(check: Check) -> Check:
    return lambda value, path: None if value is None else check(value, path)


def _list(check_item: Check) -> Check:
    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise RecordError(f"{path} must be a list, not {_abbreviate(value)}")
        return [check_item(item, f"{path}[{index}]") for index, item in enumerate(value)]

    return check


def _tuple(check_list: Check) -> Check:
    return lambda value, path: tuple(check_list(value, path))


def _dict(check_item: Check) -> Check:
    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise RecordError(f"{path} must be a JSON object, not {_abbreviate(value)}")
        if check_item is _anything:
            return dict(value)
        return {key: check_item(item, f"{path}.{key}") for key, item in value.items()}

    return check


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
