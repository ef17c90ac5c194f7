"""The stack's own network: a custom VPC, a subnet with Private Google Access, and Cloud NAT.

Hosts without a public address reach the internet through Cloud NAT.
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
    """The network, as one component. Outputs: the links of the network and of its subnet.

    If `subnet_resource`, the subnet, is replaced, every host is replaced.

    Args:
        range_: the subnet's address range.
        flow_logs: True to write samples of the subnet's traffic to Cloud Logging.
    """

    subnet_resource: Resource
    network: Output[str]
    subnet: Output[str]

    def __init__(
        self, place: Place, names: GoogleNames, range_: ipaddress.IPv4Network, flow_logs: bool, opts: ResourceOptions
    ) -> None:
        super().__init__("scaletier:gcp:Network", "network", None, opts)
        child_opts = ResourceOptions(parent=self)
        network = Network(
            "network",
            name=names.prefix,
            project=place.project,
            description=f"scaletier, stack {names.stack}",
            auto_create_subnetworks=False,
            routing_mode="REGIONAL",
            opts=child_opts,
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
            opts=child_opts,
        )
        router = Router(
            "router", name=names.prefix, project=place.project, region=place.region, network=network.self_link, opts=child_opts
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
            # Google identifies a NAT by project, region, router and name. If the new NAT were created first, deleting the
            # old one would delete it too.
            opts=ResourceOptions(parent=self, delete_before_replace=True),
        )
        self.subnet_resource = subnet
        self.network, self.subnet = network.self_link, subnet.self_link
        self.register_outputs({"network": self.network, "subnet": self.subnet})
