"""The targets by name: each has its own configuration class and one function that builds a cluster.

A new target is a package with those two and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulumi import Output

from infra.cluster import Cluster
from infra.config import ClusterConfig
from infra.spec import ClusterSpec


class TargetError(RuntimeError):
    """What a target refuses before anything is made; the message is one line that says what to do."""


@dataclass(frozen=True)
class Target:
    """`build(stack, spec, config, authorized_key)` makes the resources; it raises TargetError for what can be known before."""

    config: type[ClusterConfig]
    build: Callable[[str, ClusterSpec, Any, Output[str]], Cluster]


def target(name: str) -> Target:
    """The target of that name; only that one is imported, for a provider's library takes seconds."""
    if name == "gcp":
        from infra.gcp.target import GCP

        return GCP
    from infra.lxd.target import LXD

    return LXD
