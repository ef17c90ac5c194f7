"""The firewall table as nftables rules: on this machine, like a VPC's firewall at Google, and again inside each host."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from pathlib import Path

from infra.dynamic import ModuleResource, Props
from infra.lxd import nft
from infra.lxd.layout import address, block, interface_name
from infra.ports import FIREWALL, SSH_PORT, FirewallRow, firewall_rows
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
    interfaces = {interface_name(bridge, host_id): str(address(network, host_id)) for host_id in spec.hosts}
    return render(
        "firewall.nft.j2", table=table, bridge=bridge, members=members, interfaces=interfaces, rows=firewall_rows(spec)
    )


def host_rules(network: ipaddress.IPv4Network, role: Role) -> str:
    """Return the nftables script that a host of the role loads at each boot; pure.

    Each host enforces the firewall table itself, so a flush of this machine's rules opens no host. The script allows all the
    addresses that a role may have: adding or removing a host does not change it. A row with `peers` also requires that the
    address is in the set `peers`, which the host itself fills while a trainer runs.
    """

    def rule(row: FirewallRow, other: Role | None) -> dict[str, object]:
        ends = block(network, other) if other else (network[1],)
        return {"addresses": "-".join(map(str, ends)), "ports": row.ranges, "why": row.why, "peers": row.peers}

    inbound = [rule(row, row.source) for row in FIREWALL if row.destination == role]
    outbound = [rule(row, row.destination) for row in FIREWALL if row.source == role]
    return render("host-firewall.nft.j2", ssh=SSH_PORT, inbound=inbound, outbound=outbound)


def create(props: Props) -> tuple[str, Props]:
    nft.load(props["rules"])
    return props["table"], props


def read(table: str, props: Props) -> Props | None:
    """Return the properties; with the loaded rules if they differ, so that `pulumi up` restores the stack's."""
    lines = nft.differences(table, props["rules"])
    if lines is None:
        return None
    return {**props, "rules": nft.list_table(table) or ""} if lines else props


def forward_drops(switch: Path, list_chains: Callable[[], str]) -> list[str]:
    """Return a warning for each table of another program, such as Docker's, that drops frames between hosts.

    `switch` is the kernel's setting that passes a bridge's frames to such tables; the file exists only with its module.
    """
    if not switch.exists() or switch.read_text().strip() != "1":
        return []
    chains = [item["chain"] for item in json.loads(list_chains() or "{}").get("nftables", []) if "chain" in item]
    return [
        f"nft table {chain['family']} {chain['table']} drops all that it does not accept, as Docker's does, and {switch} is 1, "
        "so it drops traffic between hosts too, unless a rule there accepts what comes from interfaces st*, or after `sysctl "
        "net.bridge.bridge-nf-call-iptables=0`"
        for chain in chains
        if chain["family"] in ("ip", "inet") and chain.get("hook") == "forward" and chain.get("policy") == "drop"
    ]


def delete(table: str, props: Props) -> None:
    nft.remove(table)
