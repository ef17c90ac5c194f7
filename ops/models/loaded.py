"""Waiting until the servers have loaded a deployment, or dropped it: all at once, and each for itself."""

from __future__ import annotations

import time

from hosts.serving.records import LoadState
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.fanout import Outcome
from ops.errors import HostError, HostsError, OpsError
from ops.models import reach, server

_LOAD_SECONDS = 180.0
_AGAIN_SECONDS = 5.0
# A server that does not answer for this long is down: it may need a minute to start on a busy host.
_DOWN_SECONDS = 120.0
_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.2


def everywhere(cluster: Cluster, name: str, version: str, token: str, started: Outcome[str]) -> None:
    """Wait until all servers that can be started, and at least one, have loaded this deployment.

    A server that is down is reported and waited for only briefly: it loads the deployed versions when it comes back.

    Raises:
        OpsError: if a server cannot load it.
    """
    down = dict(started.failures)
    servers = reach.ServingClient(cluster)
    with terminal.Step(f"{name} {version}: loading"):
        outcome = cluster.fleet.each(
            started.results,
            lambda host: _on(cluster, servers, host, name, version, token),
            _LOAD_SECONDS + _DOWN_SECONDS,
        )
    for host, error in outcome.failures.items():
        if not isinstance(error, HostError):
            raise error
        down[host] = error
    if not outcome.results:
        raise HostsError(down) if len(down) > 1 else next(iter(down.values()))
    for error in down.values():
        terminal.note(f"{error}: it loads {name} {version} when it is back")


def _on(cluster: Cluster, servers: reach.ServingClient, host: str, name: str, version: str, token: str) -> None:
    """Wait until one server has loaded it.

    Raises:
        HostError: if the server is down.
        OpsError: if it is up, and the version cannot be loaded.
    """
    journal = f"fab shell {host} -- journalctl -u scaletier-serving"
    began = last_answer = started = time.monotonic()
    while True:
        status, body = _asked(servers, host, f"/v1/models/{name}/versions/{version}")
        now = time.monotonic()
        if status != reach.NOBODY:
            last_answer = started = now
        elif now - last_answer > _DOWN_SECONDS:
            raise HostError(host, f"has no model server that answers ({journal})")
        elif now - started > _AGAIN_SECONDS:
            server.start(cluster, [host])  # it had nothing to serve for long, and ended just when something came
            started = now
        status_entry = body["model_version_status"][0] if status == 200 else {}
        if status_entry.get("deployment") == token:  # else it has not looked yet
            if status_entry["state"] == LoadState.AVAILABLE:
                return
            if status_entry["state"] == LoadState.END:
                where = f" on {host}" if len(servers.names) > 1 else ""
                raise OpsError(
                    f"version {version} of model {name} cannot be loaded{where}: {status_entry['status']['error_message']}"
                )
        if now - began > _LOAD_SECONDS:
            raise OpsError(f"the model server on {host} has not loaded {name} {version} in {_LOAD_SECONDS:.0f} s: {journal}")
        time.sleep(_POLL_SECONDS)


def _asked(servers: reach.ServingClient, host: str, path: str) -> reach.Answer:
    """Return a server's answer; one that accepts the request and never answers counts as down."""
    try:
        return servers.ask_one(host, "GET", path)
    except HostError:
        raise
    except OpsError:
        return reach.NOBODY, {}


def nowhere(cluster: Cluster, name: str, version: str) -> None:
    """Wait until all servers that answer have unloaded it, for a limited time."""
    servers, deadline = reach.ServingClient(cluster), time.monotonic() + _GONE_SECONDS

    def gone(host: str) -> None:
        path = f"/v1/models/{name}/versions/{version}"
        while servers.ask_one(host, "GET", path)[0] == 200 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    cluster.fleet.each(servers.names, gone, _GONE_SECONDS)
