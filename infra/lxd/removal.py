"""The removal of instances, in any state."""

from __future__ import annotations

import time

import pylxd.exceptions

from infra.lxd.api import client

# Seconds between the attempts to delete an instance.
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)


def remove(project: str, name: str) -> None:
    """Stop and delete an instance in any state; do nothing if it is gone.

    LXD may refuse for seconds, for example while it is busy with the instance or its disk, so failed calls are repeated. Only
    NotFound for the instance itself means that it is gone: LXD answers the same about an operation that ended seconds ago.
    """
    for pause in (*_PAUSES, None):
        try:
            instance = client(project).instances.get(name)
        except pylxd.exceptions.NotFound:
            return
        try:
            if instance.status != "Stopped":
                instance.stop(force=True, wait=True)
            instance.delete(wait=True)
        except pylxd.exceptions.LXDAPIException:
            if pause is None:
                raise
            time.sleep(pause)


def purge(project: str) -> None:
    """Remove every instance of a project."""
    if client().projects.exists(project):
        for instance in client(project).instances.all():
            remove(project, instance.name)
