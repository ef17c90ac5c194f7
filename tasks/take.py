"""Tasks that reach into the cluster: a shell there, and what a job wrote."""

import sys
from typing import Any

from ops.commandline import after_dashes
from tasks import JOB, JSON, task


@task(words=["replica"], help={"replica": "a replica, which is also the name of its host, such as worker-2"})
def shell(_: Any, replica: str | None = None) -> int:
    """Open a shell on a replica's host, or run a command there.

    fab shell worker-2
    fab shell worker-2 -- df -h
    fab shell worker-2 -- 'cd /tmp; ls | wc -l'
    """
    from ops.cluster.inventory import load
    from ops.cluster.shell import shell as run

    return run(load(), replica, after_dashes(sys.argv))


@task(
    words=["job", "path", "dest"],
    help={
        "job": JOB,
        "path": "file or folder of the job's output (default: all of it); a word that is none there is DEST",
        "dest": "where to put it, a new or empty directory, or for a file a new name (default: ID, or the name of PATH)",
        "json": JSON,
    },
)
def get(_: Any, job: str | None = None, path: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch a job's output: checkpoints, summaries and the exported model. Nothing that is here is written over.

    fab get job01
    fab get job01 export/Servo model
    fab get job01 --dest /tmp/job01
    """
    from ops.cluster.cluster import Cluster
    from ops.show.fetch import get as run

    return run(Cluster.load(), job, path, dest, json)


@task(
    words=["job", "dest"],
    help={
        "job": JOB,
        "dest": "directory to make of it (default: export/ID/TIMESTAMP)",
        "json": JSON,
    },
)
def export(_: Any, job: str | None = None, dest: str | None = None, json: bool = False) -> int:
    """Fetch the newest SavedModel that a job exported, or have one made of its latest checkpoint; show its signatures."""
    from ops.cluster.cluster import Cluster
    from ops.models.export import export as run

    return run(Cluster.load(), job, dest, json)
