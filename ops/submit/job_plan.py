"""The plan of a job, and TF_CONFIG and environment of each replica: pure functions of the inventory and the job."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from infra import templates
from infra.inventory import Host, Inventory
from infra.scale_tiers import Role
from jobs import paths, variables
from jobs.paths import DATA
from jobs.records import Plan, Task
from jobs.token_access import MOST_BUCKETS, access
from ops.cluster.host_files import RemoteFile, heartbeat_seconds
from ops.errors import UsageError
from ops.submit.arguments import data_paths
from ops.submit.config import JobSpec
from ops.submit.environment import DEFAULTS, task_variables
from ops.submit.schema import in_snake_case

SECRETS = f"{paths.STATE_DIR}/secrets"


def secret_files(job: JobSpec) -> list[RemoteFile]:
    """Return a job's secrets file, the same on every host and only readable by the agent; none if it has no secrets."""
    if not job.secrets:
        return []
    return [RemoteFile(f"{SECRETS}/{job.id}.json", json.dumps(dict(job.secrets)))]


def plan(inventory: Inventory, job: JobSpec, package_sha256: str) -> Plan:
    """Return the plan for the replicas of a job; invalid jobs have raised SpecError or UsageError before."""
    subset = job.subset(inventory)
    # Hosts are assigned later: until then each replica's address is its name.
    addressed = replace(subset, hosts=tuple(replace(host, address=host.name) for host in subset.hosts))
    hosts = [addressed.host(name) for name in addressed.replicas]
    tasks = {
        host.name: task(_as_single_host_cluster(addressed, host) if job.study else addressed, host.name, job) for host in hosts
    }
    data = data_paths(variables.expand_command(job.args, tasks[hosts[0].name].environment))
    result = Plan(
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
        **{"heartbeatSeconds": heartbeat_seconds(inventory.poll_seconds), **job.policy},
    )
    if inventory.bucket.startswith("gs://"):
        _check_rights(result, inventory.bucket.removeprefix("gs://"))
    return result


def _check_rights(new: Plan, bucket: str) -> None:
    """Check that the trainers' token has room for every folder and bucket that the job names."""
    rights = access(new, new.tasks[new.chief], bucket)
    if rights.left_out:
        raise UsageError(
            f"the job names more folders and buckets than a token on Google Cloud has room for; it could not use "
            f"{', '.join(rights.left_out)}. Valid: any number of files below gs://{bucket}/{DATA} (fab data put), one folder "
            f"above the others, at most {MOST_BUCKETS} other buckets"
        )


def task(inventory: Inventory, name: str, job: JobSpec) -> Task:
    """Return the task of one replica's trainer."""
    host = next(host for host in inventory.hosts if host.name == name)
    return Task(tf_config(inventory, host, job), environment(inventory, host, job))


def _as_single_host_cluster(inventory: Inventory, host: Host) -> Inventory:
    """Return a host as a cluster of its own, whose master it is."""
    return replace(inventory, hosts=(replace(host, role=Role.MASTER, index=0),))


def python(inventory: Inventory, job: JobSpec) -> str:
    """Return the path of the job's own Python on the hosts; empty if it has none."""
    if not job.runtime:
        return ""
    from ops.package import runtimes  # imports packaging, which is slow

    return runtimes.python(inventory, job.runtime)


def tf_config(inventory: Inventory, host: Host, job: JobSpec) -> str:
    """Return TF_CONFIG of one replica; the chief's role is `chief`, as in TensorFlow 2, or `master`."""
    chief_key = "chief" if job.use_chief else "master"
    values: dict[str, Any] = {
        "cluster": inventory.cluster(chief_key),
        "task_type": chief_key if host.role is Role.MASTER else str(host.role),
        "index": host.index,
        "training_input": in_snake_case(job.training_input),
    }
    return templates.render("tf_config.json.j2", **values)


def environment(inventory: Inventory, host: Host, job: JobSpec) -> dict[str, str]:
    """Return a trainer's environment, besides TF_CONFIG and secrets."""
    identity = task_variables(inventory, host, job.id, job.job_dir, data_folder(inventory, job))
    return {**DEFAULTS, **job.environment, **identity}


def data_folder(inventory: Inventory, job: JobSpec) -> str:
    """Return SCALETIER_DATA: the folder of the declared data set, or of all data."""
    data = job.declared.data
    return f"{inventory.bucket}/{DATA}{f'/{data.name}' if data else ''}"
