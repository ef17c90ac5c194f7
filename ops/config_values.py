"""Read YAML, and check what config.yaml and scaletier.yaml share: types of values, and the keys for the end of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from infra.validation import Section, one_line, refusal
from jobs.notification import quote_target
from ops import commands, terminal
from ops.errors import UsageError

if TYPE_CHECKING:
    from yaml import Node

# A duration as Google's APIs spell it: "3600s", "3.5s".
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)s")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(MB|GB|TB)")
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
# The tag of the key `<<`, which may be repeated.
_MERGE = "tag:yaml.org,2002:merge"
_VALID_EXIT_CODES = "Valid: whole numbers from 1 to 255, as a shell gives them (128 + n for signal n)"

Model = TypeVar("Model", bound=Section)


class _WrittenInt(int):
    """Keep the text of a number: where a string is valid, 0123 is not 83 and 12:30 not 750."""

    text = ""

    def __str__(self) -> str:
        return self.text


class _WrittenFloat(float):
    """Keep the text of a number: where a string is valid, 1.50 is not 1.5."""

    text = ""

    def __str__(self) -> str:
        return self.text


def read_yaml(content: bytes, path: str) -> Any:
    """Parse a YAML file, None if it is empty; UsageError names the line of invalid YAML or of a repeated key."""
    import yaml

    found_keys = set[tuple[int, str, str]]()

    class Loader(yaml.SafeLoader):
        place = ""

        def compose_node(self, parent: Node | None, index: Any) -> Any:
            """Refuse a repeated key, of which PyYAML would use the last value; `index` is a value's key or an item's number."""
            place = self.place
            if isinstance(index, int):
                self.place += f"[{index}]"
            elif isinstance(index, yaml.ScalarNode):
                name = index.value if index.value.isprintable() else repr(index.value)
                self.place += f".{name}" if place else name
                key = (id(parent), index.tag, index.value)
                if key in found_keys and index.tag != _MERGE:
                    where = f"{path}:{index.start_mark.line + 1}: {self.place}"
                    raise UsageError(f"{where} is invalid: it is given twice. Valid: once")
                found_keys.add(key)
            node = super().compose_node(parent, index)
            self.place = place
            return node

        def construct_object(self, node: Node, deep: bool = False) -> Any:
            value = super().construct_object(node, deep)
            # Programs read inf and nan, but not .inf and .nan.
            if type(value) is int or (type(value) is float and math.isfinite(value)):
                value = _WrittenInt(value) if type(value) is int else _WrittenFloat(value)
                value.text = node.value
            elif isinstance(value, str):  # JSON escapes a character above U+FFFF as two, which YAML does not join
                value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return value

    try:
        return Loader(content.decode()).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # such as invalid UTF-8, an impossible date, too deep nesting
        raise UsageError(f"{path} cannot be read: {error}") from None


def validate(model: type[Model], data: Any, path: str, report_old_keys: bool = False) -> Model:
    """Check a value of YAML by its model; UsageError has the paths of all invalid keys.

    Args:
        path: the file and the keys above the value, for messages.
        report_old_keys: print a note for each key with an old name; only for files that a user can change.
    """
    old_keys: dict[str, str] = {}
    try:
        section = model.model_validate(data, context=old_keys)
    except ValidationError as error:
        raise UsageError(one_line(error, path, "." if ": " in path else ": ")) from None
    for new, old in old_keys.items() if report_old_keys else ():
        terminal.note(f"{path}: the key {old} is called {new} now: rename it, as the next release reads that alone")
    return section


def refuse_bool(value: Any) -> Any:
    """Refuse True and False, which are the integers 1 and 0 in Python."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _seconds(value: Any) -> float:
    """Parse a number above 0, or a duration as in Cloud ML."""
    if number := _duration(value):
        return number
    raise ValueError("must be a number of seconds above 0, such as 3600 or 3600s")


def _seconds_or_zero(value: Any) -> float:
    if (number := _duration(value)) is not None:
        return number
    raise ValueError("it is no number of seconds. Valid: 0 and above, such as 30 or 30s")


def _duration(value: Any) -> float | None:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    number = float(match[1]) if match else value
    fits = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < math.inf
    return number if fits else None


def _size(value: Any) -> int:
    """Parse bytes, 1 MB at least: a whole number, or one with a unit."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = round(float(match[1]) * _UNITS[match[2]]) if match else value
    if isinstance(size, bool) or not isinstance(size, int) or size < _UNITS["MB"]:
        raise ValueError("must be a size of 1 MB at least, such as 500MB, 2GB or 2000000000 for bytes")
    return size


def _exit_code(value: Any) -> int:
    """Check an exit code of a failed program, as a shell reports it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 256:
        reason = "0 is success" if value == 0 and value is not False else "it is no exit code"
        raise ValueError(f"{reason}. {_VALID_EXIT_CODES}")
    return value


def _flag(value: Any) -> str:
    """Check the name of a trainer's flag."""
    if not isinstance(value, str) or not value.startswith("-") or "=" in value:
        raise ValueError("must be a flag such as --data")
    return value


def check_notify(value: Any) -> str:
    """Check the target of a job's notification; ValueError if it is invalid."""
    try:
        if not isinstance(value, str):
            raise ValueError("it is not a string")
        commands.check_target(value)
    except ValueError as error:
        raise ValueError(f"{error}. Valid: {commands.VALID_TARGET}") from None
    return value


def _notify_key(value: Any) -> str:
    try:
        return check_notify(value)
    except ValueError as error:
        raise refusal(f"{quote_target(value)} is invalid: {error}") from None


# A string is valid, too: the JSON of Google's API has 64-bit integers as strings, like many config files (workerCount: "4").
Whole = Annotated[int, BeforeValidator(refuse_bool)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
StrictBool = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, PlainValidator(_seconds)]
Size = Annotated[int, PlainValidator(_size)]
Flag = Annotated[str, PlainValidator(_flag)]
Notify = Annotated[str, PlainValidator(_notify_key)]
RestartPolicy = Literal["replica", "all"]
# The roles that a job may lose: never the chief, which is the master.
OptionalRole = Literal["worker", "ps", "evaluator"]
_ExitCodes = Annotated[list[Annotated[int, PlainValidator(_exit_code)]], AfterValidator(lambda codes: sorted(set(codes)))]


class RunPolicy(Section):
    """The keys for the restarts and the end of a job, named like the fields of `jobs.records.Plan`."""

    old_names: ClassVar[Mapping[str, str]] = {"optionalRoles": "expendable"}

    restartPolicy: RestartPolicy | None = None
    optionalRoles: list[OptionalRole] | None = None
    restartCodes: _ExitCodes | None = None
    permanentCodes: _ExitCodes | None = None
    successPolicy: Literal["chief", "all"] | None = None
    gracePeriod: Annotated[float, PlainValidator(_seconds_or_zero)] | None = None
    stopSignal: Literal["main", "all"] | None = None

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        if both := {*(self.restartCodes or ())} & {*(self.permanentCodes or ())}:
            raise refusal(f"is invalid: {min(both)} is in restartCodes and in permanentCodes. Valid: one of the two")
        return self

    @property
    def policy_keys(self) -> dict[str, Any]:
        """Return those of the keys above that the file has."""
        return self.model_dump(include={*RunPolicy.model_fields}, exclude_unset=True)
