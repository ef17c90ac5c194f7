"""All hosts are what their start-up script makes of them: one resource, so that hosts become it side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import requests

from infra.dynamic import ModuleResource, Props
from infra.gcp.api import GcpError, configure, configured, get_json, session
from infra.gcp.guest import ask, attributes, url

__all__ = ["REPLACE", "Ready", "configure", "create", "delete", "read", "update"]

REPLACE = frozenset({"project", "zone"})
_NOTHING = "nothing said yet"
_OTHER = "has not run its new start-up script yet"
_READY, _FAILED = "ready", "failed: "
_POLL = 2.0
_AT_ONCE = 16
_LAST_LINES = 3


class Ready(ModuleResource, module="gcp", name="Ready"):
    """Inputs: endpoint (of the Compute API), project, zone, hosts (name to the instance's), created (name to the instance's id:
    a host made anew begins anew), scripts (name to the version of its start-up script, which hosts run again when it has
    changed), timeout (seconds; 0 waits for nobody).
    """

    lifecycle = __name__


def create(props: Props) -> tuple[str, Props]:
    """Waits until every host has said how it ended; GcpError that names those that are not ready, and why."""
    client, deadline, told = session(configured()), time.monotonic() + props["timeout"], ""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while props["timeout"]:
            states = dict(zip(props["hosts"], pool.map(lambda host: _state(client, props, host), props["hosts"]), strict=True))
            late = {host: said for host, said in states.items() if said != _READY}
            if (now := progress(states)) != told:
                print(now, flush=True)  # the engine shows a provider's output beside the resource
                told = now
            if not late:
                break
            if all(said.startswith(_FAILED) for said in late.values()) or time.monotonic() > deadline:
                raise GcpError(f"{why(late, props['timeout'])}; {_last_words(client, props, next(iter(late)))}")
            time.sleep(_POLL)
    return "ready", props


def progress(states: Mapping[str, str]) -> str:
    """One line of who is how far; pure."""
    late = [f"{host} {said}" for host, said in states.items() if said != _READY]
    return f"{len(states) - len(late)} of {len(states)} hosts are ready{': ' if late else ''}{', '.join(late)}"


def why(late: Mapping[str, str], seconds: int) -> str:
    """Who is not ready and why, in one line; pure."""
    failed = all(said.startswith(_FAILED) for said in late.values())
    return f"not ready{'' if failed else f' after {seconds} s'}: {', '.join(f'{host} {said}' for host, said in late.items())}"


def _state(client: requests.Session, props: Props, host: str) -> str:
    return state(attributes(ask(client, props, props["hosts"][host], "scaletier", "state")), props["scripts"][host])


def state(said: Mapping[str, str], script: str) -> str:
    """How far a host is with this version of its start-up script, by its guest attributes; pure."""
    found = said.get("state", _NOTHING)
    over = found == _READY or found.startswith(_FAILED)
    return _OTHER if over and said.get("script") != script else found


def _last_words(client: requests.Session, props: Props, host: str) -> str:
    """The end of a host's serial output, where its start-up script's lines are too."""
    instance = props["hosts"][host]
    again = f"mend it, then `gcloud compute instances reset {instance} --zone {props['zone']}` and `pulumi up`"
    try:
        lines = str(get_json(client, url(props, instance, "serialPort")).get("contents", "")).strip().splitlines()
    except GcpError:
        lines = []
    return f"{again}; {host}'s serial output ends: {' / '.join(lines[-_LAST_LINES:])}" if lines else again


def read(name: str, props: Props) -> Props | None:
    """None where a host says by now that it is not ready: an update then waits for it again."""
    client = session(configured())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = list(pool.map(lambda host: _state(client, props, host), props["hosts"]))
    return props if all(said in (_READY, _NOTHING) for said in states) else None


def update(name: str, old: Props, new: Props) -> Props:
    return create(new)[1]


def delete(name: str, props: Props) -> None:
    """Nothing outlives the hosts."""
