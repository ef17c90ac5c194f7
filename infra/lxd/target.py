"""The local target's row in the list of targets."""

from __future__ import annotations

from pulumi import Output

from infra.cluster import Cluster
from infra.lxd.api import LxdError
from infra.lxd.cluster import LxdCluster, LxdClusterArgs
from infra.lxd.config import LxdConfig
from infra.lxd.layout import names
from infra.lxd.preflight import preflight
from infra.spec import ClusterSpec
from infra.targets import Target, TargetError
from infra.templates import ROOT


def build(stack: str, spec: ClusterSpec, config: LxdConfig, authorized_key: Output[str]) -> Cluster:
    """A cluster of LXD instances; raises TargetError where this machine cannot have it."""
    own = names(ROOT, stack)
    try:
        found = preflight(spec, config, own)
    except LxdError as error:
        raise TargetError(str(error)) from None
    return LxdCluster("cluster", LxdClusterArgs(spec, config, own, found, authorized_key)).cluster()


LXD = Target(LxdConfig, build)
