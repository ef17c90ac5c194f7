"""The targets by name: each has its own configuration class, a function that builds a cluster, and a way to its bucket.

A new target is a package with these and a row here.
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
    """What a target is made of.

    `prepare(stack, spec, config)` looks at the world before any resource is declared, raises TargetError for what cannot be,
    and returns what it found; `build(stack, spec, config, found, authorized_key)` declares the resources;
    `read(stack, found, path)` is a file of the bucket as it is now, None where there is none to be had;
    `create(stack, found, path, content)` makes one where there is none of that name, TargetError where that cannot be.
    """

    config: type[ClusterConfig]
    prepare: Callable[[str, ClusterSpec, Any], Any]
    build: Callable[[str, ClusterSpec, Any, Any, Output[str]], Cluster]
    read: Callable[[str, Any, str], bytes | None]
    create: Callable[[str, Any, str, bytes], None]


def target(name: str) -> Target:
    """The target of that name; only that one is imported, for a provider's library takes seconds."""
    if name == "gcp":
        from infra.gcp.target import GCP

        return GCP
    from infra.lxd.target import LXD

    return LXD
