"""A cluster on Google Cloud, as one component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi import ComponentResource, Output, Resource, ResourceOptions

from infra.cost import Cost
from infra.gcp.api import COMPUTE
from infra.gcp.bucket_guard import GcpBucketGuard
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery
from infra.gcp.firewall import IAP_RANGE, ClusterFirewall
from infra.gcp.hostkeys import HostKeys
from infra.gcp.identity import ServiceIdentity
from infra.gcp.image import StoredRuntime, image, python_version, startup_script, version
from infra.gcp.instances import HostArgs, InstanceHost, fingerprint
from infra.gcp.names import GoogleNames
from infra.gcp.network import ClusterNetwork
from infra.gcp.ready import HostsReady
from infra.gcp.runtime import RuntimeArchive
from infra.gcp.storage import Storage
from infra.inventory import PowerAccess
from infra.runtime.recipe import RuntimeSpec, runtime_spec
from infra.scale_tiers import HostId, Role
from infra.target import ClusterResources

# Google charges for requests: 31 hosts that poll each second, with a heartbeat each 5 s, would cost 20 cents an hour.
POLL_SECONDS = 4.0
# Source: Compute Engine documentation, "Predefined metadata keys" and "Preemptible VM instances".
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"


@dataclass(frozen=True)
class ProjectState:
    """The Google Cloud project before an update.

    `compute` and `storage` are the endpoints of these APIs. `unrecorded_bucket_exists` is True if the stack's bucket exists and
    is not in its state.
    """

    names: GoogleNames
    bucket: str
    compute: str
    storage: str
    cost: Cost | None
    unrecorded_bucket_exists: bool
    discovery: Discovery


def fingerprints(config: GcpConfig, project_state: ProjectState) -> dict[Role, str]:
    """Return the fingerprint of each role's hosts: it changes if an update replaces them."""
    spec, place, subnet = project_state.discovery.spec, project_state.discovery.place, project_state.discovery.subnet
    host_image, network = image(config.image, spec.has_gpus), subnet.link if subnet else str(config.network)
    return {role: fingerprint(role_spec, config, place, host_image, network) for role, role_spec in spec.roles.items()}


