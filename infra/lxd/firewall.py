"""The firewall table as nftables rules on the machine: what a VPC's firewall is to Google's hosts."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd import nft
from infra.lxd.layout import address, port
from infra.spec import ClusterSpec
from infra.templates import render

REPLACE = frozenset({"table"})


class Firewall(ModuleResource, module="lxd", name="Firewall"):
    """Inputs: table, rules (an nftables script that replaces the table as a whole)."""

    lifecycle = __name__


def rules(spec: ClusterSpec, table: str, bridge: str, network: ipaddress.IPv4Network) -> str:
    """Return the nftables script for a cluster; pure."""
    members: dict[str, list[str]] = {}
    for replica in spec.replicas:
        members.setdefault(replica.role, []).append(str(address(network, replica)))
    ports = {port(bridge, replica): str(address(network, replica)) for replica in spec.replicas}
    return render("firewall.nft.j2", table=table, bridge=bridge, members=members, ports=ports, rows=spec.allows())


def create(props: Props) -> tuple[str, Props]:
    nft.load(props["rules"])
    return props["table"], props


def read(table: str, props: Props) -> Props | None:
    """Return the properties with the loaded rules if somebody changed any: then `up` restores them."""
    lines = nft.differences(table, props["rules"])
    if lines is None:
        return None
    return {**props, "rules": nft.listed(table) or ""} if lines else props


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


def update(table: str, old: Props, new: Props) -> Props:
    return create(new)[1]


def delete(table: str, props: Props) -> None:
    nft.remove(table)
