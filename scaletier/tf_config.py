"""Read the cluster and this process's task from TF_CONFIG, with the standard library only."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TASK_TYPES = ("chief", "master", "worker", "ps", "evaluator")
_PROBE_SECONDS = 0.05
_REPORT_SECONDS = 5.0


class ClusterError(ValueError):
    """TF_CONFIG is invalid; the message is one line."""


@dataclass(frozen=True)
class Cluster:
    """A task and its cluster.

    Args:
        task_type: `chief`, which TF_CONFIG may call master, `worker`, `ps` or `evaluator`.
        task_index: the task's place among those of its type.
        jobs: maps the roles `ps`, `worker` and `chief` to the `host:port` of each task; empty if one process trains, and for
            an evaluator.
    """

    task_type: str = "chief"
    task_index: int = 0
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The task's name, such as `worker/0`."""
        return f"{self.task_type}/{self.task_index}"

    @property
    def address(self) -> str:
        """The task's `host:port`; KeyError if `jobs` is empty."""
        return self.jobs[self.task_type][self.task_index]

    def peers(self, *jobs: str) -> dict[str, str]:
        """Return the address of each task of these roles by its name: `worker/0` to `10.0.0.2:2222`."""
        return {f"{job}/{index}": address for job in jobs for index, address in enumerate(self.jobs.get(job, ()))}


def parse(tf_config: str | None) -> Cluster:
    """Return the cluster of TF_CONFIG's JSON: one process if it is absent, empty, or has no cluster; may raise ClusterError."""
    try:
        config = json.loads(tf_config or "{}")
        jobs = {str(job): _addresses(str(job), hosts) for job, hosts in (config.get("cluster") or {}).items()}
        task = config.get("task") or {}
        task_type, task_index = str(task.get("type", "chief")), int(task.get("index", 0))
    except ClusterError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise ClusterError(f"TF_CONFIG is not a JSON object of cluster and task: {error}") from None
    if task_type not in TASK_TYPES:
        raise ClusterError(f"TF_CONFIG's task type {task_type!r} is unknown; valid are {', '.join(TASK_TYPES)}")
    if "master" in jobs:
        jobs["chief"] = jobs.pop("master")
    task_type = "chief" if task_type == "master" else task_type
    if task_type == "evaluator" or set(jobs) <= {"chief"}:
        return Cluster(task_type, task_index)
    if not jobs.get("chief"):
        raise ClusterError("TF_CONFIG's cluster has no chief; it needs one, which may be called master")
    if not 0 <= task_index < len(jobs.get(task_type, ())):
        raise ClusterError(f"TF_CONFIG's cluster has no {task_type} {task_index}")
    return Cluster(task_type, task_index, {job: jobs[job] for job in ("ps", "worker", "chief") if jobs.get(job)})


def _addresses(job: str, hosts: Any) -> tuple[str, ...]:
    if not isinstance(hosts, list):
        raise ClusterError(f"TF_CONFIG's cluster has {hosts!r} for {job}; valid is a list of host:port")
    for host in hosts:
        if not str(host).rpartition(":")[2].isdecimal():
            raise ClusterError(f"TF_CONFIG's cluster has {host!r} for {job}; valid is host:port")
    return tuple(map(str, hosts))


def cluster(environ: Mapping[str, str] | None = None) -> Cluster:
    """Return this process's task and its cluster.

    Args:
        environ: the environment that has TF_CONFIG. Default: `os.environ`.

    Raises:
        ClusterError: TF_CONFIG is invalid.
    """
    return parse((os.environ if environ is None else environ).get("TF_CONFIG"))


def await_peers(peers: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Wait until every peer accepts connections; report the missing ones every few seconds.

    gRPC backs off for seconds after a refused connection. After this wait it connects at once.
    """
    missing = dict(peers)
    next_report = time.monotonic() + _REPORT_SECONDS
    while missing := {name: address for name, address in missing.items() if not _accepts(address)}:
        if time.monotonic() >= next_report:
            report(f"Waiting for {', '.join(missing)}")
            next_report = time.monotonic() + _REPORT_SECONDS
        time.sleep(_PROBE_SECONDS)


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def strategy_problem(cluster: Cluster, strategy: str) -> str | None:
    """Return why this cluster cannot train by this strategy, in one line; None if it can."""
    servers, workers = cluster.jobs.get("ps"), cluster.jobs.get("worker")
    if cluster.task_type == "evaluator" or (strategy == "async" and bool(servers) == bool(workers)):
        return None
    if not workers:
        fix = "take --strategy async and no parameter servers" if servers else "take --strategy async"
        return f"--strategy {strategy} needs a worker, and this cluster has none: {fix}, or a cluster with workers"
    if strategy == "async":
        return "--strategy async needs a parameter server for its workers, and this cluster has none: take --strategy sync"
    return None
