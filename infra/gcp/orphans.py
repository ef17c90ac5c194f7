"""List and delete resources at Google that have this stack's names but are not in its state.

A killed `pulumi up` leaves them. `python -m infra.gcp.orphans` prints those of the selected stack, one per line; `--delete`
deletes them. They are hosts, addresses, firewall rules, routers, subnetworks, networks, service accounts and the custom IAM
role. The bucket is never deleted: the next `pulumi up` reuses it. If the state is empty, another person's state may have the
resources: then `--delete` also needs `--state-is-lost`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import google.auth.exceptions
import requests

from infra import backend
from infra.gcp.api import COMPUTE, IAM, TIMEOUT, ApiError, GcpError, ReadConfig, endpoint, get_all, get_json, session
from infra.gcp.config import GcpConfig
from infra.gcp.names import GoogleNames, names_of
from infra.gcp.zones import project
from infra.scale_tiers import SpecError
from infra.state import StackState
from infra.templates import ROOT

_FIREWALLS = "global/firewalls"
# The kinds in the order of deletion, by the path below a project.
_COMPUTE = {
    "aggregated/instances": "instance",
    "aggregated/addresses": "address",
    _FIREWALLS: "firewall",
    "aggregated/routers": "router",
    "aggregated/subnetworks": "subnetwork",
    "global/networks": "network",
}
_ACCOUNTS = "serviceAccounts"
# The states of an instance that runs, or soon does.
_RUNNING = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")
LOST = "--state-is-lost"
_POLL = 2.0
_LIMIT = 300.0


@dataclass(frozen=True)
class Orphan:
    """A resource at Google: its kind, its id in Pulumi's state, its URL, and whether it is a host that runs."""

    kind: str
    id: str
    url: str
    runs: bool = False

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2]


def find_orphans(project: str, names: GoogleNames, recorded_ids: Iterable[str], read_config: ReadConfig) -> list[Orphan]:
    """Return resources that have the stack's names and whose ids are not in its state, in the order of deletion."""
    client, recorded = session(read_config), frozenset(recorded_ids)
    projects = {kind: [project] for kind in _COMPUTE} | {_FIREWALLS: _firewall_projects(project, read_config)}
    resources = [item for kind in _COMPUTE for owner in projects[kind] for item in _compute(client, owner, kind, read_config)]
    resources += _accounts(client, project, read_config)
    resources = [resource for resource in resources if f"{resource.name}-".startswith(f"{names.prefix}-")]
    resources += _roles(client, project, names.role_title, read_config)
    return [resource for resource in resources if resource.id not in recorded]


def delete(resources: Iterable[Orphan], read_config: ReadConfig) -> None:
    """Delete resources in their order, one kind after the other; GcpError if Google refuses, or one exists after 5 minutes."""
    client = session(read_config)
    for kind, group in groupby(resources, attrgetter("kind")):
        items = list(group)
        for item in items:
            try:
                answer = client.delete(item.url, timeout=TIMEOUT)
            except (requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
                raise GcpError(f"{item.kind} {item.name} cannot be deleted ({type(error).__name__}): try again") from None
            if not answer.ok and answer.status_code != requests.codes.not_found:
                raise GcpError(
                    f"{item.kind} {item.name} cannot be deleted: HTTP {answer.status_code} {answer.text.strip()[:300]}"
                )
        deadline = time.monotonic() + _LIMIT
        while any(_exists(client, item) for item in items):
            if time.monotonic() > deadline:
                raise GcpError(f"{kind} {', '.join(item.name for item in items)}: not gone after {_LIMIT:.0f} s")
            time.sleep(_POLL)


def _exists(client: requests.Session, item: Orphan) -> bool:
    try:
        return not get_json(client, item.url).get("deleted")  # Google still returns a deleted role for weeks
    except ApiError as error:
        if error.status == requests.codes.not_found:
            return False
        raise


def _firewall_projects(project: str, read_config: ReadConfig) -> list[str]:
    """Return the stack's project, and the project of the configured subnet if the stack has firewall rules there."""
    values = {key: value for key in ("subnetwork", "firewall") if (value := read_config(f"scaletier:{key}"))}
    config = GcpConfig.parse(values)
    shared = config.subnetwork.split("/")[1:2] if config.subnetwork and config.firewall else []
    return list(dict.fromkeys([project, *shared]))


def _compute(client: requests.Session, project: str, path: str, read_config: ReadConfig) -> Iterator[Orphan]:
    base, kind = endpoint(COMPUTE, read_config), path.rpartition("/")[2]
    for entry in get_all(client, f"{base}projects/{project}/{path}"):
        for item in entry[1].get(kind, []) if isinstance(entry, tuple) else [entry]:
            id_ = str(item["selfLink"]).partition("/compute/v1/")[2]
            yield Orphan(_COMPUTE[path], id_, f"{base}{id_}", item.get("status") in _RUNNING)


def _accounts(client: requests.Session, project: str, read_config: ReadConfig) -> Iterator[Orphan]:
    base = endpoint(IAM, read_config)
    for item in get_all(client, f"{base}projects/{project}/{_ACCOUNTS}", "accounts"):
        yield Orphan("service account", str(item["name"]), f"{base}{item['name']}")


def _roles(client: requests.Session, project: str, title: str, read_config: ReadConfig) -> Iterator[Orphan]:
    base = endpoint(IAM, read_config)
    for item in get_all(client, f"{base}projects/{project}/roles", "roles"):
        if item.get("title") == title:
            yield Orphan("role", str(item["name"]), f"{base}{item['name']}")


def _pulumi(*arguments: str) -> Any:
    answer = backend.run_pulumi(ROOT, *arguments)
    return json.loads(answer) if answer.startswith("{") else answer.strip()


def configuration() -> ReadConfig:
    """Return the configuration of the selected stack; BackendError if Pulumi does not return it."""
    config = _pulumi("config", "--json", "--show-secrets")
    return lambda key: (config.get(key) or {}).get("value")


def of_stack(read_config: ReadConfig) -> tuple[list[Orphan], bool]:
    """Return the orphans of the selected stack, and whether its state has any resource at Google.

    If it has none, another state may have the resources with the stack's names.
    """
    project_id = project(lambda key: read_config(f"gcp:{key}"), os.environ)
    resources = _pulumi("stack", "export").get("deployment", {}).get("resources") or []
    state = StackState({str(item.get("urn")): {"outputs": {}, **item} for item in resources})
    names = names_of(project_id, _pulumi("stack", "--show-name"), state)
    orphans = find_orphans(project_id, names, [str(item.get("id")) for item in resources], read_config)
    return orphans, any(str(item.get("type")).startswith("gcp:") for item in resources)


def main(arguments: list[str]) -> None:
    """List the resources, and delete them with `--delete`; report an error in one line."""
    try:
        read_config = configuration()
        resources, has_state = of_stack(read_config)
        if "--delete" in arguments and not has_state and LOST not in arguments:
            raise GcpError(
                f"this stack has nothing at Google in its state, {backend.url(ROOT)}, so another state may have resources of "
                f"its name: nothing was deleted. If none has, --delete {LOST}"
            )
        if "--delete" in arguments:
            delete(resources, read_config)
    except (GcpError, SpecError, backend.BackendError) as error:
        sys.exit(f"leftovers: {error}")
    for resource in resources:
        print(f"{'deleted' if '--delete' in arguments else 'left'}: {resource.kind} {resource.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
