"""What carries this stack's names at Google's and is in no state: an `up` that was killed, or that Google answered too late.

`python -m infra.gcp.leftovers` prints it, a line each, for the selected stack; with `--delete` it goes. It is nothing but
hosts, who keep nothing, network and accounts: the bucket is taken up again by `pulumi up` itself. Where the state knows nothing
at all, it may be the stack of somebody else whose state is elsewhere: then it goes with `--state-is-lost` alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import google.auth.exceptions
import requests

from infra import backend
from infra.gcp.api import COMPUTE, IAM, TIMEOUT, ApiError, GcpError, Get, endpoint, get_all, get_json, session
from infra.gcp.names import names
from infra.gcp.zones import project
from infra.spec import SpecError
from infra.templates import ROOT

# In the order in which they can go, by the path below a project: what one of them is called.
_COMPUTE = {
    "aggregated/instances": "instance",
    "aggregated/addresses": "address",
    "global/firewalls": "firewall",
    "aggregated/routers": "router",
    "aggregated/subnetworks": "subnetwork",
    "global/networks": "network",
}
_ACCOUNTS = "serviceAccounts"
LOST = "--state-is-lost"
_POLL = 2.0
_LIMIT = 300.0


@dataclass(frozen=True)
class Left:
    """Something at Google's: its kind, its id as the provider has it, and where it is deleted."""

    kind: str
    id: str
    url: str

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2]


def leftovers(project: str, stack: str, known: Iterable[str], get: Get) -> list[Left]:
    """What bears the stack's names and is none of the ids that its state knows, in the order in which it can go."""
    client, prefix, state = session(get), names(project, stack).prefix, frozenset(known)
    found = [left for kind in _COMPUTE for left in _compute(client, project, kind, get)]
    found += _accounts(client, project, get)
    return [left for left in found if f"{left.name}-".startswith(f"{prefix}-") and left.id not in state]


def delete(found: Iterable[Left], get: Get) -> None:
    """Takes them away, one kind after the other; GcpError for what Google refuses, or does not do in five minutes."""
    client = session(get)
    by_kind: dict[str, list[Left]] = {}
    for left in found:
        by_kind.setdefault(left.kind, []).append(left)
    for kind, all_of_it in by_kind.items():
        for left in all_of_it:
            try:
                answer = client.delete(left.url, timeout=TIMEOUT)
            except (requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
                raise GcpError(f"{left.kind} {left.name} cannot be deleted ({type(error).__name__}): try again") from None
            if not answer.ok and answer.status_code != requests.codes.not_found:
                raise GcpError(
                    f"{left.kind} {left.name} cannot be deleted: HTTP {answer.status_code} {answer.text.strip()[:300]}"
                )
        deadline = time.monotonic() + _LIMIT
        while any(_there(client, left) for left in all_of_it):
            if time.monotonic() > deadline:
                raise GcpError(f"{kind} {', '.join(left.name for left in all_of_it)}: not gone after {_LIMIT:.0f} s")
            time.sleep(_POLL)


def _there(client: requests.Session, left: Left) -> bool:
    try:
        get_json(client, left.url)
    except ApiError as error:
        if error.status == requests.codes.not_found:
            return False
        raise
    return True


def _compute(client: requests.Session, project: str, path: str, get: Get) -> Iterator[Left]:
    base, kind = endpoint(COMPUTE, get), path.rpartition("/")[2]
    for found in get_all(client, f"{base}projects/{project}/{path}"):
        for item in found[1].get(kind, []) if isinstance(found, tuple) else [found]:
            id_ = str(item["selfLink"]).partition("/compute/v1/")[2]
            yield Left(_COMPUTE[path], id_, f"{base}{id_}")


def _accounts(client: requests.Session, project: str, get: Get) -> Iterator[Left]:
    base = endpoint(IAM, get)
    for item in get_all(client, f"{base}projects/{project}/{_ACCOUNTS}", "accounts"):
        yield Left("service account", str(item["name"]), f"{base}{item['name']}")


def _pulumi(*arguments: str) -> Any:
    answer = backend.ask(ROOT, *arguments)
    return json.loads(answer) if answer.startswith("{") else answer.strip()


def configuration() -> Get:
    """The configuration of the stack that is selected; BackendError where Pulumi does not say."""
    config = _pulumi("config", "--json", "--show-secrets")
    return lambda key: (config.get(key) or {}).get("value")


def of_stack(get: Get) -> tuple[list[Left], bool]:
    """Return what is left of the stack that is selected, and whether its state has anything at Google.

    If it has nothing, what bears the stack's name may be in another state.
    """
    own = project(lambda key: get(f"gcp:{key}"), os.environ)
    resources = _pulumi("stack", "export").get("deployment", {}).get("resources") or []
    found = leftovers(own, _pulumi("stack", "--show-name"), [str(item.get("id")) for item in resources], get)
    return found, any(str(item.get("type")).startswith("gcp:") for item in resources)


def main(arguments: list[str]) -> None:
    """Lists, and with `--delete` takes away; what goes wrong is one line."""
    try:
        get = configuration()
        found, known = of_stack(get)
        if "--delete" in arguments and not known and LOST not in arguments:
            raise GcpError(
                f"this stack has nothing at Google in its state, {backend.url(ROOT)}, so another state may have what bears its "
                f"name: nothing was deleted. If none has, --delete {LOST}"
            )
        if "--delete" in arguments:
            delete(found, get)
    except (GcpError, SpecError, backend.BackendError) as error:
        sys.exit(f"leftovers: {error}")
    for left in found:
        print(f"{'deleted' if '--delete' in arguments else 'left'}: {left.kind} {left.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
