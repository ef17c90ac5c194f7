"""The second firewall: each host refuses by itself what the firewall refuses.

So a flushed table of the machine opens no host.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from infra.lxd.layout import block
from infra.spec import Allow, Role
from infra.templates import render


@dataclass(frozen=True)
class FirewallRow:
    """One row for a host; `who` is an address or a range, as nft writes it, and so are the `ports`."""

    who: str
    ports: list[str]
    why: str
    peers: bool


def wall(rows: tuple[Allow, ...], network: ipaddress.IPv4Network, role: Role) -> str:
    """Return the nftables script that a host of the role loads at each boot; pure.

    It is of the whole table and of the addresses that roles may have: no host that comes or goes changes it. Peers are of
    these addresses and in the set `peers` besides, which the host itself fills while a trainer runs.
    """

    def end(other: Role | None) -> str:
        return "-".join(map(str, block(network, other))) if other else str(network[1])

    takes = [FirewallRow(end(row.source), row.ranges, row.why, row.peers) for row in rows if row.destination == role]
    sends = [FirewallRow(end(row.destination), row.ranges, row.why, row.peers) for row in rows if row.source == role]
    return render("host-firewall.nft.j2", takes=takes, sends=sends)
