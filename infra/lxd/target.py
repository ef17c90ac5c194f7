"""The local target: a cluster on the machine in front of you, as one component."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pulumi
import pylxd.exceptions
from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions

from infra import backend
from infra.dynamic import changes
from infra.lxd import host
from infra.lxd.api import LxdError, errors
from infra.lxd.bucket import BucketVolume
from infra.lxd.bucket_guard import BucketGuard, running
from infra.lxd.config import LxdConfig
from infra.lxd.firewall import Firewall, host_rules, rules
from infra.lxd.host import HostContainer
from infra.lxd.identity import Identity
from infra.lxd.image import RUNTIMES_HERE
from infra.lxd.layout import BUCKET, RUNTIMES, address, port, sizes
from infra.lxd.network import BridgeNetwork
from infra.lxd.preflight import PreflightResult, preflight
from infra.lxd.project import Project
from infra.lxd.ready import Ready
from infra.scale_tiers import ClusterSpec, Replica, TargetError
from infra.state import StackState
from infra.target import ClusterResources, Target
from infra.templates import ROOT


def host_props(
    spec: ClusterSpec, config: LxdConfig, facts: PreflightResult, authorized_key: Input[str]
) -> dict[Replica, dict[str, Any]]:
    """Return the inputs of each host; pure but for the number of processors here."""
    names, network = facts.names, facts.network
    limits = sizes(spec, os.cpu_count() or 1, config.cpus, config.memory)
    return {
        replica: {
            "project": names.project,
            "name": replica.name,
            "image": facts.image,
            "pool": config.storage_pool,
            "bridge": names.bridge,
            "port": port(names.bridge, replica),
            "address": str(address(network, replica)),
            "gateway": str(network[1]),
            "bucket": names.bucket,
            "runtime": str(facts.runtime),
            "runtimes": str(RUNTIMES_HERE),
            "authorizedKey": authorized_key,
            "firewall": host_rules(network, replica.role),
            "machineType": spec.roles[replica.role].machine_type,
            "cpus": limits[replica.role].cpus,
            "memory": limits[replica.role].memory,
            "disk": config.disk_of(replica.role),
            "labels": config.labels,
            "running": True,
        }
        for replica in spec.replicas
    }


class LxdTarget(Target):
    """Identity, project, bridge, bucket, firewall, and one host for each replica."""

    config_type = LxdConfig

    def __init__(self, stack: str, spec: ClusterSpec, config: LxdConfig, state: StackState) -> None:
        self.stack, self.spec, self.config, self.state = stack, spec, config, state
        self.facts = preflight(stack, spec, config, state)
        for warning in self.facts.warnings:
            pulumi.log.warn(warning)

    def replaced_hosts(self) -> list[str]:
        """Return the hosts that need replacement, since a property differs that no host can change."""
        existing = self.state.of("lxd:Host")
        key = next((str(outputs["publicKey"]) for outputs in self.state.of("operator:OperatorKey").values()), "")
        expected = {replica.name: props for replica, props in host_props(self.spec, self.config, self.facts, key).items()}
        return [name for name in expected if name in existing and changes(existing[name], expected[name]) & host.REPLACE]

    def build(self, authorized_key: Output[str]) -> ClusterResources:
        names, network = self.facts.names, self.facts.network
        cluster = ComponentResource("scaletier:lxd:Cluster", "cluster")
        identity = Identity("identity", {"project": names.project}, ResourceOptions(parent=cluster))
        inside = ResourceOptions(parent=cluster, depends_on=[identity])
        labels = {"stack": self.stack, "checkout": str(ROOT), "backend": backend.url(ROOT)}
        project = Project("project", {"name": names.project, **labels}, inside)
        # First made, last deleted: what an interrupted run left goes with it.
        first = ResourceOptions(parent=cluster, depends_on=[project])
        bridge = BridgeNetwork("network", {"name": names.bridge, "range": str(network)}, first)
        # Pulumi deletes the bucket before the bridge. That deletes leftover hosts too, so nothing uses the bridge any more.
        within = ResourceOptions(parent=cluster, depends_on=[bridge])
        volume = {"project": names.project, "pool": self.config.storage_pool, "name": names.bucket}
        bucket = BucketVolume("bucket", {**volume, "size": self.facts.bucket_size}, within)
        firewall = Firewall(
            "firewall", {"table": names.table, "rules": rules(self.spec, names.table, names.bridge, network)}, first
        )
        # No host starts before the firewall stands.
        # Delete an old host before its replacement is created: both have one name, so a later deletion would hit the new one.
        before = ResourceOptions(parent=cluster, depends_on=[bucket, firewall], delete_before_replace=True)
        props = host_props(self.spec, self.config, self.facts, authorized_key)
        hosts = {replica: HostContainer(replica.name, item, before) for replica, item in props.items()}
        ready = Ready(
            "ready",
            {
                "project": names.project,
                "hosts": {replica.name: item["address"] for replica, item in props.items()},
                "created": {replica.name: container.created for replica, container in hosts.items()},
                "started": {replica.name: container.started for replica, container in hosts.items()},
                "unrecorded": [],
            },
            ResourceOptions(parent=cluster, depends_on=list(hosts.values())),
        )
        cluster.register_outputs({})

        def guard(last: Sequence[Resource]) -> None:
            wish = {"retain": self.config.retain_bucket, "force": self.config.force_destroy}
            BucketGuard("seal", {**volume, **wish}, ResourceOptions(parent=cluster, depends_on=list(last)))

        addresses = [str(item["address"]) for item in props.values()]
        return ClusterResources(
            hosts={replica: {"cpus": item["cpus"], "memory_bytes": int(item["memory"])} for replica, item in props.items()},
            addresses=addresses,
            ssh_hosts=addresses,
            create_times=[container.created for container in hosts.values()],
            host_keys=ready.hostKeys,
            bucket=BUCKET,
            operator_bucket="sftp:///bucket",
            facts={"runtimes": RUNTIMES, "operator_runtimes": str(RUNTIMES_HERE), "shared_cpus": os.cpu_count()},
            ready=[ready],
            guard=guard,
        )

    def read(self, path: str) -> bytes | None:
        """Return a file of the stack's bucket, through the first running host."""
        with suppress(LxdError), errors("LXD"):
            if (through := running(self.facts.names.project)) is not None:
                content: bytes = through.files.get(f"{BUCKET}/{path}")
                return content
        return None

    def create(self, path: str, content: bytes) -> None:
        """Write a file of the stack's bucket unless it exists, through the first running host."""
        try:
            with errors("LXD"):
                if (through := running(self.facts.names.project)) is None:
                    raise LxdError("no host of it runs")
                try:
                    through.files.get(f"{BUCKET}/{path}")
                except pylxd.exceptions.NotFound:
                    through.files.put(f"{BUCKET}/{path}", content, mode=0o644)
        except LxdError as error:
            raise TargetError(f"the bucket does not take {path} ({error}): try again") from None


TARGET = LxdTarget
