"""The keys of config.yaml: Cloud ML's names, their types, and what is said when they are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from infra.spec import Role
from ops.errors import UsageError
from replica.record import JOB_ID

# A check takes a value and the full path of its key, and returns the value; it raises UsageError.
Check = Callable[[Any, str], Any]

ROLE_KEYS: Mapping[str, tuple[Role, bool]] = {
    "masterType": (Role.MASTER, False),
    "workerType": (Role.WORKER, False),
    "parameterServerType": (Role.PS, False),
    "evaluatorType": (Role.EVALUATOR, False),
    "workerCount": (Role.WORKER, True),
    "parameterServerCount": (Role.PS, True),
    "evaluatorCount": (Role.EVALUATOR, True),
}
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")


def check_job_id(job_id: str) -> None:
    """UsageError for a job id that breaks Cloud ML's rule."""
    if not JOB_ID.fullmatch(job_id):
        rule = "a letter, then letters, digits and underscores, 128 in all at most"
        raise UsageError(f"job id {job_id!r} breaks the rule: {rule}, such as job01")


def check_label(key: str, value: str, path: str) -> None:
    """UsageError for a label that Google Cloud would refuse."""
    if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        rule = "lower-case letters, digits, - and _, 63 at most, the key starting with a letter"
        raise UsageError(f"{path}: label {key}={value} breaks the rule: {rule}")


def check_mapping(data: Any, keys: Mapping[str, Check], path: str) -> dict[str, Any]:
    """A mapping whose keys are all known, each value checked; the message names the full path and the valid keys."""
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a mapping of keys to values; valid keys are {', '.join(keys)}")
    checked: dict[str, Any] = {}
    for key, value in data.items():
        # The file's own name ends in a colon, a key in a dot: `config.yaml: trainingInput.args`.
        below = f"{path}.{key}" if ": " in path else f"{path}: {key}"
        if key not in keys:
            raise UsageError(f"{below} is unknown; valid are {', '.join(keys)}")
        checked[key] = keys[key](value, below)
    return checked


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


def seconds(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{path} must be a number of seconds above 0, not {value!r}")
    return value


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


def labels(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{path} must be a mapping of keys to values, not {value!r}")
    for key, item in value.items():
        check_label(str(key), text(item, f"{path}.{key}"), path)
    return {str(key): str(item) for key, item in value.items()}


def unsupported(instead: str) -> Check:
    def refuse(_: Any, path: str) -> Any:
        raise UsageError(f"{path} is not supported: {instead}")

    return refuse


def nested(keys: Mapping[str, Check]) -> Check:
    return lambda value, path: check_mapping(value if value is not None else {}, keys, path)


SCHEDULING_KEYS: Mapping[str, Check] = {
    "maxRestarts": count,
    "maxRetries": count,
    "heartbeatSeconds": seconds,
    "lostAfterSeconds": seconds,
    "lostForGoodSeconds": seconds,
    "preparingSeconds": seconds,
    "stopSeconds": seconds,
}
TRAINING_KEYS: Mapping[str, Check] = {
    "scaleTier": text,
    **{key: count if is_count else text for key, (_, is_count) in ROLE_KEYS.items()},
    "pythonModule": text,
    "args": texts,
    "jobDir": text,
    "labels": labels,
    "useChiefInTfConfig": truth,
    "scheduling": nested(SCHEDULING_KEYS),
    "region": text,
    "runtimeVersion": text,
    "pythonVersion": text,
    "packageUris": unsupported("fab train builds the package itself, give it --package DIR"),
    "hyperparameters": unsupported("start one job a trial"),
}
JOB_KEYS: Mapping[str, Check] = {"jobId": text, "labels": labels, "trainingInput": nested(TRAINING_KEYS)}
