"""The local target's row in the list of targets."""

from __future__ import annotations

from contextlib import suppress

import pulumi
import pylxd.exceptions
from pulumi import Output

from infra.cluster import ClusterResources
from infra.dynamic import changes
from infra.lxd import host
from infra.lxd.api import LxdError, errors
from infra.lxd.cluster import LxdCluster, LxdClusterArgs, host_props
from infra.lxd.config import LxdConfig
from infra.lxd.layout import BUCKET
from infra.lxd.preflight import PreflightResult, preflight
from infra.lxd.seal import running
from infra.spec import ClusterSpec
from infra.state import StackState
from infra.target import Target, TargetError


def prepare(stack: str, spec: ClusterSpec, config: LxdConfig, before: StackState) -> PreflightResult:
    """Return this machine's resources for the stack.

    Raises:
        TargetError: one is missing.
    """
    try:
        facts = preflight(stack, spec, config, before)
    except LxdError as error:
        raise TargetError(str(error)) from None
    for warning in facts.warnings:
        pulumi.log.warn(warning)
    return facts


def build(
    stack: str, spec: ClusterSpec, config: LxdConfig, found: PreflightResult, authorized_key: Output[str]
) -> ClusterResources:
    """Return a cluster of LXD instances."""
    return LxdCluster("cluster", LxdClusterArgs(stack, spec, config, found, authorized_key)).cluster()


def anew(spec: ClusterSpec, config: LxdConfig, found: PreflightResult, before: StackState) -> list[str]:
    """Return the hosts that need replacement, since a property differs that no host can change."""
    there = before.of("lxd:Host")
    key = next((str(outputs["publicKey"]) for outputs in before.of("operator:OperatorKey").values()), "")
    expected = host_props(spec, config, found, key)
    return [
        replica.name
        for replica, props in expected.items()
        if replica.name in there and changes(there[replica.name], props) & host.REPLACE
    ]


def read(stack: str, found: PreflightResult, path: str) -> bytes | None:
    """Return a file of the stack's bucket, through the first running host."""
    with suppress(LxdError), errors("LXD"):
        if (through := running(found.names.project)) is not None:
            content: bytes = through.files.get(f"{BUCKET}/{path}")
            return content
    return None


def create(stack: str, found: PreflightResult, path: str, content: bytes) -> None:
    """Write a file of the stack's bucket unless it exists, through the first running host."""
    try:
        with errors("LXD"):
            if (through := running(found.names.project)) is None:
                raise LxdError("no host of it runs")
            try:
                through.files.get(f"{BUCKET}/{path}")
            except pylxd.exceptions.NotFound:
                through.files.put(f"{BUCKET}/{path}", content, mode=0o644)
    except LxdError as error:
        raise TargetError(f"the bucket does not take {path} ({error}): try again") from None


LXD = Target(LxdConfig, prepare, build, read, create, anew=anew)
