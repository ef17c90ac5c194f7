"""Tasks on what jobs need: data, and Pythons of their own."""

from typing import Any

from ops.cli.task import JSON, task


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
    from ops.cluster.cluster import ClusterClient
    from ops.submit.data import data as run

    return run(ClusterClient.load(), action, what, name, yes, json)


@task(
    words=["action", "name"],
    help={"action": "ls (the default) or rm", "name": "which one to remove", "yes": "do not ask", "json": JSON},
)
def runtimes(_: Any, action: str | None = None, name: str | None = None, yes: bool = False, json: bool = False) -> int:
    """List or remove the Pythons that fab train --runtime and --runtime-version have built.

    fab runtimes
    fab runtimes rm tensorflow-2.20-1a2b3c4d5e6f
    """
    from ops.cluster.cluster import ClusterClient
    from ops.submit.runtimes import runtimes as run

    return run(ClusterClient.load(), action, name, yes, json)