class GcpCluster(ComponentResource):
    """Network, firewall, identities, bucket, and the hosts.

    The longest chain of dependencies has 6 resources: network, subnet (or firewall), host, host keys, the operator's files,
    the bucket's guard.
    """

    hosts: Mapping[HostId, InstanceHost]

    def __init__(self, config: GcpConfig, project_state: ProjectState, authorized_key: Output[str]) -> None:
        super().__init__("scaletier:gcp:Cluster", "cluster")
        self.config, self.project_state, self.child_opts = config, project_state, ResourceOptions(parent=self)
        self.spec, self.place, names = project_state.discovery.spec, project_state.discovery.place, project_state.names
        network, subnet, firewall_project, owned_subnet = self._network()
        labels = {**config.labels, "scaletier-stack": names.stack}
        bucket_options = config.retain_bucket, config.force_destroy, project_state.unrecorded_bucket_exists
        self.bucket = Storage(self.place, project_state.bucket, labels, *bucket_options, self.child_opts).bucket
        identity = ServiceIdentity(self.place.project, names, self.spec.roles, config.service_account, self.child_opts)
        bindings = identity.grant(self.bucket)
        rules: tuple[Resource, ...] = ()
        if config.firewall:
            rules = ClusterFirewall(
                firewall_project,
                names,
                network,
                self.spec,
                identity.emails,
                operator=config.operator_cidr or IAP_RANGE,
                shared=owned_subnet is None,
                hosts_range=config.network if config.egress_closed else None,
                gpu_driver_roles=tuple(
                    role for role, spec in self.spec.roles.items() if spec.accelerator and config.image is None
                ),
                opts=self.child_opts,
            ).rules
        self.python = python_version(self.spec.has_gpus)
        specs = {
            role: runtime_spec(config.runtime_version, spec.accelerator, self.python) for role, spec in self.spec.roles.items()
        }
        runtimes = {each: self._runtime(each) for each in dict.fromkeys(specs.values())}
        scripts = {role: self._script(role, each, runtimes[each]) for role, each in specs.items()}
        applied = fingerprints(config, project_state)
        self.hosts = {
            host_id: InstanceHost(
                host_id,
                HostArgs(
                    place=self.place,
                    names=names,
                    role=self.spec.roles[host_id.role],
                    config=config,
                    image=image(config.image, self.spec.has_gpus),
                    fingerprint=applied[host_id.role],
                    subnet=subnet,
                    owned_subnet=owned_subnet,
                    account=identity.emails[host_id.role],
                    authorized_key=authorized_key,
                    startup_script=scripts[host_id.role],
                ),
                # No host starts before its firewall exists and its account may use the bucket.
                [*rules, *bindings[host_id.role]],
                self.child_opts,
            )
            for host_id in self.spec.hosts
        }
        outputs = {id_.name: host.instance_name_output for id_, host in self.hosts.items() if id_.role.runs_jobs}
        identity.allow_start(self.place.zone, outputs)
        # The inputs of both resources that read guest attributes.
        attribute_inputs: dict[str, Any] = {
            "endpoint": project_state.compute,
            "project": self.place.project,
            "zone": self.place.zone,
            "hosts": {host_id.name: host.instance_name for host_id, host in self.hosts.items()},
            "created": {host_id.name: host.instance_id for host_id, host in self.hosts.items()},
        }
        self.keys = HostKeys("host-keys", {**attribute_inputs, "timeout": config.host_key_timeout}, self.child_opts)
        versions = {host_id.name: scripts[host_id.role].apply(version) for host_id in self.spec.hosts}
        after_hosts = ResourceOptions(parent=self, depends_on=list(self.hosts.values()))
        HostsReady("ready", {**attribute_inputs, "scripts": versions, "timeout": config.ready_timeout}, after_hosts)
        self.register_outputs({"bucket": self.bucket})

    def _network(self) -> tuple[Output[str], Output[str], str, Resource | None]:
        """Return the links of network and subnet, the network's project, and the subnet if the stack owns it."""
        state, config = self.project_state, self.config
        if existing := state.discovery.subnet:
            return Output.from_input(existing.network), Output.from_input(existing.link), existing.project, None
        own = ClusterNetwork(self.place, state.names, config.network, config.flow_logs, self.child_opts)
        return own.network, own.subnet, self.place.project, own.subnet_resource

    def _runtime(self, spec: RuntimeSpec) -> RuntimeArchive:
        return RuntimeArchive(
            f"python-{spec.python}{'-gpu' if spec.cuda else ''}",
            {
                "endpoint": self.project_state.storage,
                "project": self.place.project,
                "bucket": self.bucket,
                "python": spec.python,
                "requirements": list(spec.requirements),
                "constraints": list(spec.constraints),
            },
            self.child_opts,
        )

    def _script(self, role: Role, spec: RuntimeSpec, runtime: RuntimeArchive) -> Output[str]:
        config, accelerator, existing = self.config, self.spec.roles[role].accelerator, self.project_state.discovery.subnet
        network = existing.range if existing else config.network
        return Output.all(spec, self.bucket, runtime.sha256).apply(
            lambda parts: startup_script(StoredRuntime(*parts), accelerator, config.idle_timeout, network, config.egress_closed)
        )

    def _ssh_host(self, host: InstanceHost) -> Output[str]:
        """Return what ssh connects to: the instance's name with IAP, else the address that the operator reaches."""
        if self.config.operator_cidr is None:
            return Output.from_input(host.instance_name)
        # A stopped host has no public address until it runs again.
        return host.public_address.apply(lambda public: public or host.address)

    def resources(self) -> ClusterResources:
        """Return the properties of the resources for the inventory and the stack's outputs."""
        place, cost = self.place, self.project_state.cost
        self.keys.late.apply(_warn_of_missing_keys)
        machines = {
            role: self.project_state.discovery.catalogue.machines[spec.machine_type] for role, spec in self.spec.roles.items()
        }
        instances = f"projects/{place.project}/zones/{place.zone}/instances"
        hosts = {
            host_id: {
                "address": host.address,
                "ssh_host": self._ssh_host(host),
                "cpus": machines[host_id.role].cpus,
                "memory_bytes": int(machines[host_id.role].memory * 2**30),
                "hourly_cost": cost.host[host_id.role] if cost else None,
                "create_time": host.create_time,
                "start": f"{instances}/{host.instance_name}/start" if host_id.role.runs_jobs else None,
            }
            for host_id, host in self.hosts.items()
        }
        ssh_hosts = {host_id.name: fields["ssh_host"] for host_id, fields in hosts.items()}
        host_keys = Output.all(keys=self.keys.hostKeys, ssh_hosts=ssh_hosts).apply(
            lambda values: {values["ssh_hosts"][name]: key for name, key in values["keys"].items()}
        )
        bucket = self.bucket.apply(lambda name: f"gs://{name}")

        def declare_guard(last: Sequence[Resource]) -> None:
            config = self.config
            # An imported bucket has this setting only after the next update.
            force = config.force_destroy and not self.project_state.unrecorded_bucket_exists
            on_destroy = {"retain": config.retain_bucket, "force": force, "disrupt": config.disrupt_jobs}
            # It has no parent, as it depends on all that is in this component.
            GcpBucketGuard("guard", {"bucket": self.bucket, **on_destroy}, ResourceOptions(depends_on=[*last, self]))

        through_iap = f"gcloud compute start-iap-tunnel %h %p --listen-on-stdin --project {place.project} --zone {place.zone}"
        return ClusterResources(
            hosts=hosts,
            host_keys=host_keys,
            inventory_fields={
                "bucket": bucket,
                "operator_bucket": bucket,
                "poll_seconds": POLL_SECONDS,
                "proxy_command": None if self.config.operator_cidr else through_iap,
                "power": _power(self.project_state.compute),
                "tensorflow": self.config.runtime_version,
                "python": self.python,
            },
            hourly_costs={**{str(role): usd for role, usd in cost.roles.items()}, "network": cost.network} if cost else None,
            ready=[self.keys],
            declare_guard=declare_guard,
        )


def _power(endpoint: str) -> PowerAccess:
    """Return the access to the API that starts hosts.

    The operator may have configured another endpoint. Hosts always use Google's, which they reach without a public address.
    """
    return PowerAccess(
        url=COMPUTE.default,
        operator_url=endpoint,
        token=f"{_METADATA}/service-accounts/default/token",
        token_command="gcloud auth application-default print-access-token",  # noqa: S106  a command
        preempted=f"{_METADATA}/preempted",
        headers={"Metadata-Flavor": "Google"},
    )


def _warn_of_missing_keys(hosts: Sequence[str]) -> None:
    if hosts:
        pulumi.log.warn(
            f"no host key yet of {', '.join(hosts)}, so ssh refuses them: `pulumi up` looks again; "
            "if it stays so, see the instance's serial output, and that its image has Google's guest agent"
        )
