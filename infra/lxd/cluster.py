"""A cluster on the machine in front of you, as one component."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Any

from pulumi import ComponentResource, Output, ResourceOptions

from infra.cluster import Cluster, HostFacts
from infra.lxd.bucket import Bucket
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import Firewall, rules
from infra.lxd.host import Host
from infra.lxd.image import RUNTIMES_HERE, VENV
from infra.lxd.layout import BUCKET, RUNTIMES, Names, address, sizes
from infra.lxd.network import Network
from infra.lxd.preflight import Found
from infra.lxd.project import Project
from infra.lxd.ready import Ready
from infra.spec import ClusterSpec, Replica


@dataclass(frozen=True)
class LxdClusterArgs:
    """All that a local cluster is made from; `found` is what the machine was seen to have."""

    spec: ClusterSpec
    config: LxdConfig
    names: Names
    found: Found
    authorized_key: Output[str]


class LxdCluster(ComponentResource):
    """Project, bridge, bucket, firewall, and a host a replica."""

    def __init__(self, name: str, args: LxdClusterArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:lxd:Cluster", name, None, opts)
        self.args = args
        self.dhcp = args.config.instance_type != "container"
        names, network = args.names, args.found.network
        inside = ResourceOptions(parent=self)
        self.project = Project("project", {"name": names.project, "bridge": names.bridge, "table": names.table}, inside)
        # First made, last deleted: what an interrupted run left goes with it.
        first = ResourceOptions(parent=self, depends_on=[self.project])
        pool = args.config.storage_pool
        self.bridge = Network("network", {"name": names.bridge, "range": str(network), "dhcp": self.dhcp}, first)
        # Deleted in the other order: the bucket takes the last hosts with it, and so sets the bridge free.
        within = ResourceOptions(parent=self, depends_on=[self.bridge])
        self.bucket = Bucket("bucket", {"project": names.project, "pool": pool, "name": names.bucket}, within)
        script = rules(args.spec, names.table, names.bridge, network, self.dhcp)
        self.firewall = Firewall("firewall", {"table": names.table, "rules": script}, first)
        self.limits = sizes(args.spec, os.cpu_count() or 1, args.config.cpus, args.config.memory)
        # No host starts before the firewall stands.
        before = ResourceOptions(parent=self, depends_on=[self.bucket, self.firewall])
        self.hosts = {replica: Host(replica.name, self._host(replica, network), before) for replica in args.spec.replicas}
        self.ready = Ready(
            "ready",
            {
                "project": names.project,
                "hosts": {replica.name: str(address(network, replica)) for replica in self.hosts},
                "created": {replica.name: host.created for replica, host in self.hosts.items()},
                "started": {replica.name: host.started for replica, host in self.hosts.items()},
            },
            ResourceOptions(parent=self, depends_on=list(self.hosts.values())),
        )
        self.register_outputs({})

    def _host(self, replica: Replica, network: ipaddress.IPv4Network) -> dict[str, Any]:
        args, limits = self.args, self.limits[replica.role]
        return {
            "project": args.names.project,
            "name": replica.name,
            "image": args.found.image,
            "instanceType": args.config.instance_type,
            "pool": args.config.storage_pool,
            "bridge": args.names.bridge,
            "address": str(address(network, replica)),
            "gateway": str(network[1]),
            "bucket": args.names.bucket,
            "runtime": str(VENV),
            "runtimes": str(RUNTIMES_HERE),
            "authorizedKey": args.authorized_key,
            "machineType": args.spec.roles[replica.role].machine_type,
            "cpus": limits.cpus,
            "memory": limits.memory,
            "labels": args.config.labels,
            "running": True,
        }

    def cluster(self) -> Cluster:
        """What every target gives back."""
        return Cluster(
            hosts=[
                HostFacts(
                    replica=replica,
                    address=Output.from_input(str(address(self.args.found.network, replica))),
                    cpus=self.limits[replica.role].cpus,
                    memory=self.limits[replica.role].memory,
                    create_time=host.created,
                )
                for replica, host in self.hosts.items()
            ],
            bucket=Output.from_input(BUCKET),
            operator_bucket=Output.from_input("sftp:///bucket"),
            host_keys=self.ready.hostKeys,
            poll_seconds=1.0,
            runtimes=RUNTIMES,
            operator_runtimes=str(RUNTIMES_HERE),
            shared_cpus=os.cpu_count(),
            depends_on=[self.ready],
        )
