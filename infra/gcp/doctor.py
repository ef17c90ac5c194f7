"""Checks of a cluster on Google Cloud: credentials, hosts that do not run, resources in no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra import backend
from infra.findings import Finding, fail, ok, warning
from infra.gcp.api import ApiError, get_json, session
from infra.gcp.orphans import configuration, of_stack
from infra.templates import ROOT

Inventory = Mapping[str, Any] | None


def hosts(inventory: Inventory) -> Iterator[Finding]:
    """Check that the instances of job hosts exist and run."""
    if inventory is None or not inventory.get("power"):
        return
    client, running, count = session(configuration()), 0, 0
    for host in inventory["hosts"]:
        if host.get("start") is None:
            continue
        count += 1
        instance = host["start"].rpartition("/")[0]
        try:
            status = get_json(client, f"{inventory['power']['operatorUrl'].rstrip('/')}/{instance}")["status"]
        except ApiError as error:
            if error.status != 404:
                raise
            yield fail(f"host {host['name']} is gone", "pulumi up")
            continue
        running += status == "RUNNING"
        if status != "RUNNING":
            yield fail(f"host {host['name']} is {status}", "pulumi up, or fab train --start-hosts")
    if running == count:
        yield ok(f"all {running} job hosts run")


def orphans(_: Inventory) -> Iterator[Finding]:
    """Find resources with the stack's names that are not in its state; one warning if another state may have them."""
    resources, has_state = of_stack(configuration())
    if resources and not has_state:
        yield warning(
            f"{len(resources)} resources at Google have the stack's name, and its state, {backend.url(ROOT)}, has none: "
            "another state may have them",
            f"set {backend.URL} to that state; python -m infra.gcp.orphans lists them",
        )
        return
    command = "python -m infra.gcp.orphans"
    # One command deletes them all, so list them first if a host runs.
    any_runs = any(item.runs for item in resources)
    remedy = f"{command} lists them; if nobody needs them, {command} --delete" if any_runs else f"{command} --delete"
    for item in resources:
        yield warning(f"{item.kind} {item.name} is in no state{', and runs' if item.runs else ''}", remedy)
    if not resources:
        yield ok("all resources with the stack's names are in its state")


CHECKS = {"hosts": hosts, "orphans": orphans}
