"""Query all model servers for the state of versions, and wait until they have loaded or unloaded one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.model_records import LoadState, Model, Version
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.cluster.remote import COMMAND_SECONDS
from ops.errors import HostError, OpsError, SeveralHostsError, one_line
from ops.models import server
from ops.models.client import NO_SERVER, Answer, ServingClient

NO_ANSWER = "NO ANSWER"
"""The state of every version on a server that does not answer; the other states are TensorFlow Serving's."""
_LOAD_SECONDS = 180.0
_START_AGAIN_SECONDS = 5.0
# A server that does not answer for this long is down: it may need a minute to start on a busy host.
_DOWN_SECONDS = 120.0
_UNLOAD_SECONDS = 10.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class VersionStatus:
    """The state of a version on one server, and why it is not AVAILABLE there, if known."""

    server: str
    state: str
    errorMessage: str = ""


ServerStates = dict[tuple[str, str], list[VersionStatus]]
"""The state on each server by model and version; only versions that servers should have."""


def query(cluster: ClusterClient, models: Sequence[Model]) -> ServerStates:
    """Query all servers for the versions they should have."""
    deployed = {model.name: [version for version in model.existing_versions if version.loadable] for model in models}
    servers = ServingClient(cluster)

    def states_on(host: str) -> dict[tuple[str, str], VersionStatus]:
        answers = {
            name: servers.request_from(host, "GET", f"/v1/models/{name}") for name, versions in deployed.items() if versions
        }
        return {
            (name, v.name): _version_status(host, v, answers[name]) for name, versions in deployed.items() for v in versions
        }

    with terminal.ProgressLine("asking the model servers"):
        outcome = cluster.fleet.each(servers.names, states_on, COMMAND_SECONDS)
    errors = {host: one_line(error) for host, error in outcome.failures.items()}
    return {
        (name, v.name): [
            VersionStatus(host, NO_ANSWER, errors[host]) if host in errors else outcome.results[host][name, v.name]
            for host in servers.names
        ]
        for name, versions in deployed.items()
        for v in versions
    }


def _version_status(host: str, version: Version, answer: Answer) -> VersionStatus:
    """Return the state of a version from a server's answer about it or its model.

    An answer with another token is about an earlier deployment under the same name.
    """
    status, body = answer
    if status == NO_SERVER:
        return VersionStatus(host, NO_ANSWER, f"{body['error']}: fab predict starts one")
    for each in body["model_version_status"] if status == 200 else []:
        if each["version"] == version.name and each.get("deployment") == version.token:
            return VersionStatus(host, each["state"], each["status"]["error_message"])
    return VersionStatus(host, LoadState.LOADING)  # the server has not polled the bucket yet


def format_ready(states: Sequence[VersionStatus]) -> str:
    """Format the number of servers on which a version is AVAILABLE, as `1 of 2`; empty if none should have it."""
    return f"{sum(each.state == LoadState.AVAILABLE for each in states)} of {len(states)}" if states else ""


def problems(states: ServerStates) -> list[str]:
    """Return a line for each unreachable server, and each version that a server is loading or could not load."""
    silent, failed, loading = set[str](), list[str](), list[str]()
    for (model, version), servers in states.items():
        for each in servers:
            if each.state == NO_ANSWER:
                silent.add(each.errorMessage)
            elif each.errorMessage:
                failed.append(f"version {version} of model {model} on {each.server}: {each.errorMessage}")
            if each.state == LoadState.LOADING:
                loading.append(f"{each.server} is loading version {version} of model {model}")
    return [*sorted(silent), *failed, *loading]


def wait_loaded(cluster: ClusterClient, model: str, version: Version, started: Outcome[str]) -> None:
    """Wait until at least one server, and all that can be started, have loaded a version; else OpsError.

    A server that is down is only reported: it loads the deployed versions when it starts.
    """
    down = dict(started.failures)
    servers = ServingClient(cluster)
    with terminal.ProgressLine(f"{model} {version.name}: loading"):
        outcome = cluster.fleet.each(
            started.results, lambda host: _wait_on(cluster, servers, host, model, version), _LOAD_SECONDS + _DOWN_SECONDS
        )
    for host, error in outcome.failures.items():
        if not isinstance(error, HostError):
            raise error
        down[host] = error
    if not outcome.results:
        raise SeveralHostsError(down) if len(down) > 1 else next(iter(down.values()))
    for error in down.values():
        terminal.note(f"{error}: it loads {model} {version.name} when it is back")


def _wait_on(cluster: ClusterClient, servers: ServingClient, host: str, model: str, version: Version) -> None:
    """Wait until the server on one host has loaded a version; HostError if it is down, OpsError if it cannot."""
    journal = f"fab shell {host} -- journalctl -u scaletier-serving"
    began = last_answer = started = time.monotonic()
    while True:
        try:
            answer = servers.request_from(host, "GET", f"/v1/models/{model}/versions/{version.name}")
        except HostError:
            raise
        except OpsError:  # a server that accepts the request and never answers counts as down
            answer = NO_SERVER, {"error": ""}
        now = time.monotonic()
        if answer[0] != NO_SERVER:
            last_answer = started = now
        elif now - last_answer > _DOWN_SECONDS:
            raise HostError(host, f"has no model server that answers ({journal})")
        elif now - started > _START_AGAIN_SECONDS:
            server.start(cluster, [host])  # an idle server exits, perhaps just before a deployment
            started = now
        current = _version_status(host, version, answer)
        if current.state == LoadState.AVAILABLE:
            return
        if current.state == LoadState.END:
            where = f" on {host}" if len(servers.names) > 1 else ""
            raise OpsError(f"version {version.name} of model {model} cannot be loaded{where}: {current.errorMessage}")
        if now - began > _LOAD_SECONDS:
            raise OpsError(
                f"the model server on {host} has not loaded {model} {version.name} in {_LOAD_SECONDS:.0f} s: {journal}"
            )
        time.sleep(_POLL_SECONDS)


def wait_unloaded(cluster: ClusterClient, model: str, version: str) -> None:
    """Wait at most 10 s until all servers that answer have unloaded a version."""
    servers, deadline = ServingClient(cluster), time.monotonic() + _UNLOAD_SECONDS

    def wait_on(host: str) -> None:
        path = f"/v1/models/{model}/versions/{version}"
        while servers.request_from(host, "GET", path)[0] == 200 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    cluster.fleet.each(servers.names, wait_on, _UNLOAD_SECONDS)
