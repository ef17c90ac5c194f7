"""The interface of a target: its configuration, functions that build a cluster, access to its bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulumi import Output

from infra.cluster import ClusterResources
from infra.config import ClusterConfig
from infra.spec import ClusterSpec
from infra.state import StackState


class TargetError(RuntimeError):
    """A refusal of a target before an update; the message is one line with a remedy."""


@dataclass(frozen=True)
class Target:
    """The functions of a target.

    `prepare(stack, spec, config, before)` reads the environment before any resource is declared, raises TargetError for what
    cannot be, and returns the facts `found`; `build(stack, spec, config, found, authorized_key)` declares the resources;
    `read(stack, found, path)` is the present content of a file of the bucket, None if there is none; `create(stack, found,
    path, content)` writes one unless it exists, TargetError if that fails; `settled(spec, found)` is the cluster with the GPUs
    of its machine types; `anew(spec, config, found, before)` names the existing hosts that would be replaced, if that is known
    before. `before` is the stack's state, which is read once a run: two readings may disagree.
    """

    config: type[ClusterConfig]
    prepare: Callable[[str, ClusterSpec, Any, StackState], Any]
    build: Callable[[str, ClusterSpec, Any, Any, Output[str]], ClusterResources]
    read: Callable[[str, Any, str], bytes | None]
    create: Callable[[str, Any, str, bytes], None]
    settled: Callable[[ClusterSpec, Any], ClusterSpec] = lambda spec, _: spec
    anew: Callable[[ClusterSpec, Any, Any, StackState], list[str]] = lambda *_: []
