"""The local target: a cluster of LXD containers on this machine, as one component."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import pulumi
import pylxd.exceptions
from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions

from infra import backend
from infra.lxd import host
from infra.lxd.api import LxdError, errors, hosts_of
from infra.lxd.bucket import BucketVolume
from infra.lxd.bucket_guard import BucketGuard, running_host
from infra.lxd.config import LxdConfig
from infra.lxd.files import read_file, retry_request
from infra.lxd.firewall import Firewall, host_rules, rules
from infra.lxd.host import HostContainer
from infra.lxd.identity import StoredProjectName
from infra.lxd.image import LOCAL_RUNTIMES
from infra.lxd.layout import BUCKET, RUNTIMES, address, interface_name, sizes
from infra.lxd.network import BridgeNetwork
from infra.lxd.preflight import PreflightResult, preflight
from infra.lxd.project import Project
from infra.lxd.ready import Ready
from infra.scale_tiers import ClusterSpec, HostId, TargetError
from infra.state import StackState
from infra.target import ClusterResources, Target
from infra.templates import ROOT


def host_props(
    spec: ClusterSpec, config: LxdConfig, result: PreflightResult, authorized_key: Input[str]
) -> dict[HostId, dict[str, Any]]:
    """Return the inputs of each host; of this machine, only the number of processors is read."""
    names, network = result.names, result.network
    limits = sizes(spec, os.cpu_count() or 1, config.cpus, config.memory)
    return {
        host_id: {
            "project": names.project,
            "name": host_id.name,
            "image": result.image,
            "pool": config.storage_pool,
            "bridge": names.bridge,
            "port": interface_name(names.bridge, host_id),
            "address": str(address(network, host_id)),
            "gateway": str(network[1]),
            "bucket": names.bucket,
            "runtime": str(result.runtime),
            "runtimes": str(LOCAL_RUNTIMES),
            "authorizedKey": authorized_key,
            "firewall": host_rules(network, host_id.role),
            "machineType": spec.roles[host_id.role].machine_type,
            "cpus": limits[host_id.role].cpus,
            "memory": limits[host_id.role].memory,
            "disk": config.disk_of(host_id.role),
            "labels": config.labels,
            "running": True,
        }
        for host_id in spec.hosts
    }


class LxdTarget(Target):
    """A cluster of LXD containers: stored project name, project, bridge, bucket, firewall, and the hosts."""

    config_type = LxdConfig

    def __init__(self, stack: str, spec: ClusterSpec, config: LxdConfig, state: StackState) -> None:
        self.stack, self.spec, self.config, self.state = stack, spec, config, state
        self.preflight = preflight(stack, spec, config, state)
        for warning in self.preflight.warnings:
            pulumi.log.warn(warning)

    def replaced_hosts(self) -> list[str]:
        """Return the existing hosts with a changed property that cannot change in place."""
        existing = self.state.of("lxd:Host")
        key = next((str(outputs["publicKey"]) for outputs in self.state.of("operator:OperatorKey").values()), "")
        expected = {host_id.name: props for host_id, props in host_props(self.spec, self.config, self.preflight, key).items()}
        return [name for name in expected if name in existing and host.replacing(existing[name], expected[name])]

    def build(self, authorized_key: Output[str]) -> ClusterResources:
        names, network = self.preflight.names, self.preflight.network
        cluster = ComponentResource("scaletier:lxd:Cluster", "cluster")
        # Created first and so deleted last; this also deletes what an interrupted run left.
        project_name = StoredProjectName("identity", {"project": names.project}, ResourceOptions(parent=cluster))
        after_name = ResourceOptions(parent=cluster, depends_on=[project_name])
        labels = {"stack": self.stack, "checkout": str(ROOT), "backend": backend.url(ROOT)}
        project = Project("project", {"name": names.project, **labels}, after_name)
        after_project = ResourceOptions(parent=cluster, depends_on=[project])
        bridge = BridgeNetwork("network", {"name": names.bridge, "range": str(network)}, after_project)
        # So the bucket is deleted before the bridge; this also deletes leftover hosts, which would still use the bridge.
        after_bridge = ResourceOptions(parent=cluster, depends_on=[bridge])
        volume = {"project": names.project, "pool": self.config.storage_pool, "name": names.bucket}
        bucket = BucketVolume("bucket", {**volume, "size": self.preflight.bucket_size}, after_bridge)
        firewall = Firewall(
            "firewall", {"table": names.table, "rules": rules(self.spec, names.table, names.bridge, network)}, after_project
        )
        # No host starts before the firewall is loaded.
        # Delete an old host before its replacement is created: both have one name, so a later deletion would hit the new one.
        host_options = ResourceOptions(parent=cluster, depends_on=[bucket, firewall], delete_before_replace=True)
        props = host_props(self.spec, self.config, self.preflight, authorized_key)
        hosts = {host_id: HostContainer(host_id.name, item, host_options) for host_id, item in props.items()}
        ready = Ready(
            "ready",
            {
                "project": names.project,
                "hosts": {host_id.name: item["address"] for host_id, item in props.items()},
                "created": {host_id.name: container.created for host_id, container in hosts.items()},
                "started": {host_id.name: container.started for host_id, container in hosts.items()},
                "unrecorded": [],  # a refresh reads the hosts that an interrupted update created
            },
            ResourceOptions(parent=cluster, depends_on=list(hosts.values())),
        )
        cluster.register_outputs({})

        def declare_guard(last: Sequence[Resource]) -> None:
            config = self.config
            on_destroy = {"retain": config.retain_bucket, "force": config.force_destroy, "disrupt": config.disrupt_jobs}
            # "seal" is its name in the states of existing stacks. A refresh in another checkout drops its files from the state.
            BucketGuard("seal", {**volume, **on_destroy}, ResourceOptions(parent=cluster, depends_on=[*last, ready]))

        return ClusterResources(
            hosts={
                host_id: {
                    "address": item["address"],
                    "ssh_host": item["address"],
                    "cpus": item["cpus"],
                    "memory_bytes": item["memory"],
                    "create_time": hosts[host_id].created,
                }
                for host_id, item in props.items()
            },
            host_keys=ready.hostKeys,
            inventory_fields={
                "bucket": BUCKET,
                "operator_bucket": "sftp:///bucket",
                "runtimes": RUNTIMES,
                "operator_runtimes": str(LOCAL_RUNTIMES),
                "shared_cpus": os.cpu_count(),
            },
            ready=[ready],
            declare_guard=declare_guard,
        )

    def read_object(self, path: str) -> bytes | None:
        """Return a file in the stack's bucket, through the first running host.

        LxdError if there are hosts and none runs; with disruptJobs, None.
        """
        project = self.preflight.names.project
        with errors("the bucket"):
            if (instance := running_host(project)) is not None:
                return read_file(instance, f"{BUCKET}/{path}")
            if hosts_of(project) and not self.config.disrupt_jobs:
                raise LxdError(
                    "this removes or replaces hosts, and no host runs that could list their jobs: "
                    "`fab doctor --fix` starts them, or `pulumi config set disruptJobs true`"
                )
        return None

    def create_object(self, path: str, content: bytes) -> None:
        """Write a file in the stack's bucket unless it exists, through the first running host."""
        target = PurePosixPath(BUCKET, path)
        temporary = str(target.with_name(f".{secrets.token_hex(16)}"))
        try:
            with errors("LXD"):
                if (instance := running_host(self.preflight.names.project)) is None:
                    raise LxdError("no host of the stack runs")
                retry_request(lambda: instance.files.put(temporary, content, mode=0o644))
                try:
                    # A put could overwrite another writer's file; ln fails if there is one, like FolderBucket's link(2).
                    link = {"command": ["ln", "--no-target-directory", temporary, str(target)]}
                    operation = instance.api["exec"].post(json=link).json()["operation"]
                    instance.client.operations.wait_for_operation(operation)
                finally:
                    with suppress(pylxd.exceptions.NotFound):  # deleted already, and the answer was lost
                        retry_request(lambda: instance.files.delete(temporary))
                retry_request(lambda: instance.files.get(str(target)))  # raises NotFound if ln failed for another reason
        except LxdError as error:
            raise TargetError(f"the bucket does not take {path} ({error}): try again") from None


TARGET = LxdTarget
