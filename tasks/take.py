"""Tasks that reach into the cluster: a shell there, what a job wrote, data, and what is to go."""

import sys
from typing import Any

from ops.commandline import after_dashes
from tasks import JOB, JSON, task


@task(
    words=["replica"],
    rest="COMMAND",
    help={"replica": "a host, such as worker-2 (default: the master's); fab describe says which replica is where"},
)
def shell(_: Any, replica: str | None = None) -> int:
    """Open a shell on a host, or run a command there.

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
    words=["action", "what", "name"],
    help={
        "action": "ls (the default), put or rm",
        "what": "file or folder of this machine to put there; or the name of what is there",
        "name": "name below data/ to put it under (default: its own)",
        "yes": "do not ask",
        "json": JSON,
    },
)
def data(
    _: Any,
    action: str | None = None,
    what: str | None = None,
    name: str | None = None,
    yes: bool = False,
    json: bool = False,
) -> int:
    """List, upload or remove data in the bucket, for trainers to read.

    fab data ls
    fab data put ~/pictures
    fab data rm pictures

    It says the path by which the hosts see it. What is there in the same size is not sent again.
    """
    from ops.cluster.cluster import Cluster
    from ops.train.data import data as run

    return run(Cluster.load(), action, what, name, yes, json)


@task(
    words=["action", "name"],
    help={"action": "ls (the default) or rm", "name": "which one to remove", "yes": "do not ask", "json": JSON},
)
def runtimes(_: Any, action: str | None = None, name: str | None = None, yes: bool = False, json: bool = False) -> int:
    """List or remove the Pythons that fab train --runtime and --runtime-version have built.

    fab runtimes
    fab runtimes rm tensorflow-2.20-1a2b3c4d5e6f
    """
    from ops.cluster.cluster import Cluster
    from ops.train.kept import runtimes as run

    return run(Cluster.load(), action, name, yes, json)


@task(words=["job"], help={"job": "id of a job that has ended", "yes": "do not ask", "json": JSON})
def delete(_: Any, job: str | None = None, yes: bool = False, json: bool = False) -> int:
    """Delete a job that has ended, with its package, logs and output; an output elsewhere (--job-dir) stays. Asks first."""
    from ops.cluster.cluster import Cluster
    from ops.train.delete import delete as run

    return run(Cluster.load(), job, yes, json)


@task(help={"keep": "how many of the newest that have ended stay", "yes": "do not ask", "json": JSON})
def prune(_: Any, keep: str | None = None, yes: bool = False, json: bool = False) -> int:
    """Delete all jobs that have ended but the newest: fab prune --keep 10. Asks first."""
    from ops.cluster.cluster import Cluster
    from ops.train.delete import prune as run

    return run(Cluster.load(), keep, yes, json)


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
