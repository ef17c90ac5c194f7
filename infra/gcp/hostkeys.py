"""The hosts' public ssh keys, which Google's guest agent publishes, so that ssh knows each key before it connects.

Source: Compute Engine documentation, "Guest attributes", namespace `hostkeys`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from pulumi import Output

from infra.dynamic import ModuleResource, Props, configuration
from infra.gcp.api import guest_attributes, session

REPLACE_ON_CHANGES = frozenset({"project", "zone"})
_KIND = "ssh-ed25519"
_KEY = re.compile(r"^[A-Za-z0-9+/]+=*$")
_POLL = 2.0


class HostKeys(ModuleResource, module="gcp", name="HostKeys"):
    """The public ssh keys of all hosts, as a resource.

    Inputs: endpoint (of the Compute API), project, zone, hosts (host to instance name), created (host to instance id: a
    recreated host has a new key), timeout (seconds).

    Outputs: hostKeys (host to key), late (the hosts without a key; the next `pulumi up` reads their keys again).
    """

    module_name = __name__
    outputs = ("hostKeys", "late")
    hostKeys: Output[dict[str, str]]
    late: Output[list[str]]


def create(props: Props) -> tuple[str, Props]:
    return f"{props['project']}/{props['zone']}", _outputs(props, read_keys(props, {}, props["timeout"]))


def read(name: str, props: Props) -> Props | None:
    return _outputs(props, read_keys(props, props.get("hostKeys") or {}, 0)) if props.get("late") else props


def update(name: str, old: Props, new: Props) -> Props:
    keys = old.get("hostKeys") or {}
    unchanged = {host: keys[host] for host in new["hosts"] if host in keys and _is_same_instance(host, old, new)}
    return _outputs(new, read_keys(new, unchanged, new["timeout"]))


def _is_same_instance(host: str, old: Props, new: Props) -> bool:
    return all((old.get(key) or {}).get(host) == new[key][host] for key in ("hosts", "created"))


def _outputs(props: Props, keys: Mapping[str, str]) -> Props:
    return {**props, "hostKeys": dict(keys), "late": [host for host in props["hosts"] if host not in keys]}


def read_keys(props: Props, known: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Return the keys by host, without hosts that have none after `seconds`. GcpError if Google refuses the request."""
    keys, deadline, client = dict(known), time.monotonic() + seconds, None
    while missing := [host for host in props["hosts"] if host not in keys]:
        if client and time.monotonic() + _POLL > deadline:
            break
        if client:
            time.sleep(_POLL)
        client = client or session(configuration)
        attributes = guest_attributes(client, props, missing, "hostkeys", "host key")
        # Accept only a well-formed key of the type that our sshd has.
        keys |= {host: f"{_KIND} {key}" for host in missing if _KEY.match(key := attributes[host].get(_KIND, ""))}
    return {host: keys[host] for host in props["hosts"] if host in keys}
