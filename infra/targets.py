"""The targets by name: each has its own configuration class, a function that builds a cluster, and a way to its bucket.

A new target is a package with these and a row here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulumi import Output

from infra.cluster import Cluster
from infra.config import ClusterConfig
from infra.spec import ClusterSpec
from infra.state import State


class TargetError(RuntimeError):
    """What a target refuses before anything is made; the message is one line that says what to do."""


@dataclass(frozen=True)
class Target:
    """What a target is made of.

    `prepare(stack, spec, config, before)` looks at the world before any resource is declared, raises TargetError for what
    cannot be, and returns what it found; `build(stack, spec, config, found, authorized_key)` declares the resources;
    `read(stack, found, path)` is a file of the bucket as it is now, None where there is none to be had;
    `create(stack, found, path, content)` makes one where there is none of that name, TargetError where that cannot be;
    `settled(spec, found)` is the cluster with what the machines that were found bring of themselves;
    `anew(spec, config, found, before)` names the hosts that are there and would be replaced, where that is known before.
    `before` is the stack's state, which is read once a run: two readings may disagree.
    """

    config: type[ClusterConfig]
    prepare: Callable[[str, ClusterSpec, Any, State], Any]
    build: Callable[[str, ClusterSpec, Any, Any, Output[str]], Cluster]
    read: Callable[[str, Any, str], bytes | None]
    create: Callable[[str, Any, str, bytes], None]
    settled: Callable[[ClusterSpec, Any], ClusterSpec] = lambda spec, _: spec
    anew: Callable[[ClusterSpec, Any, Any, State], list[str]] = lambda *_: []


def target(name: str) -> Target:
    """The target of that name; only that one is imported, for a provider's library takes seconds."""
    if name == "gcp":
        # Its objects are hundreds of thousands: to look for garbage among them takes a quarter of the time.
        gc.disable()
        try:
            from infra.gcp.target import GCP
        finally:
            gc.freeze()
            gc.enable()
        return GCP
    from infra.lxd.target import LXD

    return LXD
