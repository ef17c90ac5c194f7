"""The stack's private bridge: no route to the outside, and no DHCP. A host's address is set before it starts."""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import psutil
import pylxd.exceptions

from infra.dynamic import ModuleResource, Props
from infra.lxd.api import LxdError, client, errors, is_not_found
from infra.lxd.layout import candidate_network

REPLACE_ON_CHANGES = frozenset({"name"})
_ATTEMPTS = 64
_DELETE_ATTEMPTS = 4


class BridgeNetwork(ModuleResource, module="lxd", name="Network"):
    """The stack's bridge, as a resource.

    Inputs: name of the bridge, range (a private /24). If the range changes, the hosts are recreated afterwards.
    """

    module_name = __name__


def choose_range(project: str, bridge: str, configured: ipaddress.IPv4Network | None) -> ipaddress.IPv4Network:
    """Return the configured range, else the bridge's present one, else a free one; LxdError if the configured one is used."""
    used = _ranges_in_use()
    own = used.pop(bridge, None)
    if configured:
        for interface, network in used.items():
            if network.overlaps(configured):
                raise LxdError(
                    f"address range {configured} is taken: {interface} of this machine has {network}; "
                    "`pulumi config set network 10.77.0.0/24` sets another, `pulumi config rm network` chooses one"
                )
        return configured
    if own:
        return own
    for attempt in range(_ATTEMPTS):
        candidate = candidate_network(project, attempt)
        if not any(network.overlaps(candidate) for network in used.values()):
            return candidate
    raise LxdError("no free private /24 range on this machine: set one with `pulumi config set network 10.77.0.0/24`")


def _ranges_in_use() -> dict[str, ipaddress.IPv4Network]:
    return {
        interface: ipaddress.IPv4Network((item.address, item.netmask), strict=False)
        for interface, addresses in psutil.net_if_addrs().items()
        for item in addresses
        if item.family.name == "AF_INET" and item.netmask
    }


def _config(props: Props) -> dict[str, str]:
    gateway = ipaddress.IPv4Network(props["range"])[1]
    return {
        "ipv4.address": f"{gateway}/24",
        "ipv4.nat": "false",
        "ipv4.dhcp": "false",
        "ipv6.address": "none",
        "dns.mode": "none",
    }


def create(props: Props) -> tuple[str, Props]:
    name = props["name"]
    with errors(f"network {name}"):
        if client().networks.exists(name) and not _has_device(name):
            delete(name, props)
        if client().networks.exists(name):
            update(name, props, props)
        else:
            client().networks.create(name, description="A scaletier cluster", type="bridge", config=_config(props))
    return name, props


def _has_device(name: str) -> bool:
    """Return True if the bridge has a device: after an interrupted delete, LXD may list a bridge without one."""
    return name in psutil.net_if_addrs()


def read(name: str, props: Props) -> Props | None:
    with errors(f"network {name}"):
        if not client().networks.exists(name) or not _has_device(name):
            return None
        config: dict[str, Any] = client().networks.get(name).config
        network = str(ipaddress.IPv4Interface(config["ipv4.address"]).network)
        return {**props, "range": network}


def update(name: str, old: Props, new: Props) -> Props:
    with errors(f"network {name}"):
        network = client().networks.get(name)
        network.config.update(_config(new))
        network.save()
    return new


def delete(name: str, props: Props) -> None:
    with errors(f"network {name}"):
        for attempt in range(_DELETE_ATTEMPTS):
            try:
                client().networks.get(name).delete()
                return
            except pylxd.exceptions.LXDAPIException as error:
                # LXD still uses a bridge for a moment after its last host is deleted. Its device may be gone already.
                if is_not_found(error) or not client().networks.exists(name):
                    return
                if attempt == _DELETE_ATTEMPTS - 1:
                    raise
                time.sleep(0.5)
