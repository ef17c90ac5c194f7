"""The firewall table as nftables rules, of the machine, as a VPC's firewall has them for Google's hosts, and of each host."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd import nft
from infra.lxd.layout import address, block, port
from infra.ports import FIREWALL, SSH_PORT, Allow, allowed
from infra.scale_tiers import ClusterSpec, Role
from infra.templates import render

REPLACE_ON_CHANGES = frozenset({"table"})


class Firewall(ModuleResource, module="lxd", name="Firewall"):
    """Inputs: table, rules (an nftables script that replaces the table as a whole)."""

    module_name = __name__


def rules(spec: ClusterSpec, table: str, bridge: str, network: ipaddress.IPv4Network) -> str:
    """Return the nftables script for a cluster; pure."""
    members: dict[str, list[str]] = {}
    for host_id in spec.hosts:
        members.setdefault(host_id.role, []).append(str(address(network, host_id)))
    ports = {port(bridge, host_id): str(address(network, host_id)) for host_id in spec.hosts}
    return render("firewall.nft.j2", table=table, bridge=bridge, members=members, ports=ports, rows=allowed(spec))


def host_rules(network: ipaddress.IPv4Network, role: Role) -> str:
    """Return the nftables script that a host of the role loads at each boot; pure.

    Each host refuses by itself what the table refuses, so a flushed table of the machine opens no host. The script is of the
    whole table and of the addresses that roles may have: no host that comes or goes changes it. Peers are of these addresses
    and in the set `peers` besides, which the host itself fills while a trainer runs.
    """

    def row(allow: Allow, other: Role | None) -> dict[str, object]:
        ends = block(network, other) if other else (network[1],)
        return {"who": "-".join(map(str, ends)), "ports": allow.ranges, "why": allow.why, "peers": allow.peers}

    takes = [row(allow, allow.source) for allow in FIREWALL if allow.destination == role]
    sends = [row(allow, allow.destination) for allow in FIREWALL if allow.source == role]
    return render("host-firewall.nft.j2", ssh=SSH_PORT, takes=takes, sends=sends)


def create(props: Props) -> tuple[str, Props]:
    nft.load(props["rules"])
    return props["table"], props


def read(table: str, props: Props) -> Props | None:
    """Return the properties with the loaded rules if any was changed: then `up` restores them."""
    lines = nft.differences(table, props["rules"])
    if lines is None:
        return None
    return {**props, "rules": nft.list_table(table) or ""} if lines else props


def forward_drops(bridged: Path, chains: Callable[[], str]) -> list[str]:
    """Return a warning for each foreign table that drops the bridge's frames, such as Docker's.

    `bridged` is the kernel's switch that shows such tables the bridge's frames: it exists only with its module.
    """
    if not bridged.exists() or bridged.read_text().strip() != "1":
        return []
    listed = [item["chain"] for item in json.loads(chains() or "{}").get("nftables", []) if "chain" in item]
    return [
        f"nft table {chain['family']} {chain['table']} drops what it does not know, as Docker has it, and {bridged} is 1, so "
        "it is asked about frames between hosts too: they cannot reach each other, unless a rule there accepts what comes from "
        "st+, or after `sysctl net.bridge.bridge-nf-call-iptables=0`"
        for chain in listed
        if chain["family"] in ("ip", "inet") and chain.get("hook") == "forward" and chain.get("policy") == "drop"
    ]


def delete(table: str, props: Props) -> None:
    nft.remove(table)
