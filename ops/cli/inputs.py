"""Commands on the inputs of jobs: data, and Python environments."""

from typing import Any

from ops.cli.task import JSON, load_cluster, task


@task(
    positionals=["action", "what", "name"],
    help={
        "action": "ls (the default), put or rm",
        "what": "file or folder of this machine to upload; or a name in the bucket",
        "name": "name below data/ (default: that of the file or folder)",
        "yes": "do not ask",
        "json": JSON,
    },
)
def data(
    _: Any, action: str | None = None, what: str | None = None, name: str | None = None, yes: bool = False, json: bool = False
) -> int:
    """List, upload or remove data in the bucket, for trainers to read.

    fab data ls
    fab data put ~/pictures
    fab data rm pictures

    `put` prints the path on the hosts. A file that is there with the same size and modification time is not sent again.
    """
    from ops.submit.data import data as run

    return run(load_cluster(), action, what, name, yes, json)


@task(
    positionals=["action", "name"],
    help={"action": "ls (the default) or rm", "name": "the environment to remove", "yes": "do not ask", "json": JSON},
)
def runtimes(_: Any, action: str | None = None, name: str | None = None, yes: bool = False, json: bool = False) -> int:
    """List or remove the Python environments that fab train --runtime and --runtime-version have built.

    fab runtimes
    fab runtimes rm tensorflow-2.20-1a2b3c4d5e6f
    """
    from ops.submit.runtimes import runtimes as run

    return run(load_cluster(), action, name, yes, json)
