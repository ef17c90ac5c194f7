"""Readiness of all hosts, which boot in parallel: sshd answers on each, and LXD's API returns its host key."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pulumi import Output

from infra.dynamic import ModuleResource, Props
from infra.lxd import host
from infra.lxd.api import LxdError, client, errors
from infra.lxd.files import read_file
from infra.lxd.removal import remove
from infra.ports import SSH_PORT

REPLACE_ON_CHANGES = frozenset({"project"})
_HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
# 31 hosts, which share the processors of this machine, take minutes until all have booted.
_SILENT_SECONDS = 180.0
_POLL = 0.05


class Ready(ModuleResource, module="lxd", name="Ready"):
    """Readiness of all hosts, as a resource.

    Inputs:
        project, hosts: the hosts' addresses by name.
        created, started: times by host; a change means that a host has a new key, or boots.
        unrecorded: hosts that a killed update created and did not record: `read` finds them, `create` and `update` remove them.

    Output `hostKeys`: address to public host key.
    """

    module_name = __name__
    outputs = ("hostKeys",)
    hostKeys: Output[dict[str, str]]


def create(props: Props) -> tuple[str, Props]:
    return "ready", update("ready", {"hosts": {}}, props)


def update(name: str, old: Props, new: Props) -> Props:
    """Wait for the hosts and remove unrecorded ones. The old hosts are the engine's to delete, after this, or to keep."""
    keys = wait(new["project"], new["hosts"])
    for each in host.unrecorded_hosts(new["project"], {**old["hosts"], **new["hosts"]}):
        with errors(f"host {each}"):
            remove(new["project"], each)
    return {**new, "hostKeys": keys}


def wait(project: str, hosts: Mapping[str, str]) -> dict[str, str]:
    """Wait until sshd answers on all hosts; LxdError names those without, once no further host has answered for 3 minutes."""
    last_answer = time.monotonic()

    def wait_for_host(address: str) -> bool:
        nonlocal last_answer
        while time.monotonic() < last_answer + _SILENT_SECONDS:
            if _answers(address):
                last_answer = time.monotonic()
                return True
            time.sleep(_POLL)
        return False

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        late = [name for name, ok in zip(hosts, pool.map(wait_for_host, hosts.values()), strict=True) if not ok]
    if late:
        instances = Path("/proc/sys/fs/inotify/max_user_instances").read_text().strip()
        raise LxdError(
            f"no ssh on {', '.join(late)}, and on no other host for {_SILENT_SECONDS:.0f} s: "
            f"see `lxc console --show-log {late[0]} --project {project}`; "
            f"fs.inotify.max_user_instances is {instances} (`make lxd` sets 8192, for 31 hosts)"
        )
    return {address: _host_key(project, name) for name, address in hosts.items()}


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, SSH_PORT), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _host_key(project: str, name: str) -> str:
    with errors(f"host key of {name}"):
        if (content := read_file(client(project).instances.get(name), _HOST_KEY)) is None:
            raise LxdError(f"{name} has no {_HOST_KEY}: its image is not one of `make image`")
    return " ".join(content.decode().split()[:2])


def read(name: str, props: Props) -> Props | None:
    return {**props, "unrecorded": host.unrecorded_hosts(props["project"], props["hosts"])}
