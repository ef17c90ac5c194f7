"""The firewall table as VPC rules: one rule for each row, by service account.

All other inbound traffic, and with closed egress all other outbound traffic, is refused and logged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from pulumi import ComponentResource, Output, Resource, ResourceOptions
from pulumi_gcp.compute import Firewall, FirewallAllowArgs, FirewallDenyArgs, FirewallLogConfigArgs

from infra.gcp.names import GoogleNames
from infra.ports import FIREWALL, firewall_rows
from infra.scale_tiers import ClusterSpec, Role

# Private Google Access: addresses of Google's APIs that only hosts inside Google reach. Source: VPC documentation, "Configure
# Private Google Access", private.googleapis.com.
GOOGLE_RANGE = ipaddress.IPv4Network("199.36.153.8/30")
# The source addresses of IAP's tunnels. Source: Identity-Aware Proxy documentation, "Using IAP for TCP forwarding".
IAP_RANGE = ipaddress.IPv4Network("35.235.240.0/20")
ALLOW_PRIORITY = 1000
# After all other rules of the stack, but before the implied rule of every network (65535), which cannot be logged.
DENY_PRIORITY = 65000


class ClusterFirewall(ComponentResource):
    """The VPC rules; hosts depend on `rules`.

    Args:
        project: that of the network.
        accounts: the service accounts by role.
        operator: the range that ssh may come from.
        shared: True if the network has other hosts too; the rules do not apply to those.
        hosts_range: the range of the hosts, if they may reach only each other and Google's APIs.
        gpu_driver_roles: roles whose hosts may reach the web nevertheless, for the driver of their GPUs.
    """

    def __init__(
        self,
        project: str,
        names: GoogleNames,
        network: Output[str],
        spec: ClusterSpec,
        accounts: Mapping[Role, Output[str]],
        operator: ipaddress.IPv4Network,
        shared: bool,
        hosts_range: ipaddress.IPv4Network | None,
        gpu_driver_roles: tuple[Role, ...],
        opts: ResourceOptions,
    ) -> None:
        super().__init__("scaletier:gcp:Firewall", "firewall", None, opts)
        self._project, self._names, self._network = project, names, network
        everywhere = ["0.0.0.0/0"]
        targets = list(accounts.values()) if shared else None
        rules = [self._rule("deny", "What no other rule allows", source_ranges=everywhere, target_service_accounts=targets)]
        rules += [
            self._rule(
                f"{row.source or 'operator'}-{row.destination}-{'peers' if row.peers else row.ranges[0]}",
                row.why,
                row.ranges,
                source_service_accounts=[accounts[row.source]] if row.source else None,
                source_ranges=None if row.source else [str(operator)],
                target_service_accounts=[accounts[row.destination]],
            )
            for row in firewall_rows(spec)
        ]
        # Outbound traffic: replies need no rule, and the metadata server is always reachable.
        if hosts_range is not None:
            ports = list(dict.fromkeys(text for row in FIREWALL if row.source for text in row.ranges))
            rules += [
                self._rule("out-deny", "What no other rule lets out", destination_ranges=everywhere),
                self._rule("out-peers", "To one another", ports, destination_ranges=[str(hosts_range)]),
                self._rule("out-google", "To Google's APIs", ["443"], destination_ranges=[str(GOOGLE_RANGE)]),
            ]
        if hosts_range is not None and gpu_driver_roles:
            why, targets = "To where drivers of GPUs come from", [accounts[role] for role in gpu_driver_roles]
            ends = {"destination_ranges": everywhere, "target_service_accounts": targets}
            rules.append(self._rule("out-drivers", why, ["80", "443"], **ends))
        self.rules: tuple[Resource, ...] = tuple(rules)
        self.register_outputs({})

    def _rule(self, name: str, why: str, ports: list[str] | None = None, **ends: Any) -> Firewall:
        """Declare a rule for TCP to these ports; without ports, one that refuses and logs everything."""
        return Firewall(
            name,
            name=self._names.resource_name(name),
            project=self._project,
            network=self._network,
            description=why,
            direction="EGRESS" if "destination_ranges" in ends else "INGRESS",
            priority=ALLOW_PRIORITY if ports else DENY_PRIORITY,
            allows=[FirewallAllowArgs(protocol="tcp", ports=ports)] if ports else None,
            denies=None if ports else [FirewallDenyArgs(protocol="all")],
            log_config=None if ports else FirewallLogConfigArgs(metadata="INCLUDE_ALL_METADATA"),
            opts=ResourceOptions(parent=self),
            **ends,
        )
