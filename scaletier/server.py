"""A parameter server or a worker: a TensorFlow server that obeys the chief until it is stopped."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from scaletier.cluster import Cluster
from scaletier.private import server_library
from scaletier.runtime import ACCELERATOR, cpu_devices, reuse_memory, say_device, thread_counts


def serve(cluster: Cluster, allow_cpu: bool = False) -> NoReturn:
    """Run this task's server; SIGTERM ends the process at once, as there is nothing here to save.

    Raises:
        JobError: this host has a paid GPU that is not found.
    """
    if os.environ.get(ACCELERATOR):  # else there is no need of TensorFlow's Python
        say_device(allow_cpu)
    reuse_memory()
    server_class, config_class = server_library()
    intra_op, inter_op = thread_counts()
    server = server_class(
        {job: list(addresses) for job, addresses in cluster.jobs.items()},
        job_name=cluster.task_type,
        task_index=cluster.task_index,
        protocol="grpc",
        config=config_class(
            intra_op_parallelism_threads=intra_op,
            inter_op_parallelism_threads=inter_op,
            device_count={"CPU": cpu_devices()},
        ),
    )
    role = f"{cluster.task_type}/{cluster.task_index}"
    work = "serves variables" if cluster.task_type == "ps" else "waits for the master's steps"
    print(f"Started [{role}] on {cluster.address}, {work}", flush=True)
    server.join()
    raise SystemExit(0)


def idle(cluster: Cluster, strategy: str) -> int:
    """Wait for the end on a host that the strategy does not use, after a line about it; return 0."""
    role = f"{cluster.task_type}/{cluster.task_index}"
    print(f"Idle [{role}]: strategy {strategy} needs no parameter servers; this one waits for the job's end", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0
