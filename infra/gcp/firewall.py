"""The firewall table as VPC rules: one rule a row, by service account; all else is refused, and logged."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from pulumi import ComponentResource, Output, Resource, ResourceOptions
from pulumi_gcp.compute import Firewall, FirewallAllowArgs, FirewallDenyArgs, FirewallLogConfigArgs

from infra.gcp.names import Names
from infra.spec import Allow, ClusterSpec, Role

# Where IAP's tunnels come from. Source: Identity-Aware Proxy documentation, "Using IAP for TCP forwarding".
IAP_RANGE = ipaddress.IPv4Network("35.235.240.0/20")
ALLOW_PRIORITY = 1000
# Below every rule of ours, and above the rule for all networks that nobody can see or log (65535).
DENY_PRIORITY = 65000


@dataclass(frozen=True)
class FirewallArgs:
    """`accounts` are the service accounts by role, `operator` the range that ssh may come from; in a network that others use,
    too, `shared`, nothing is said of their hosts. `project` is the network's.
    """

    project: str
    names: Names
    network: Output[str]
    spec: ClusterSpec
    accounts: Mapping[Role, Output[str]]
    operator: ipaddress.IPv4Network = IAP_RANGE
    shared: bool = False


class ClusterFirewall(ComponentResource):
    """`rules` are the rules, for hosts to wait for."""

    rules: tuple[Resource, ...]

    def __init__(self, name: str, args: FirewallArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Firewall", name, None, opts)
        self.args = args
        self.rules = (self._deny(), *(self._allow(row) for row in args.spec.allows()))
        self.register_outputs({})

    def _deny(self) -> Resource:
        args = self.args
        return Firewall(
            "deny",
            name=args.names.of("deny"),
            project=args.project,
            network=args.network,
            description="What no other rule allows",
            direction="INGRESS",
            priority=DENY_PRIORITY,
            source_ranges=["0.0.0.0/0"],
            target_service_accounts=list(args.accounts.values()) if args.shared else None,
            denies=[FirewallDenyArgs(protocol="all")],
            log_config=FirewallLogConfigArgs(metadata="INCLUDE_ALL_METADATA"),
            opts=ResourceOptions(parent=self),
        )

    def _allow(self, row: Allow) -> Resource:
        args = self.args
        ends = f"{row.source or 'operator'}-{row.destination}"
        return Firewall(
            f"{ends}-{row.port}",
            name=args.names.of(ends, str(row.port)),
            project=args.project,
            network=args.network,
            description=row.why,
            direction="INGRESS",
            priority=ALLOW_PRIORITY,
            source_service_accounts=[args.accounts[row.source]] if row.source else None,
            source_ranges=None if row.source else [str(args.operator)],
            target_service_accounts=[args.accounts[row.destination]],
            allows=[FirewallAllowArgs(protocol="tcp", ports=[str(row.port)])],
            opts=ResourceOptions(parent=self),
        )
