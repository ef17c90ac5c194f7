"""Instances as LXD containers, in their own project and on their own bridge, without a route to outside."""

from __future__ import annotations

import fcntl
import io
import ipaddress
import re
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import image
from pylxd.exceptions import LXDAPIException
from waiting import wait_for

from infra.lxd import network
from infra.lxd.api import client
from infra.lxd.files import retry_request
from infra.lxd.removal import purge, remove

PROJECT = BRIDGE = TABLE = "stemulation"
POOL = "scaletier"
METADATA_PORT = 8080
_LOCK = Path("/run/lock", f"{PROJECT}.lock")
_METADATA = "169.254.169.254"
_ALIAS = "google"


class Machines:
    """The containers on the network that the program declares."""

    def __init__(self, range_: ipaddress.IPv4Network) -> None:
        self.range, self.gateway = range_, str(range_[1])
        self._stopping: set[str] = set()
        self._booting: set[str] = set()
        self._lock = threading.Lock()

    def start(self, name: str, address: str) -> None:
        """Boot an instance; Google's names are in its /etc/hosts, as there is no DNS."""
        config = {
            "raw.lxc": f"lxc.net.0.ipv4.address = {address}/{self.range.prefixlen}\nlxc.net.0.ipv4.gateway = {self.gateway}",
            "boot.autostart": "false",
        }
        devices = {
            "root": {"type": "disk", "path": "/", "pool": POOL},
            "eth0": {"type": "nic", "name": "eth0", "nictype": "bridged", "parent": BRIDGE},
        }
        definition = {
            "name": name,
            "source": {"type": "image", "alias": _ALIAS},
            "profiles": [],
            "config": config,
            "devices": devices,
        }
        instance = client(PROJECT).instances.create(definition, wait=True)
        hosts = {
            "127.0.0.1": "localhost",
            address: name,
            self.gateway: " ".join(image.NAMES),
            _METADATA: "metadata.google.internal",
        }
        lines = "".join(f"{key} {value}\n" for key, value in hosts.items())
        retry_request(lambda: instance.files.put("/etc/hosts", lines))
        instance.start(wait=True)

    def serial(self, name: str) -> str:
        """Return the start-up script's output, which Google's agent also writes to the serial port."""
        return self.run(name, "journalctl", "--unit", "google-startup-scripts", "--output", "cat")

    def count_refused_packets(self) -> int:
        """Return the number of packets from hosts to outside addresses."""
        table = subprocess.run(["nft", "list", "table", "ip", TABLE], capture_output=True, text=True, check=True).stdout
        return int(re.findall(r"counter packets (\d+)", table)[0])

    def state(self, name: str) -> str:
        """Return RUNNING, STOPPING or TERMINATED, like the Compute API."""
        if name in self._booting:
            return "RUNNING"
        if client(PROJECT).instances.get(name).status != "Running":
            return "TERMINATED"
        return "STOPPING" if name in self._stopping else "RUNNING"

    def boot(self, name: str) -> None:
        """Start a stopped instance on its disk, unless another thread does."""
        with self._lock:
            if name in self._booting or client(PROJECT).instances.get(name).status == "Running":
                return
            self._booting.add(name)
        try:
            client(PROJECT).instances.get(name).start(wait=True)
        finally:
            self._booting.remove(name)

    def preempt(self, name: str) -> None:
        """Power off an instance like Google: by ACPI, and by force after 30 s."""
        instance = client(PROJECT).instances.get(name)
        self._stopping.add(name)
        try:
            instance.stop(timeout=30, force=False, wait=True)
        except LXDAPIException:
            instance.stop(force=True, wait=True)
        finally:
            self._stopping.remove(name)

    def restart(self, name: str) -> None:
        """Reboot an instance, or start it if it is stopped."""
        instance = client(PROJECT).instances.get(name)
        if instance.status == "Running":
            instance.stop(force=True, wait=True)
        instance.start(wait=True)

    def metadata_changed(self, name: str) -> None:
        """Do nothing: a host polls its metadata itself."""

    def stop(self, name: str) -> None:
        """Delete an instance."""
        remove(PROJECT, name)

    def run(self, name: str, *command: str) -> str:
        """Return the output of a command on a host."""
        return run(PROJECT, name, *command)


