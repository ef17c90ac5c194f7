"""Readiness of all hosts after their start-up scripts: one resource for all, so that hosts boot in parallel."""

from __future__ import annotations

import time
from collections.abc import Mapping

import requests

from infra.dynamic import ModuleResource, Props, configuration
from infra.gcp.api import GcpError, get_json, guest_attributes, instance_url, session

REPLACE_ON_CHANGES = frozenset({"project", "zone"})
_NO_STATE = "nothing said yet"
_OLD_SCRIPT = "has not run its new start-up script yet"
_READY, _FAILED = "ready", "failed: "
_POLL = 2.0
_LAST_LINES = 3


class HostsReady(ModuleResource, module="gcp", name="Ready"):
    """Readiness of all hosts, as a resource.

    Inputs: endpoint (of the Compute API), project, zone, hosts (host to instance name), created (host to instance id: a
    recreated host is not ready), scripts (host to the version of its start-up script; hosts run a changed script), timeout
    (seconds; 0 does not wait).
    """

    module_name = __name__


def create(props: Props) -> tuple[str, Props]:
    """Wait until every host reports that it is ready; GcpError names the hosts that are not, and why."""
    client, deadline, printed = session(configuration), time.monotonic() + props["timeout"], ""
    while props["timeout"]:
        states = _states(client, props)
        late = {host: status for host, status in states.items() if status != _READY}
        if (now := progress(states)) != printed:
            print(now, flush=True)  # the engine shows a provider's output beside the resource
            printed = now
        if not late:
            break
        if all(status.startswith(_FAILED) for status in late.values()) or time.monotonic() > deadline:
            raise GcpError(f"{describe_late(late, props['timeout'])}; {_serial_output(client, props, next(iter(late)))}")
        time.sleep(_POLL)
    return "ready", props


def progress(states: Mapping[str, str]) -> str:
    """Return one line about the progress of the hosts; pure."""
    late = [f"{host} {status}" for host, status in states.items() if status != _READY]
    return f"{len(states) - len(late)} of {len(states)} hosts are ready{': ' if late else ''}{', '.join(late)}"


def describe_late(late: Mapping[str, str], seconds: int) -> str:
    """Return one line about the hosts that are not ready; pure."""
    failed = all(status.startswith(_FAILED) for status in late.values())
    hosts = ", ".join(f"{host} {status}" for host, status in late.items())
    return f"not ready{'' if failed else f' after {seconds} s'}: {hosts}"


def _states(client: requests.Session, props: Props) -> dict[str, str]:
    hosts = guest_attributes(client, props, props["hosts"], "scaletier", "state")
    return {host: state(attributes, props["scripts"][host]) for host, attributes in hosts.items()}


def state(attributes: Mapping[str, str], script: str) -> str:
    """Return a host's start-up state from its guest attributes, without the result of another version of the script."""
    status = attributes.get("state", _NO_STATE)
    ended = status == _READY or status.startswith(_FAILED)
    return _OLD_SCRIPT if ended and attributes.get("script") != script else status


def _serial_output(client: requests.Session, props: Props, host: str) -> str:
    """Return the remedy, and the end of a host's serial output, which includes its start-up script's."""
    instance = props["hosts"][host]
    remedy = f"fix it, then `gcloud compute instances reset {instance} --zone {props['zone']}` and `pulumi up`"
    try:
        lines = str(get_json(client, instance_url(props, instance, "serialPort")).get("contents", "")).strip().splitlines()
    except GcpError:
        lines = []
    return f"{remedy}; {host}'s serial output ends: {' / '.join(lines[-_LAST_LINES:])}" if lines else remedy


def read(name: str, props: Props) -> Props | None:
    """Return None if a host reports that it is not ready, so that the next update waits for it again."""
    states = _states(session(configuration), props).values()
    return props if all(status in (_READY, _NO_STATE) for status in states) else None
