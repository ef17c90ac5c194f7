"""The files of each host for a job: a pure function of the inventory and the job, through the templates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from infra.spec import Role
from ops.cluster.inventory import Host, Inventory
from ops.train.config import Job
from ops.train.manifest import data_paths

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
UNIT = "scaletier.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
ENABLED = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
DATA = "data/mnist"
# What systemd leaves the unit of the host's memory: sshd and journald must live when a trainer eats it all.
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class File:
    """A file of a host; `link` instead of `content` is a symbolic link. Owner is root, the group `group` reads it."""

    path: str
    content: str = ""
    mode: int = 0o644
    group: str = "root"
    link: str | None = None


def render(inventory: Inventory, job: Job) -> dict[str, list[File]]:
    """Every host's files, by the host's name."""
    return {host.name: host_files(inventory, host, job) for host in inventory.hosts}


def host_files(inventory: Inventory, host: Host, job: Job) -> list[File]:
    """The files of one host."""
    chief_key = "chief" if job.use_chief else "master"
    plan = replace(job.plan(inventory, host.name), data=data_paths(job.args) or [f"{inventory.bucket}/{DATA}"])
    values: dict[str, Any] = {
        "cluster": inventory.cluster(chief_key),
        "task_type": chief_key if host.role is Role.MASTER else str(host.role),
        "index": host.index,
        "training_input": job.training_input,
        "environment": environment(inventory, host, job),
        "accelerator": host.accelerator,
        "bucket_path": inventory.bucket if inventory.bucket.startswith("/") else None,
        "memory_max": int(host.memory_bytes * MEMORY_SHARE),
        "stop_seconds": math.ceil(plan.stopSeconds) + 10,
    }
    # ASCII, so that an argument that is no UTF-8 reaches the trainer as it was given.
    plan_json = json.dumps(asdict(plan), indent=1) + "\n"
    return [
        File("/etc/scaletier/replica.json", plan_json, 0o640, "trainer"),
        File("/etc/scaletier/tf_config.json", _fill("tf_config.json.j2", values), 0o640, "trainer"),
        File("/etc/scaletier/environment", _fill("environment.j2", values), 0o640, "trainer"),
        File(UNIT_FILE, _fill("scaletier.service.j2", values)),
        File(ENABLED, mode=0o777, link=f"../{UNIT}"),
    ]


def environment(inventory: Inventory, host: Host, job: Job) -> dict[str, str]:
    """What a trainer finds in its environment, besides TF_CONFIG; TYPE is `master` on the chief, as in the seeds."""
    return {
        "TYPE": str(host.role),
        "INDEX": str(host.index),
        "JOB_ID": job.id,
        "JOB_DIR": job.job_dir,
        "SCALETIER_DATA": f"{inventory.bucket}/{DATA}",
        "HOME": "/var/lib/scaletier",
        "PYTHONUNBUFFERED": "1",
    }


def environment_quoted(value: str) -> str:
    """A value for systemd's EnvironmentFile, in double quotes, where only these four characters need a backslash.

    ValueError for what systemd would drop: control characters other than tab and newline. Source: systemd.exec(5).
    """
    if any((ord(c) < 32 and c not in "\t\n") or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise ValueError(f"systemd takes no control characters in an environment: {value!r}")
    return '"' + "".join(f"\\{c}" if c in '"\\`$' else c for c in value) + '"'


def unit_quoted(value: str) -> str:
    """A path in a unit file, in double quotes, with no specifier in it. Source: systemd.syntax(7)."""
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError(f"systemd takes no control characters in a unit: {value!r}")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _json(value: object) -> str:
    return json.dumps(value)


@cache
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters |= {"environment_quoted": environment_quoted, "unit_quoted": unit_quoted, "json": _json}
    return env


def _fill(name: str, values: Mapping[str, Any]) -> str:
    return _environment().get_template(name).render(values)
