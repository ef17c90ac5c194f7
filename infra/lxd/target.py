"""The local target's row in the list of targets."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pylxd.exceptions
from pulumi import Output

from infra.cluster import Cluster
from infra.lxd.api import LxdError, client, errors, hosts_of
from infra.lxd.cluster import LxdCluster, LxdClusterArgs
from infra.lxd.config import LxdConfig
from infra.lxd.layout import BUCKET, names
from infra.lxd.preflight import Found, preflight
from infra.spec import ClusterSpec
from infra.targets import Target, TargetError
from infra.templates import ROOT


def prepare(stack: str, spec: ClusterSpec, config: LxdConfig) -> Found:
    """What this machine has for the stack; raises TargetError where it cannot have it."""
    try:
        return preflight(spec, config, names(ROOT, stack))
    except LxdError as error:
        raise TargetError(str(error)) from None


def build(stack: str, spec: ClusterSpec, config: LxdConfig, found: Found, authorized_key: Output[str]) -> Cluster:
    """A cluster of LXD instances."""
    return LxdCluster("cluster", LxdClusterArgs(spec, config, names(ROOT, stack), found, authorized_key)).cluster()


def read(stack: str, found: Found, path: str) -> bytes | None:
    """A file of the stack's bucket, through the first host that runs."""
    with suppress(LxdError), errors("LXD"):
        if (host := _running(stack)) is not None:
            content: bytes = host.files.get(f"{BUCKET}/{path}")
            return content
    return None


def create(stack: str, found: Found, path: str, content: bytes) -> None:
    """A file of the stack's bucket where there is none of that name, through the first host that runs."""
    try:
        with errors("LXD"):
            if (host := _running(stack)) is None:
                raise LxdError("no host of it runs")
            try:
                host.files.get(f"{BUCKET}/{path}")
            except pylxd.exceptions.NotFound:
                host.files.put(f"{BUCKET}/{path}", content, mode=0o644)
    except LxdError as error:
        raise TargetError(f"the bucket does not take {path} ({error}): try again") from None


def _running(stack: str) -> Any:
    project = names(ROOT, stack).project
    instances = (client(project).instances.get(name) for name in hosts_of(project))
    return next((instance for instance in instances if instance.status == "Running"), None)


LXD = Target(LxdConfig, prepare, build, read, create)