@contextmanager
def exclusive_lock(say: Callable[[str], object], lock: Path = _LOCK) -> Iterator[None]:
    """Lock what exists once per machine: the project, the bridge and the address ranges; wait for another checkout."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another checkout's emulation of Google Cloud, which holds {lock}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def start_network(range_: ipaddress.IPv4Network) -> Iterator[Machines]:
    """Create the project and bridge for instances; delete them at the end."""
    place = Machines(range_)
    _clean()
    try:
        client().projects.create(PROJECT, config={"features.images": "true", "features.profiles": "true"})
        bridge = {
            "ipv4.address": f"{place.gateway}/{range_.prefixlen}",
            "ipv4.nat": "false",
            "ipv4.dhcp": "false",
            "ipv6.address": "none",
        }
        client().networks.create(
            BRIDGE, description="scaletier's emulation of Google Cloud", type="bridge", config={**bridge, "dns.mode": "none"}
        )
        _nft(
            f"add table ip {TABLE}; add chain ip {TABLE} in {{ type nat hook prerouting priority dstnat; }}; "
            f"add rule ip {TABLE} in iifname {BRIDGE} ip daddr {_METADATA} tcp dport 80 "
            f"dnat to {place.gateway}:{METADATA_PORT}; "
            f"add chain ip {TABLE} out {{ type filter hook forward priority filter; }}; "
            f"add rule ip {TABLE} out iifname {BRIDGE} oifname != {BRIDGE} counter drop"
        )
        client(PROJECT).images.create(image.require_squashfs().read_bytes(), metadata=_metadata(), wait=True).add_alias(
            _ALIAS, ""
        )
        yield place
    finally:
        _clean()


def run(project: str, name: str, *command: str) -> str:
    """Return the output of a command on a host of a project.

    LXD records it. pylxd's `execute` reads it in threads, in which an error is raised if the command ends first.
    """
    instance = client(project).instances.get(name)
    response = instance.api["exec"].post(json={"command": command, "record-output": True})
    operation = instance.client.operations.wait_for_operation(response.json()["operation"])
    output = instance.api
    for part in operation.metadata["output"]["1"].partition(f"/{name}/")[2].split("/"):
        output = output[part]
    return str(output.get(is_api=False).text)  # else pylxd takes JSON for an answer of LXD


@contextmanager
def start_local_host(alias: str, runtime: Path, mount_path: str) -> Iterator[tuple[str, str]]:
    """Start a host of the local target without a network; yield its project and its name.

    The runtime is mounted at `mount_path`.
    """
    project, name = f"{PROJECT}-local", "local"
    purge(project)
    if not client().projects.exists(project):
        client().projects.create(project, config={"features.images": "false"})
    try:
        devices = {
            "root": {"type": "disk", "path": "/", "pool": POOL},
            "runtime": {"type": "disk", "source": str(runtime), "path": mount_path, "readonly": "true"},
        }
        source, config = (
            {"type": "image", "alias": alias},
            {
                "user.scaletier.authorized-key": "ssh-ed25519 AAAA of-nobody",
                "user.scaletier.network": "10.77.0.0/24",
                "user.scaletier.firewall": "table inet scaletier {}",
            },
        )
        definition = {"name": name, "source": source, "profiles": [], "config": config, "devices": devices}
        client(project).instances.create(definition, wait=True).start(wait=True)

        def has_booted() -> bool:
            # systemd answers this only after its own start.
            return run(project, name, "systemctl", "is-system-running", "--wait").strip() in ("running", "degraded")

        wait_for(has_booted, "the local host has booted")
        yield project, name
    finally:
        purge(project)
        client().projects.get(project).delete(wait=True)


def _clean() -> None:
    purge(PROJECT)
    if client().projects.exists(PROJECT):
        for each in client(PROJECT).images.all():
            each.delete(wait=True)
        client().projects.get(PROJECT).delete(wait=True)
    network.delete(BRIDGE, {})
    subprocess.run(["nft", "delete", "table", "ip", TABLE], capture_output=True, check=False)


def _nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text.replace("; add", "\nadd"), text=True, check=True)


def _metadata() -> bytes:
    text = b"architecture: x86_64\ncreation_date: 1\n"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("metadata.yaml")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return buffer.getvalue()
