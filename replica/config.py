"""What `fab train` left on this host for the replica: its plan and TF_CONFIG."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replica.record import JOB_ID, Plan

_ETC = "/etc/scaletier"
_STATE = "/var/lib/scaletier"
# Said by systemd to this process alone.
_PRIVATE = ("INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "SYSTEMD_EXEC_PID", "WATCHDOG_PID", "WATCHDOG_USEC")


class ConfigError(ValueError):
    """One line: which file is wrong, and how."""


@dataclass(frozen=True)
class Config:
    """`logs` is the directory of the logs on this host, `tf_config` the content of TF_CONFIG."""

    plan: Plan
    tf_config: str
    logs: Path

    def trainer_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The trainer's environment: that of this process, TF_CONFIG, and its package on PYTHONPATH."""
        env = {key: value for key, value in environ.items() if key not in _PRIVATE}
        path = os.pathsep.join(filter(None, (self.plan.packageDir, env.get("PYTHONPATH"))))
        return env | {"TF_CONFIG": self.tf_config, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def load(environ: Mapping[str, str]) -> Config:
    """Read the files; SCALETIER_ETC and SCALETIER_STATE move their directories. ConfigError where one is bad or missing."""
    etc, state = Path(environ.get("SCALETIER_ETC", _ETC)), Path(environ.get("SCALETIER_STATE", _STATE))
    plan_file, tf_file = etc / "replica.json", etc / "tf_config.json"
    try:
        plan = Plan.from_json(_read(plan_file))
    except ValueError as error:
        raise ConfigError(f"{plan_file}: {error}") from None
    if problem := _problem(plan):
        raise ConfigError(f"{plan_file}: {problem}")
    tf_config = _read(tf_file)
    try:
        json.loads(tf_config)
    except ValueError as error:
        raise ConfigError(f"{tf_file}: {error}") from None
    return Config(plan, tf_config, state / "logs")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; fab train writes it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None


def _problem(plan: Plan) -> str | None:
    """What is wrong with a plan, in words."""
    texts = (plan.jobId, plan.replica, plan.module, plan.bucket, plan.packageDir, plan.python)
    if not all(isinstance(text, str) and text for text in texts):
        return "jobId, replica, module, bucket, packageDir and python must be texts"
    if not JOB_ID.match(plan.jobId):
        return f"jobId {plan.jobId!r} must be a letter, then letters, digits or _"
    for key, value in (("args", plan.args), ("replicas", plan.replicas)):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return f"{key} must be a list of texts"
    if plan.replica not in plan.replicas:
        return f"replica {plan.replica!r} is not one of replicas: {', '.join(plan.replicas)}"
    counts = {key: getattr(plan, key) for key in ("maxRestarts", "maxRetries")}
    if wrong := [key for key, value in counts.items() if not isinstance(value, int) or value < 0]:
        return f"{wrong[0]} must be a whole number, 0 or more"
    times = {key: getattr(plan, key) for key in vars(plan) if key.endswith("Seconds")}
    if wrong := [key for key, value in times.items() if not isinstance(value, int | float) or value <= 0]:
        return f"{wrong[0]} must be a number of seconds above 0"
    return None
