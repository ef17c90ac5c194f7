"""Keys and types of config.yaml and of a trainer's scaletier.yaml, with the messages for wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.spec import Role
from jobs import notification
from ops.errors import UsageError

# A check takes a value and the full path of its key, and returns the value; it raises UsageError.
Check = Callable[[Any, str], Any]

RESTART_POLICIES = ("replica", "all")
SUCCESS_POLICIES = ("chief", "all")
STOP_SIGNALS = ("main", "all")
# The roles that a job may lose: never the chief, which is the master.
LOSABLE = (Role.WORKER, Role.PS, Role.EVALUATOR)
# A duration as Google's APIs spell it: "3600s", "3.5s".
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)s")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(MB|GB|TB)")
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


def read_yaml(content: bytes, path: str) -> Any:
    """Parse a YAML file, None for an empty one; the message for a broken one names the line."""
    import yaml

    try:
        return yaml.safe_load(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', error)}") from None


def check_mapping(data: Any, keys: Mapping[str, Check], path: str) -> dict[str, Any]:
    """Check a mapping's keys and each value; the message names the full path and the valid keys."""
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a mapping of keys to values; valid keys are {', '.join(_valid(keys))}")
    checked: dict[str, Any] = {}
    for key, value in data.items():
        if key not in keys:
            raise UsageError(f"{_below(path, key)} is unknown; valid are {', '.join(_valid(keys))}")
        checked[key] = keys[key](value, _below(path, key))
    return checked


def _valid(keys: Mapping[str, Check]) -> list[str]:
    """Return the keys without those that are only known in order to refuse them."""
    return [key for key, check in keys.items() if not isinstance(check, _Unsupported)]


def _below(path: str, key: object) -> str:
    """Append a key to a path, after the file's colon or a key's dot: `config.yaml: trainingInput.args`."""
    return f"{path}.{key}" if ": " in path else f"{path}: {key}"


def nested(keys: Mapping[str, Check]) -> Check:
    """Return a check for a mapping of known keys; an empty value is an empty mapping."""
    return lambda value, path: check_mapping(value if value is not None else {}, keys, path)


def named(check: Check) -> Check:
    """Return a check for a mapping of free names with values of one kind."""

    def mapping(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UsageError(f"{path} must be a mapping of names, not {value!r}")
        return {str(name): check(item, f"{path}.{name}") for name, item in value.items()}

    return mapping


def text(value: Any, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{path} must be a string, not {value!r}")
    return str(value)  # runtimeVersion: 1.2 is a float to YAML


def count(value: Any, path: str) -> int:
    # The JSON of Google's API has 64-bit integers as strings, and so have many config files: workerCount: "4".
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{path} must be a whole number from 0, not {value!r}")
    return value


def positive(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{path} must be a whole number from 1, not {value!r}")
    return value


def whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{path} must be a whole number, not {value!r}")
    return value


def seconds(value: Any, path: str) -> float:
    """Parse a number above 0, or a duration as in Cloud ML."""
    if number := _seconds(value):
        return number
    raise UsageError(f"{path} must be a number of seconds above 0, such as 3600 or 3600s, not {value!r}")


def seconds_or_none(value: Any, path: str) -> float:
    """Parse a duration like `seconds`, or 0."""
    if (number := _seconds(value)) is not None:
        return number
    raise UsageError(f"{path} {value!r} is invalid: it is no number of seconds. Valid: 0 and above, such as 30 or 30s")


def _seconds(value: Any) -> float | None:
    spelt = _DURATION.fullmatch(value) if isinstance(value, str) else None
    number = float(spelt[1]) if spelt else value
    fits = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < float("inf")
    return number if fits else None


def exit_codes(value: Any, path: str) -> list[int]:
    """Exit codes of a program that did not succeed, as a shell has them."""
    valid = "Valid: whole numbers from 1 to 255, as a shell gives them (128 + n for signal n)"
    if not isinstance(value, list):
        raise UsageError(f"{path} {value!r} is invalid: it is no list. {valid}, such as [42]")
    for index, code in enumerate(value):
        if isinstance(code, bool) or not isinstance(code, int) or not 0 < code < 256:
            why = "0 is success" if code == 0 and code is not False else "it is no exit code"
            raise UsageError(f"{path}[{index}] {code!r} is invalid: {why}. {valid}")
    return sorted(set(value))


def size(value: Any, path: str) -> int:
    """Parse bytes, 1 MB at least: a whole number, or one with a unit."""
    spelt = _SIZE.fullmatch(value) if isinstance(value, str) else None
    count = round(float(spelt[1]) * _UNITS[spelt[2]]) if spelt else value
    if isinstance(count, bool) or not isinstance(count, int) or count < _UNITS["MB"]:
        raise UsageError(f"{path} must be a size of 1 MB at least, such as 500MB, 2GB or 2000000000 for bytes, not {value!r}")
    return count


def truth(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{path} must be true or false, not {value!r}")
    return value


def texts(value: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        raise UsageError(f"{path} must be a list, one argument an item, not {value!r}")
    for index, item in enumerate(value):
        if isinstance(item, bool | list | dict) or item is None:
            raise UsageError(f"{path}[{index}] must be a string, not {item!r}: quote it")
    return [str(item) for item in value]


def flag(value: Any, path: str) -> str:
    """Check the name of a trainer's flag."""
    if not isinstance(value, str) or not value.startswith("-") or "=" in value:
        raise UsageError(f"{path} must be a flag such as --data, not {value!r}")
    return value


def flags(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{path} must be a list of flags, such as [--data], not {value!r}")
    return tuple(flag(item, f"{path}[{index}]") for index, item in enumerate(value))


def notify(value: Any, path: str) -> str:
    """Check the target of a job's notification."""
    try:
        if not isinstance(value, str):
            raise ValueError("it is not a string")
        notification.check_target(value)
    except ValueError as error:
        raise UsageError(f"{path} {value!r} is invalid: {error}. Valid: {notification.VALID}") from None
    return value


def one_of(valid: Sequence[str]) -> Check:
    def choose(value: Any, path: str) -> str:
        if value not in valid:
            raise UsageError(f"{path} {value!r} is unknown; valid are {', '.join(valid)}")
        return str(value)

    return choose


def some_of(valid: Sequence[str]) -> Check:
    def choose(value: Any, path: str) -> list[str]:
        if not isinstance(value, list):
            raise UsageError(f"{path} must be a list of some of {', '.join(valid)}, not {value!r}")
        return [one_of(valid)(item, f"{path}[{index}]") for index, item in enumerate(value)]

    return choose


EXIT_KEYS: Mapping[str, Check] = {
    "restartCodes": exit_codes,
    "permanentCodes": exit_codes,
    "successPolicy": one_of(SUCCESS_POLICIES),
    "gracePeriod": seconds_or_none,
    "stopSignal": one_of(STOP_SIGNALS),
}
"""The keys for the end of a job, in the names of `jobs.records.Plan`."""


def check_exit_codes(given: Mapping[str, Any], path: str) -> None:
    """Check that no code both restarts a trainer and does not.

    Raises:
        UsageError: if one does.
    """
    if both := set(given.get("restartCodes", ())) & set(given.get("permanentCodes", ())):
        raise UsageError(f"{path} is invalid: {min(both)} is in restartCodes and in permanentCodes. Valid: one of the two")


def unsupported(instead: str) -> Check:
    return _Unsupported(instead)


@dataclass(frozen=True)
class _Unsupported:
    instead: str

    def __call__(self, _: Any, path: str) -> Any:
        raise UsageError(f"{path} is not supported: {self.instead}")
