"""Tasks that reach into the cluster: a shell there, and what a job wrote."""

import sys
from typing import Any

from ops.cli import after_dashes
from tasks import JOB, JSON, task


@task(positional=["replica"], help={"replica": "a replica, which is also the name of its host, such as worker-2"})
def shell(_: Any, replica: str) -> int:
    """Open a shell on a replica's host, or run a command there: fab shell worker-2 -- df -h"""
    from ops.cluster.inventory import load
    from ops.cluster.shell import shell as run

    return run(load(), replica, after_dashes(sys.argv))


@task(positional=["job", "dest"], help={"job": JOB, "dest": "directory to put the files into; made if it is not there"})
def get(_: Any, job: str, dest: str) -> int:
    """Fetch a job's output: checkpoints, summaries and the exported model."""
    from ops.cluster.cluster import Cluster
    from ops.show.fetch import get as run

    return run(Cluster.load(), job, dest)


@task(
    positional=["job"],
    help={
        "job": JOB,
        "dest": "directory to make of it (default: export/ID/TIMESTAMP)",
        "json": JSON,
    },
)
def export(_: Any, job: str, dest: str | None = None, json: bool = False) -> int:
    """Fetch the newest SavedModel that a job exported, or have one made of its latest checkpoint; show its signatures."""
    from ops.cluster.cluster import Cluster
    from ops.models.export import export as run

    return run(Cluster.load(), job, dest, json)
