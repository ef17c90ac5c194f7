"""A cluster on the machine in front of you, as one component."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions

from infra import backend
from infra.cluster import ClusterResources, HostFacts
from infra.lxd.bucket import BucketVolume
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import Firewall, rules
from infra.lxd.host import HostContainer
from infra.lxd.identity import Identity
from infra.lxd.image import RUNTIMES_HERE
from infra.lxd.layout import BUCKET, RUNTIMES, address, port, sizes
from infra.lxd.network import BridgeNetwork
from infra.lxd.preflight import PreflightResult
from infra.lxd.project import Project
from infra.lxd.ready import Ready
from infra.lxd.seal import Seal
from infra.lxd.wall import wall
from infra.spec import ClusterSpec, Replica
from infra.templates import ROOT


@dataclass(frozen=True)
class LxdClusterArgs:
    """All inputs of a local cluster; `found` is the machine's state."""

    stack: str
    spec: ClusterSpec
    config: LxdConfig
    found: PreflightResult
    authorized_key: Output[str]


def host_props(
    spec: ClusterSpec, config: LxdConfig, found: PreflightResult, authorized_key: Input[str]
) -> dict[Replica, dict[str, Any]]:
    """Return the inputs of each host; pure but for the number of processors here."""
    own, network = found.names, found.network
    limits = sizes(spec, os.cpu_count() or 1, config.cpus, config.memory)
    return {
        replica: {
            "project": own.project,
            "name": replica.name,
            "image": found.image,
            "pool": config.storage_pool,
            "bridge": own.bridge,
            "port": port(own.bridge, replica),
            "address": str(address(network, replica)),
            "gateway": str(network[1]),
            "bucket": own.bucket,
            "runtime": str(found.runtime),
            "runtimes": str(RUNTIMES_HERE),
            "authorizedKey": authorized_key,
            "wall": wall(spec.firewall, network, replica.role),
            "machineType": spec.roles[replica.role].machine_type,
            "cpus": limits[replica.role].cpus,
            "memory": limits[replica.role].memory,
            "disk": config.disk_of(replica.role),
            "labels": config.labels,
            "running": True,
        }
        for replica in spec.replicas
    }


class LxdCluster(ComponentResource):
    """Identity, project, bridge, bucket, firewall, and a host a replica."""

    def __init__(self, name: str, args: LxdClusterArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:lxd:Cluster", name, None, opts)
        self.args = args
        own, network = args.found.names, args.found.network
        identity = Identity("identity", {"project": own.project}, ResourceOptions(parent=self))
        inside = ResourceOptions(parent=self, depends_on=[identity])
        labels = {"stack": args.stack, "checkout": str(ROOT), "backend": backend.url(ROOT)}
        project = Project("project", {"name": own.project, **labels}, inside)
        # First made, last deleted: what an interrupted run left goes with it.
        first = ResourceOptions(parent=self, depends_on=[project])
        bridge = BridgeNetwork("network", {"name": own.bridge, "range": str(network)}, first)
        # Deleted in the other order: the bucket takes the last hosts with it, and so sets the bridge free.
        within = ResourceOptions(parent=self, depends_on=[bridge])
        self.volume = {"project": own.project, "pool": args.config.storage_pool, "name": own.bucket}
        bucket = BucketVolume("bucket", {**self.volume, "size": args.found.bucket_size}, within)
        firewall = Firewall("firewall", {"table": own.table, "rules": rules(args.spec, own.table, own.bridge, network)}, first)
        # No host starts before the firewall stands.
        # With `pulumi up --replace`, too, an old host goes before the new one of its name comes: else the new one would go.
        before = ResourceOptions(parent=self, depends_on=[bucket, firewall], delete_before_replace=True)
        self.props = host_props(args.spec, args.config, args.found, args.authorized_key)
        self.hosts = {replica: HostContainer(replica.name, props, before) for replica, props in self.props.items()}
        self.ready = Ready(
            "ready",
            {
                "project": own.project,
                "hosts": {replica.name: props["address"] for replica, props in self.props.items()},
                "created": {replica.name: host.created for replica, host in self.hosts.items()},
                "started": {replica.name: host.started for replica, host in self.hosts.items()},
                "unrecorded": [],
            },
            ResourceOptions(parent=self, depends_on=list(self.hosts.values())),
        )
        self.register_outputs({})

    def seal(self, last: Sequence[Resource]) -> None:
        """Declare the bucket's guard after the rest of the stack: the last resource is destroyed first."""
        wish = {"retain": self.args.config.retain_bucket, "force": self.args.config.force_destroy}
        Seal("seal", {**self.volume, **wish}, ResourceOptions(parent=self, depends_on=list(last)))

    def cluster(self) -> ClusterResources:
        """Return the target's result."""
        return ClusterResources(
            hosts=[
                HostFacts(
                    replica=replica,
                    address=Output.from_input(str(self.props[replica]["address"])),
                    cpus=self.props[replica]["cpus"],
                    memory=int(self.props[replica]["memory"]),
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
            last=self.seal,
        )
