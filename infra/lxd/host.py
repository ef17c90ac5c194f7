"""One host: an LXD instance with real systemd and sshd, its address set before its first process runs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Mapping
from pathlib import PurePath
from typing import Any

from pulumi import Output

from infra.dynamic import ModuleResource, Props, changes
from infra.lxd.api import client, errors, hosts_of, parse_limit, start
from infra.lxd.bucket_guard import check_again
from infra.lxd.layout import BUCKET, RUNTIMES
from infra.lxd.removal import remove
from jobs.paths import VENV

REPLACE_ON_CHANGES = frozenset(
    {
        "project",
        "name",
        "image",
        "runtime",
        "pool",
        "bridge",
        "port",
        "address",
        "gateway",
        "authorizedKey",
        "firewall",
        "bucket",
    }
)


CPUS, ALLOWANCE = "limits.cpu", "limits.cpu.allowance"
_MACHINE_TYPE = "user.scaletier.machine-type"
_PERIOD_MS = 100


class HostContainer(ModuleResource, module="lxd", name="Host"):
    """A local host, as a dynamic resource: Pulumi calls this module's create, read, update and delete.

    Inputs: project, name, image, pool, bridge, port (its interface here), address, gateway, bucket (its volume), runtime (the
    folder here of the hosts' own Python), runtimes (that of the jobs' runtimes), authorizedKey, firewall (nft rules),
    machineType, cpus, memory and disk (bytes), labels, running (True, so that an update starts a stopped host).
    Outputs are times: `created`, and `started`, its last start.
    """

    module_name = __name__
    outputs = ("created", "started")
    created: Output[str]
    started: Output[str]


def replacing(old: Props, new: Props) -> set[str]:
    """Return the changed inputs that need a new host. The same runtime in another folder, such as a checkout's, needs none."""
    same = {"runtime"} if PurePath(old.get("runtime", "")).name == PurePath(new["runtime"]).name else set()
    return changes(old, new) & REPLACE_ON_CHANGES - same


def definition(props: Props) -> dict[str, Any]:
    """Return the instance in the form of LXD's API (POST /1.0/instances); pure."""
    address, gateway = props["address"], props["gateway"]
    config = {
        **limits(props),
        "user.scaletier.authorized-key": props["authorizedKey"],
        "user.scaletier.firewall": props["firewall"],
        "user.scaletier.network": str(ipaddress.IPv4Network(f"{address}/24", strict=False)),
        # After a restart of this machine, the firewall must be loaded before a host starts: `pulumi up` does both.
        "boot.autostart": "false",
        "raw.lxc": f"lxc.net.0.ipv4.address = {address}/24\nlxc.net.0.ipv4.gateway = {gateway}",
    }
    return {
        "name": props["name"],
        "type": "container",
        "source": {"type": "image", "alias": props["image"]},
        "profiles": [],
        "config": config,
        "devices": {
            "root": {"type": "disk", "path": "/", "pool": props["pool"], "size": str(props["disk"])},
            "eth0": {
                "type": "nic",
                "name": "eth0",
                "nictype": "bridged",
                "parent": props["bridge"],
                "host_name": props["port"],
                "ipv4.address": address,
                # The firewall checks addresses, so LXD drops what a host sends from any other address.
                "security.ipv4_filtering": "true",
                "security.mac_filtering": "true",
            },
            "bucket": {"type": "disk", "pool": props["pool"], "source": props["bucket"], "path": BUCKET},
            "runtime": {"type": "disk", "source": props["runtime"], "path": VENV, "readonly": "true"},
            "runtimes": {"type": "disk", "source": props["runtimes"], "path": RUNTIMES, "readonly": "true"},
        },
    }


def limits(props: Props) -> dict[str, str]:
    """Return the part of an instance's config that changes while it runs; pure."""
    return {
        **_cpu_limits(props["cpus"]),
        "limits.memory": str(props["memory"]),
        _MACHINE_TYPE: props["machineType"],
        **{f"user.label.{key}": value for key, value in props["labels"].items()},
    }


def _cpu_limits(cpus: float) -> dict[str, str]:
    """Return the limit: a number of processors, or, below one, the CPU time in each period."""
    return {CPUS: str(int(cpus))} if cpus >= 1 else {ALLOWANCE: f"{round(_PERIOD_MS * cpus)}ms/{_PERIOD_MS}ms"}


def _cpus_of(config: Mapping[str, str]) -> float | str:
    match = re.fullmatch(r"(\d+)ms/(\d+)ms", config.get(ALLOWANCE, ""))
    return int(match[1]) / int(match[2]) if match else parse_limit(config.get(CPUS, ""))


def create(props: Props) -> tuple[str, Props]:
    project, name = props["project"], props["name"]
    with errors(f"host {name}"):
        instances = client(project).instances
        if instances.exists(name) and not _matches_definition(project, props):
            remove(project, name)
        if instances.exists(name):
            _apply(project, props)
        else:
            instances.create(definition(props), wait=True)
        return name, _start(project, name, props)


def _matches_definition(project: str, props: Props) -> bool:
    """Return False for an instance that differs from its definition: half created, or of a lost state."""
    instance, expected = client(project).instances.get(props["name"]), definition(props)
    image = client().images.get_by_alias(props["image"]).fingerprint
    fixed = {key: value for key, value in expected["config"].items() if key not in limits(props)}
    return (
        instance.config.get("volatile.base_image") == image
        and all(instance.config.get(key) == value for key, value in fixed.items())
        and instance.devices == expected["devices"]
    )


def _start(project: str, name: str, props: Props) -> Props:
    instance = client(project).instances.get(name)
    if instance.status != "Running":
        start(instance)
        instance = client(project).instances.get(name)
    return {**props, "running": True, "created": instance.created_at, "started": instance.last_used_at}


def read(name: str, props: Props) -> Props | None:
    with errors(f"host {name}"):
        instances = client(props["project"]).instances
        if not instances.exists(name):
            return None
        instance = instances.get(name)
        config = instance.config
        return {
            **props,
            "cpus": _cpus_of(config),
            "memory": parse_limit(config.get("limits.memory", "")),
            "disk": parse_limit(instance.devices.get("root", {}).get("size", "")),
            "running": instance.status == "Running",
            "created": instance.created_at,
            "started": instance.last_used_at,
        }


def update(name: str, old: Props, new: Props) -> Props:
    with errors(f"host {name}"):
        _apply(new["project"], new)
        return _start(new["project"], name, new)


def _apply(project: str, props: Props) -> None:
    instance = client(project).instances.get(props["name"])
    other_config = {
        key: value
        for key, value in instance.config.items()
        if key not in (CPUS, ALLOWANCE) and not key.startswith("user.label.")
    }
    instance.config = {**other_config, **limits(props)}
    instance.devices = definition(props)["devices"]
    instance.save(wait=True)


def delete(name: str, props: Props) -> None:
    check_again({"project": props["project"], "pool": props["pool"], "name": props["bucket"]})
    with errors(f"host {name}"):
        remove(props["project"], name)


def unrecorded_hosts(project: str, recorded: Container[str]) -> list[str]:
    """Return the hosts in a stack's project that the state does not have: a killed update leaves such hosts."""
    with errors("hosts"):
        names = [name for name in hosts_of(project) if name not in recorded]
        instances = client(project).instances
        # An instance without this config key is no host, but the user's own.
        return sorted(name for name in names if instances.exists(name) and _MACHINE_TYPE in instances.get(name).config)
