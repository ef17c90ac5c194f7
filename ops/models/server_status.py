"""The deployed models' state on each server, polled in parallel: the bucket has the desired state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hosts.serving.records import LoadState, Model, Version
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.remote import LOOK_SECONDS
from ops.errors import one_line
from ops.models.reach import NOBODY, ServingClient

SILENT = "NO ANSWER"
"""The state of every version on a server that does not answer; the others are TensorFlow Serving's."""


@dataclass(frozen=True)
class OnServer:
    """A version on one server, and why it is not AVAILABLE there, where that is known."""

    server: str
    state: str
    errorMessage: str = ""


Seen = dict[tuple[str, str], list[OnServer]]
"""States by model and version, in the order of the servers, without versions that no server should have."""


def look(cluster: Cluster, models: Sequence[Model]) -> Seen:
    """Query all servers for the versions they should have."""
    deployed = [(model.name, version) for model in models for version in model.there if version.wanted]
    servers = ServingClient(cluster)
    with terminal.Step("asking the model servers"):
        outcome = cluster.fleet.each(servers.names, lambda name: _said(servers, name, deployed), LOOK_SECONDS)
        failed = {name: one_line(error) for name, error in outcome.failures.items()}
    return {
        (model, version.name): [
            OnServer(name, SILENT, failed[name]) if name in failed else outcome.results[name][model, version.name]
            for name in servers.names
        ]
        for model, version in deployed
    }


def _said(servers: ServingClient, name: str, wanted: Sequence[tuple[str, Version]]) -> dict[tuple[str, str], OnServer]:
    """Return one server's state of all its models."""
    answers: dict[str, tuple[int, Any]] = {}
    for model, _ in wanted:
        if model not in answers:
            answers[model] = servers.ask_one(name, "GET", f"/v1/models/{model}")
    return {(model, version.name): _seen_on(name, version, *answers[model]) for model, version in wanted}


def _seen_on(name: str, version: Version, status: int, said: Any) -> OnServer:
    if status == NOBODY:
        return OnServer(name, SILENT, f"{said['error']}: fab predict brings it there")
    here = said["model_version_status"] if status == 200 else []
    for each in here:
        if each["version"] == version.name and each.get("deployment") == version.token:
            return OnServer(name, each["state"], each["status"]["error_message"])
    return OnServer(name, LoadState.LOADING)  # it has not looked yet


def told(seen: Sequence[OnServer]) -> str:
    """Format on how many servers a version answers, `1 of 2`; empty if none should have it."""
    return f"{sum(each.state == LoadState.AVAILABLE for each in seen)} of {len(seen)}" if seen else ""


def complaints(seen: Seen) -> list[str]:
    """Return a line for each silent server, and each version that a server is loading or could not load."""
    silent = {each.errorMessage for servers in seen.values() for each in servers if each.state == SILENT}
    broken = [
        f"version {version} of model {model} on {each.server}: {each.errorMessage}"
        for (model, version), servers in seen.items()
        for each in servers
        if each.state != SILENT and each.errorMessage
    ]
    loading = [
        f"{each.server} is loading version {version} of model {model}"
        for (model, version), servers in seen.items()
        for each in servers
        if each.state == LoadState.LOADING
    ]
    return [*sorted(silent), *broken, *loading]
