"""The stack's own network: a custom VPC, a subnet with private Google access, and Cloud NAT.

Hosts without a public address reach the web through Cloud NAT.
"""

from __future__ import annotations

import ipaddress

from pulumi import ComponentResource, Output, Resource, ResourceOptions
from pulumi_gcp.compute import (
    Network,
    Router,
    RouterNat,
    RouterNatLogConfigArgs,
    RouterNatSubnetworkArgs,
    Subnetwork,
    SubnetworkLogConfigArgs,
)

from infra.gcp.names import GoogleNames
from infra.gcp.zones import Place


class ClusterNetwork(ComponentResource):
    """Outputs: the links of the network and of its subnet; `holds` is what no host outlives.

    Args:
        range_: that of the subnet.
        flow_logs: samples its traffic into Cloud Logging.
    """

    holds: Resource
    network: Output[str]
    subnet: Output[str]

    def __init__(
        self, place: Place, names: GoogleNames, range_: ipaddress.IPv4Network, flow_logs: bool, opts: ResourceOptions
    ) -> None:
        super().__init__("scaletier:gcp:Network", "network", None, opts)
        inside = ResourceOptions(parent=self)
        network = Network(
            "network",
            name=names.prefix,
            project=place.project,
            description=f"scaletier, stack {names.stack}",
            auto_create_subnetworks=False,
            routing_mode="REGIONAL",
            opts=inside,
        )
        subnet = Subnetwork(
            "subnet",
            name=names.prefix,
            project=place.project,
            region=place.region,
            network=network.self_link,
            ip_cidr_range=str(range_),
            private_ip_google_access=True,
            log_config=SubnetworkLogConfigArgs(
                aggregation_interval="INTERVAL_5_SEC", flow_sampling=0.5, metadata="INCLUDE_ALL_METADATA"
            )
            if flow_logs
            else None,
            opts=inside,
        )
        router = Router(
            "router", name=names.prefix, project=place.project, region=place.region, network=network.self_link, opts=inside
        )
        RouterNat(
            "nat",
            name=names.prefix,
            project=place.project,
            region=place.region,
            router=router.name,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[RouterNatSubnetworkArgs(name=subnet.self_link, source_ip_ranges_to_nats=["ALL_IP_RANGES"])],
            log_config=RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            # By its project, region, router and name it is one thing: made before the old one went, it would go with that.
            opts=ResourceOptions(parent=self, delete_before_replace=True),
        )
        self.holds = subnet
        self.network, self.subnet = network.self_link, subnet.self_link
        self.register_outputs({"network": self.network, "subnet": self.subnet})
