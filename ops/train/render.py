"""The files of each host, and the plan of a job: pure functions of the inventory and the job, through the templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from infra.spec import Role
from jobs import variables
from jobs.paths import DATA
from jobs.records import HostFile, Plan, Task
from ops.cluster.inventory import JOBS_UNIT, Host, Inventory
from ops.train.arguments import data_paths
from ops.train.config import Job
from ops.train.environment import USUAL, of_task

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
UNITS = "/etc/systemd/system"
UNIT_CONF, TIMER_CONF, TRAINER_CONF = (
    f"{UNITS}/{name}.d/host.conf" for name in (JOBS_UNIT, "scaletier.timer", "scaletier-trainer.service")
)
"""What a host is told of the units that it has."""
SECRETS = "/var/lib/scaletier/secrets"
# What systemd leaves the unit of the host's memory: sshd and journald must live when a trainer eats it all.
MEMORY_SHARE = 0.9
# Threads that a trainer may have: libraries start a pool of each kind for every processor.
_TASKS, _TASKS_A_CPU = 512, 256


@dataclass(frozen=True)
class File:
    """A file of a host. Whose it is there, and who may read it, the host knows as well, and goes by that."""

    path: str
    content: str
    mode: int = 0o644
    group: str = "root"
    user: str = "root"


def idle_seconds(poll_seconds: float) -> int:
    """How often a host without a job looks whether one waits for it."""
    return round(60 * max(1.0, poll_seconds))


def beat_seconds(poll_seconds: float) -> float:
    """How often a replica says that it lives: less often where each request costs, and hosts look less often."""
    return max(Plan.heartbeatSeconds, 2.5 * poll_seconds)


def render(inventory: Inventory) -> dict[str, list[File]]:
    """The files of every host on which jobs run, by its name: they are the same for every job."""
    return {host.name: host_files(inventory, host) for host in inventory.job_hosts}


def host_files(inventory: Inventory, host: Host) -> list[File]:
    """The files of one host."""
    values: dict[str, Any] = {
        "accelerator": host.accelerator,
        "memory_max": int(host.memory_bytes * MEMORY_SHARE),
        "tasks_max": _TASKS + int(_TASKS_A_CPU * host.cpus),
        "idle_seconds": idle_seconds(inventory.poll_seconds),
    }
    said = HostFile(host.name, inventory.bucket, inventory.poll_seconds, power=inventory.power())
    return [
        File("/etc/scaletier/host.json", said.to_json().decode(), 0o640, "replica"),
        File(UNIT_CONF, fill("scaletier.conf.j2", values)),
        File(TRAINER_CONF, fill("scaletier-trainer.conf.j2", values)),
        File(TIMER_CONF, fill("scaletier-timer.conf.j2", values)),
    ]


def secret_files(job: Job) -> list[File]:
    """A job's secrets, the same on every host and the replica's alone, who tells its trainer; nothing for a job without."""
    if not job.secrets:
        return []
    return [File(f"{SECRETS}/{job.id}.json", json.dumps(dict(job.secrets)), 0o600, "replica", "replica")]


def plan(inventory: Inventory, job: Job, package_sha256: str) -> Plan:
    """What the replicas of a job need to know; SpecError or UsageError have been raised before, where the job is wrong."""
    part = job.part(inventory)
    # Which hosts they get is seen later: until then each replica's address is its name.
    named = replace(part, hosts=tuple(replace(host, address=host.name) for host in part.hosts))
    hosts = [named.host(name) for name in named.replicas]
    tasks = {host.name: task(_alone(named, host) if job.study else named, host.name, job) for host in hosts}
    data = data_paths(variables.expand_command(job.args, tasks[hosts[0].name].environment))
    return Plan(
        jobId=job.id,
        replicas=[host.name for host in hosts],
        module=job.module,
        args=[*job.args, *((job.job_dir_flag, job.job_dir) if job.job_dir_flag else ())],
        tasks=tasks,
        addresses={host.name: host.address for host in inventory.job_hosts},
        packageSha256=package_sha256,
        data=data or ([data_folder(inventory, job)] if job.declared.data_for(job.args) else []),
        secrets=sorted(job.secrets),
        study=job.study,
        notify=job.notify,
        command=list(job.command),
        folder=job.folder,
        python=python(inventory, job),
        **{"heartbeatSeconds": beat_seconds(inventory.poll_seconds), **job.policy},
    )


def task(inventory: Inventory, name: str, job: Job) -> Task:
    """What the trainer of one replica finds."""
    host = next(host for host in inventory.hosts if host.name == name)
    return Task(tf_config(inventory, host, job), environment(inventory, host, job))


def _alone(inventory: Inventory, host: Host) -> Inventory:
    """A host as a cluster of its own, whose master it is."""
    return replace(inventory, hosts=(replace(host, role=Role.MASTER, index=0),))


def python(inventory: Inventory, job: Job) -> str:
    """The Python of the hosts that a job brings along; empty where theirs will do."""
    if not job.runtime:
        return ""
    from ops.package import runtimes  # takes packaging along

    return runtimes.python(inventory, job.runtime)


def tf_config(inventory: Inventory, host: Host, job: Job) -> str:
    """TF_CONFIG of one replica; the chief's role is `chief`, as TensorFlow 2 has it, or `master`."""
    chief_key = "chief" if job.use_chief else "master"
    values: dict[str, Any] = {
        "cluster": inventory.cluster(chief_key),
        "task_type": chief_key if host.role is Role.MASTER else str(host.role),
        "index": host.index,
        "training_input": job.training_input,
    }
    return fill("tf_config.json.j2", values)


def environment(inventory: Inventory, host: Host, job: Job) -> dict[str, str]:
    """What a trainer finds in its environment, besides TF_CONFIG and secrets."""
    told = of_task(inventory, host, job.id, job.job_dir, data_folder(inventory, job))
    return {**USUAL, **job.environment, **told}


def data_folder(inventory: Inventory, job: Job) -> str:
    """Return SCALETIER_DATA: the folder of the declared data set, or of all data."""
    data = job.declared.data
    return f"{inventory.bucket}/{DATA}{f'/{data.name}' if data else ''}"


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
    env.filters |= {"json": _json}
    return env


def fill(name: str, values: Mapping[str, Any]) -> str:
    """The text of a template."""
    return _environment().get_template(name).render(values)
