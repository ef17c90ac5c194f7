"""The keys of config.yaml: Cloud ML's names and what each holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.spec import Role
from jobs.paths import JOB_ID
from ops.checks import (
    EXIT_KEYS,
    LOSABLE,
    RESTART_POLICIES,
    Check,
    check_exit_codes,
    check_mapping,
    count,
    nested,
    notify,
    one_of,
    seconds,
    size,
    some_of,
    text,
    texts,
    truth,
    unsupported,
    whole,
)
from ops.errors import UsageError
from ops.submit.environment import mapping
from ops.submit.tuning import hyperparameters

TYPE_KEYS: Mapping[Role, str] = {
    Role.MASTER: "masterType",
    Role.WORKER: "workerType",
    Role.PS: "parameterServerType",
    Role.EVALUATOR: "evaluatorType",
}
COUNT_KEYS: Mapping[Role, str] = {
    Role.WORKER: "workerCount",
    Role.PS: "parameterServerCount",
    Role.EVALUATOR: "evaluatorCount",
}
ROLE_KEYS = (*TYPE_KEYS.values(), *COUNT_KEYS.values())
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")


def check_job_id(job_id: str) -> None:
    """Check a job id by Cloud ML's rule.

    Raises:
        UsageError: if it breaks the rule.
    """
    if not JOB_ID.fullmatch(job_id):
        rule = "a letter, then letters, digits and underscores, 128 in all at most"
        raise UsageError(f"job id {job_id!r} breaks the rule: {rule}, such as job01")


def check_label(key: str, value: str, path: str) -> None:
    """Check a label by Google Cloud's rules.

    Raises:
        UsageError: if it breaks them.
    """
    if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        rule = "lower-case letters, digits, - and _, 63 at most, the key starting with a letter"
        raise UsageError(f"{path}: label {key}={value} breaks the rule: {rule}")


def version(value: Any, path: str) -> str:
    """Check a version, which must be quoted: YAML reads 2.20 as the number 2.2; all of 1.x are ignored."""
    if isinstance(value, float) and value >= 2 and len(str(value)) == len("2.2"):
        raise UsageError(f'{path}: {value} or {value}0? YAML makes one number of both: quote it, "{value}0"')
    return text(value, path)


def labels(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{path} must be a mapping of keys to values, not {value!r}")
    for key, item in value.items():
        check_label(str(key), text(item, f"{path}.{key}"), path)
    return {str(key): str(item) for key, item in value.items()}


SCHEDULING_KEYS: Mapping[str, Check] = {
    "maxRestarts": count,
    "maxRetries": count,
    "heartbeatSeconds": seconds,
    "lostAfterSeconds": seconds,
    "maxWaitTime": seconds,
    "maxRunningTime": seconds,
    "stallTimeout": seconds,
    "preparingSeconds": seconds,
    "stopSeconds": seconds,
    "logLimit": size,
    "restartPolicy": one_of(RESTART_POLICIES),
    "expendable": some_of(LOSABLE),
    **EXIT_KEYS,
    "priority": whole,
}


def scheduling(value: Any, path: str) -> dict[str, Any]:
    """Check `trainingInput.scheduling`."""
    keys = check_mapping(value if value is not None else {}, SCHEDULING_KEYS, path)
    check_exit_codes(keys, path)
    return keys


TRAINING_KEYS: Mapping[str, Check] = {
    "scaleTier": text,
    **dict.fromkeys(TYPE_KEYS.values(), text),
    **dict.fromkeys(COUNT_KEYS.values(), count),
    "pythonModule": text,
    "args": texts,
    "jobDir": text,
    "labels": labels,
    "environment": mapping,
    "useChiefInTfConfig": truth,
    "scheduling": scheduling,
    "wake": truth,
    "region": text,
    "runtime": text,
    "runtimeVersion": version,
    "pythonVersion": text,
    "packageUris": unsupported("fab train builds the package itself, give it --package DIR"),
    "hyperparameters": hyperparameters,
    "notify": notify,
}
JOB_KEYS: Mapping[str, Check] = {"jobId": text, "labels": labels, "notify": notify, "trainingInput": nested(TRAINING_KEYS)}
