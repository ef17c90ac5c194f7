"""The client of LXD's or Incus's API; each of its errors becomes one line."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pylxd
import pylxd.exceptions
import requests

from infra.scale_tiers import TargetError

SOCKETS = (
    "/var/lib/lxd/unix.socket",
    "/var/snap/lxd/common/lxd/unix.socket",
    "/run/incus/unix.socket",
    "/var/lib/incus/unix.socket",
)
_local = threading.local()


class LxdError(TargetError):
    """LXD or this machine refused something; the message is one line that says what to do."""


def socket_path() -> str:
    """Return SCALETIER_LXD_SOCKET, else the first of SOCKETS that answers; LxdError if none does, or access is denied."""
    chosen = os.environ.get("SCALETIER_LXD_SOCKET")
    candidates = (chosen,) if chosen else SOCKETS
    paths = [path for path in candidates if Path(path).exists()]
    if not paths:
        raise LxdError(f"LXD does not answer (no socket at {', '.join(candidates)}): start it with `make lxd`")
    denied = [path for path in paths if not os.access(path, os.R_OK | os.W_OK)]
    if listening := next((path for path in paths if path not in denied and _listens(path)), None):
        return listening
    if denied:
        group = Path(denied[0]).group()
        raise LxdError(f"no right to use {denied[0]}: be root, or `sudo usermod -aG {group} $USER` and log in again")
    raise LxdError(f"LXD does not answer at {', '.join(paths)}: start it with `make lxd`")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


def client(project: str = "default") -> pylxd.Client:
    """Return a client of a project, which each thread keeps; LxdError if LXD does not answer."""
    clients: dict[str, pylxd.Client] = _local.__dict__.setdefault("clients", {})
    if project not in clients:
        with errors("LXD"):
            clients[project] = pylxd.Client(endpoint=f"http+unix://{quote(socket_path(), safe='')}", project=project)
    return clients[project]


def hosts_of(project: str) -> list[str]:
    """Return the names of a project's instances; empty if there is no such project."""
    if not client().projects.exists(project):
        return []
    # pylxd takes the name from a URL, with the URL's query.
    return [str(instance.name).partition("?")[0] for instance in client(project).instances.all()]


def start(instance: Any) -> None:
    """Start an instance, or resume a paused one, which LXD 5 refuses to start."""
    (instance.unfreeze if instance.status == "Frozen" else instance.start)(wait=True)


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Turn pylxd's errors into LxdError, whose message begins with `what`."""
    try:
        yield
    except pylxd.exceptions.ClientConnectionFailed:
        raise LxdError("LXD does not answer: start it with `make lxd`") from None
    except pylxd.exceptions.LXDAPIException as error:
        raise LxdError(f"{what}: {_reason(error)}") from None
    except requests.exceptions.ConnectionError:
        raise LxdError(f"{what}: LXD stopped answering: start it with `make lxd`, then try again") from None


def _reason(error: pylxd.exceptions.LXDAPIException) -> str:
    text = " ".join(str(error).split())
    if "no space left" in text.lower():
        return f"the disk is full: free some, or destroy another stack ({text})"
    return text


def is_not_found(error: pylxd.exceptions.LXDAPIException) -> bool:
    """Return True if LXD answered that the object does not exist."""
    return isinstance(error, pylxd.exceptions.NotFound) or "not found" in str(error).lower()


def parse_limit(limit: str) -> int | str:
    """Return a limit as `pulumi up` set it, a number; another, such as `2GiB`, as text, which Pulumi sees as a change."""
    return int(limit) if limit.isdecimal() else limit
