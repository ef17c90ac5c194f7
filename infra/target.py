"""What a target of clusters has to offer: its configuration, functions that build a cluster, and a way to its bucket."""

from __future__ import annotations

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
