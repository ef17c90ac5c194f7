"""The hosts' ssh keys, as Google's guest agent publishes them: no key is accepted unseen.

Source: Compute Engine documentation, "Guest attributes", namespace `hostkeys`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pulumi import Output

from infra.dynamic import ModuleResource, Props
from infra.gcp.api import configure, configured, session
from infra.gcp.guest import ask, attributes

__all__ = ["REPLACE", "HostKeys", "configure", "create", "delete", "read", "read_keys", "update"]

REPLACE = frozenset({"project", "zone"})
_KIND = "ssh-ed25519"
_KEY = re.compile(r"^[A-Za-z0-9+/]+=*$")
_POLL = 2.0
_AT_ONCE = 16


class HostKeys(ModuleResource, module="gcp", name="HostKeys"):
    """The ssh keys of all hosts, as a resource.

    Inputs: endpoint (of the Compute API), project, zone, hosts (the name for ssh to the instance's), created (the same names
    to the instances' ids: a recreated host has a new key), timeout (seconds).

    Outputs: hostKeys (the name for ssh to the key), late (names without a key; the next `pulumi up` reads them again).
    """

    lifecycle = __name__
    outputs = ("hostKeys", "late")
    hostKeys: Output[dict[str, str]]
    late: Output[list[str]]


def create(props: Props) -> tuple[str, Props]:
    return f"{props['project']}/{props['zone']}", _outputs(props, read_keys(props, {}, props["timeout"]))


def read(name: str, props: Props) -> Props | None:
    return _outputs(props, read_keys(props, props.get("hostKeys") or {}, 0)) if props.get("late") else props


def update(name: str, old: Props, new: Props) -> Props:
    keys = old.get("hostKeys") or {}
    same = {host: keys[host] for host in new["hosts"] if host in keys and _same(host, old, new)}
    return _outputs(new, read_keys(new, same, new["timeout"]))


def delete(name: str, props: Props) -> None:
    """Do nothing: the keys are the hosts' own."""


def _same(host: str, old: Props, new: Props) -> bool:
    return all((old.get(key) or {}).get(host) == new[key][host] for key in ("hosts", "created"))


def _outputs(props: Props, keys: Mapping[str, str]) -> Props:
    return {**props, "hostKeys": dict(keys), "late": [host for host in props["hosts"] if host not in keys]}


def read_keys(props: Props, known: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Return the keys of all hosts; a host without one at the time limit is left out.

    Requests run in parallel until all hosts have a key.

    Raises:
        GcpError: Google refuses to answer.
    """
    keys, deadline = dict(known), time.monotonic() + seconds
    missing = [host for host in props["hosts"] if host not in keys]
    if not missing:
        return keys
    client = session(configured())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while True:
            answers = pool.map(lambda host: parse(ask(client, props, props["hosts"][host], "hostkeys", "host key")), missing)
            keys |= {host: key for host, key in zip(missing, answers, strict=True) if key}
            missing = [host for host in missing if host not in keys]
            if not missing or time.monotonic() + _POLL > deadline:
                return {host: keys[host] for host in props["hosts"] if host in keys}
            time.sleep(_POLL)


def parse(answer: Mapping[str, Any] | None) -> str | None:
    """Return the known_hosts line of an answer of getGuestAttributes.

    It is None if there is no key of our sshd's type.
    """
    value = attributes(answer).get(_KIND, "")
    return f"{_KIND} {value}" if _KEY.match(value) else None
