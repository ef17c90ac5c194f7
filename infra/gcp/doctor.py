"""What may be wrong with a cluster on Google Cloud: credentials, hosts that do not run, and what is in no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infra import backend
from infra.findings import Finding, broken, ok, warning
from infra.gcp.api import ApiError, get_json, session
from infra.gcp.leftovers import configuration, of_stack
from infra.templates import ROOT

Inventory = Mapping[str, Any] | None
Check = Callable[[Inventory], Iterator[Finding]]


def hosts(inventory: Inventory) -> Iterator[Finding]:
    """Instances that are not there, or do not run, by the Compute API."""
    if inventory is None or not inventory.get("power"):
        return
    client, running, asked = session(configuration()), 0, 0
    for host in inventory["hosts"]:
        if host.get("start") is None:
            continue
        asked += 1
        instance = host["start"].rpartition("/")[0]
        try:
            status = get_json(client, f"{inventory['power']['operatorUrl'].rstrip('/')}/{instance}")["status"]
        except ApiError as error:
            if error.status != 404:
                raise
            yield broken(f"host {host['name']} is gone", "pulumi up")
            continue
        running += status == "RUNNING"
        if status != "RUNNING":
            yield broken(f"host {host['name']} is {status}", "pulumi up, or fab train --wake")
    if running == asked:
        yield ok(f"all {running} hosts run that jobs are for")


def belongings(_: Inventory) -> Iterator[Finding]:
    """Find what bears the stack's names and is not in its state; what another state may have is not called left over."""
    found, known = of_stack(configuration())
    if found and not known:
        yield warning(
            f"{len(found)} resources at Google bear the stack's name, and its state, {backend.url(ROOT)}, has none: "
            "another state may have them",
            f"set {backend.URL} to that state; python -m infra.gcp.leftovers lists them",
        )
        return
    yield from (warning(f"{left.kind} {left.name} is in no state", "python -m infra.gcp.leftovers --delete") for left in found)
    if not found:
        yield ok("all that bears the stack's names is in its state")


CHECKS: Mapping[str, Check] = {"hosts": hosts, "orphans": belongings}
