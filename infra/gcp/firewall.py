"""The firewall table as VPC rules: one rule a row, by service account; all else is refused and logged."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pulumi import ComponentResource, Output, Resource, ResourceOptions
from pulumi_gcp.compute import Firewall, FirewallAllowArgs, FirewallDenyArgs, FirewallLogConfigArgs

from infra.gcp.names import GoogleNames
from infra.spec import Allow, ClusterSpec, Role

# Private Google Access: Google's APIs by an address that only hosts inside Google reach. Source: VPC documentation, "Configure
# Private Google Access", private.googleapis.com.
GOOGLE_RANGE = ipaddress.IPv4Network("199.36.153.8/30")
# Where IAP's tunnels come from. Source: Identity-Aware Proxy documentation, "Using IAP for TCP forwarding".
IAP_RANGE = ipaddress.IPv4Network("35.235.240.0/20")
ALLOW_PRIORITY = 1000
# Below every rule of ours, and above the rule for all networks that nobody can see or log (65535).
DENY_PRIORITY = 65000


@dataclass(frozen=True)
class FirewallArgs:
    """Inputs of the firewall.

    `accounts` are the service accounts by role, `operator` the range that ssh may come from. In a `shared` network, which
    others use too, their hosts get no rules. `project` is the network's. If `inside`, the range of the hosts, is set, they
    reach only that and Google's APIs; those of the roles `fetching` reach the web too, for their driver.
    """

    project: str
    names: GoogleNames
    network: Output[str]
    spec: ClusterSpec
    accounts: Mapping[Role, Output[str]]
    operator: ipaddress.IPv4Network = IAP_RANGE
    shared: bool = False
    inside: ipaddress.IPv4Network | None = None
    fetching: tuple[Role, ...] = ()


class ClusterFirewall(ComponentResource):
    """`rules` are the rules, for hosts to wait for."""

    rules: tuple[Resource, ...]

    def __init__(self, name: str, args: FirewallArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Firewall", name, None, opts)
        self.args = args
        self.rules = (self._deny(), *(self._allow(row) for row in args.spec.allows()), *self._egress())
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
        ends, what = f"{row.source or 'operator'}-{row.destination}", "peers" if row.peers else row.ranges[0]
        return Firewall(
            f"{ends}-{what}",
            name=args.names.of(ends, what),
            project=args.project,
            network=args.network,
            description=row.why,
            direction="INGRESS",
            priority=ALLOW_PRIORITY,
            source_service_accounts=[args.accounts[row.source]] if row.source else None,
            source_ranges=None if row.source else [str(args.operator)],
            target_service_accounts=[args.accounts[row.destination]],
            allows=[FirewallAllowArgs(protocol="tcp", ports=row.ranges)],
            opts=ResourceOptions(parent=self),
        )

    def _egress(self) -> Iterator[Resource]:
        """Yield the rules of what hosts may reach.

        Answers need no rule, and the metadata server is always reachable.
        """
        args = self.args
        if args.inside is None:
            return
        yield self._out("out-deny", "What no other rule lets out", ["0.0.0.0/0"])
        ports = list(dict.fromkeys(text for row in args.spec.firewall if row.source for text in row.ranges))
        yield self._out("out-peers", "To one another", [str(args.inside)], ports)
        yield self._out("out-google", "To Google's APIs", [str(GOOGLE_RANGE)], ["443"])
        if args.fetching:
            accounts = [args.accounts[role] for role in args.fetching]
            yield self._out("out-drivers", "To where drivers of GPUs come from", ["0.0.0.0/0"], ["80", "443"], accounts)

    def _out(
        self, name: str, why: str, to: list[str], ports: list[str] | None = None, accounts: list[Output[str]] | None = None
    ) -> Resource:
        """Return a rule for outgoing packets; without ports it refuses all."""
        return Firewall(
            name,
            name=self.args.names.of(name),
            project=self.args.project,
            network=self.args.network,
            description=why,
            direction="EGRESS",
            priority=ALLOW_PRIORITY if ports else DENY_PRIORITY,
            destination_ranges=to,
            target_service_accounts=accounts,
            allows=[FirewallAllowArgs(protocol="tcp", ports=ports)] if ports else None,
            denies=None if ports else [FirewallDenyArgs(protocol="all")],
            log_config=None if ports else FirewallLogConfigArgs(metadata="INCLUDE_ALL_METADATA"),
            opts=ResourceOptions(parent=self),
        )
