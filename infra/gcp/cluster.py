"""A cluster on Google Cloud, as one component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pulumi
from pulumi import ComponentResource, Output, Resource, ResourceOptions

from infra.cluster import ClusterResources, HostFacts
from infra.cost import Cost
from infra.gcp.api import COMPUTE
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery
from infra.gcp.firewall import IAP_RANGE, ClusterFirewall, FirewallArgs
from infra.gcp.hostkeys import HostKeys
from infra.gcp.identity import IdentityArgs, ServiceIdentity
from infra.gcp.image import ImageArchive, image, python, startup_script, version
from infra.gcp.instances import HostArgs, InstanceHost
from infra.gcp.names import GoogleNames
from infra.gcp.network import ClusterNetwork, NetworkArgs
from infra.gcp.ready import HostsReady
from infra.gcp.runtime import RuntimeArchive
from infra.gcp.storage import Storage, StorageArgs
from infra.gcp.zones import Place
from infra.inventory import PowerAccess
from infra.runtime.recipe import Recipe, recipe
from infra.spec import ClusterSpec, Replica, Role

# Requests cost money here: 31 hosts that look at the bucket each second, and say how they are each 5, cost 20 cents an hour.
POLL_SECONDS = 4.0
# Source: Compute Engine documentation, "Predefined metadata keys" and "Preemptible VM instances".
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"


@dataclass(frozen=True)
class Surroundings:
    """State of the project before an update.

    `endpoint` is the Compute API's, where host keys are read, `storage` the storage API's, where runtimes are uploaded.
    `bucket_left`: this stack's bucket exists without a cluster.
    """

    place: Place
    names: GoogleNames
    bucket: str
    endpoint: str
    storage: str
    cost: Cost | None = None
    bucket_left: bool = False
    _: KW_ONLY
    survey: Discovery


@dataclass(frozen=True)
class GcpClusterArgs:
    """All inputs of a cluster."""

    spec: ClusterSpec
    config: GcpConfig
    found: Surroundings
    authorized_key: Output[str]


class GcpCluster(ComponentResource):
    """Network, firewall, identities, bucket, and a host a replica.

    The longest chain of dependencies has 5: network, subnet (or firewall), host, host keys, the operator's files.
    """

    hosts: Mapping[Replica, InstanceHost]

    def __init__(self, name: str, args: GcpClusterArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Cluster", name, None, opts)
        self.args = args
        config, spec, place, names = args.config, args.spec, args.found.place, args.found.names
        inside = ResourceOptions(parent=self)
        network, subnet, firewall_project, holds = self._network(inside)
        labels = {**config.labels, "scaletier-stack": names.stack}
        storage = Storage(
            "storage",
            StorageArgs(place, args.found.bucket, labels, config.retain_bucket, config.force_destroy, args.found.bucket_left),
            inside,
        )
        identity = ServiceIdentity(
            "identity", IdentityArgs(place.project, names, tuple(spec.roles), config.service_account), inside
        )
        bindings = identity.grant(storage.bucket)
        operator, shared = config.operator_cidr or IAP_RANGE, args.found.survey.subnet is not None
        rules: tuple[Resource, ...] = ()
        if config.firewall:
            inside_alone = config.network if config.closed else None
            fetching = tuple(role for role, item in spec.roles.items() if item.accelerator and config.image is None)
            table = FirewallArgs(
                firewall_project, names, network, spec, identity.emails, operator, shared, inside_alone, fetching
            )
            rules = ClusterFirewall("firewall", table, inside).rules
        gpus = any(item.accelerator for item in spec.roles.values())
        self.python = python(gpus)
        recipes = {role: recipe(config.runtime_version, item.accelerator, self.python) for role, item in spec.roles.items()}
        runtimes = {item: self._runtime(item, storage.bucket, inside) for item in dict.fromkeys(recipes.values())}
        scripts = {role: self._script(role, recipes[role], runtimes[recipes[role]], storage.bucket) for role in spec.roles}
        self.hosts = {
            replica: InstanceHost(
                replica.name,
                HostArgs(
                    place=place,
                    names=names,
                    replica=replica,
                    role=spec.roles[replica.role],
                    image=image(config.image, gpus),
                    disk_type=config.boot_disk_type,
                    disk_size=config.boot_disk_size,
                    network=None if shared else config.network,
                    subnet=subnet,
                    holds=holds,
                    account=identity.emails[replica.role],
                    authorized_key=args.authorized_key,
                    startup_script=scripts[replica.role],
                    labels=config.labels,
                    public_address=config.public_address,
                ),
                # No host starts before the firewall stands and it may use the bucket.
                [*rules, *bindings[replica.role]],
                inside,
            )
            for replica in spec.replicas
        }
        jobs = {replica.name: host.made for replica, host in self.hosts.items() if replica.role.runs_jobs}
        identity.let_start(place.zone, jobs)
        self.storage, self.keys = storage, self._keys()
        versions = {replica.name: scripts[replica.role].apply(version) for replica in spec.replicas}
        # It asks of hosts that have been changed.
        changed = ResourceOptions(parent=self, depends_on=list(self.hosts.values()))
        HostsReady("ready", {**self._asked(), "scripts": versions, "timeout": config.ready_timeout}, changed)
        self.register_outputs({"bucket": storage.bucket})

    def _network(self, opts: ResourceOptions) -> tuple[Output[str], Output[str], str, Resource | None]:
        """Return the links of network and subnet, the network's project, and the subnet if the stack owns it."""
        config, facts, other = self.args.config, self.args.found, self.args.found.survey.subnet
        if other:
            return Output.from_input(other.network), Output.from_input(other.link), other.project, None
        own = ClusterNetwork("network", NetworkArgs(facts.place, facts.names, config.network, config.flow_logs), opts)
        return own.network, own.subnet, facts.place.project, own.holds

    def _runtime(self, found: Recipe, bucket: Output[str], opts: ResourceOptions) -> RuntimeArchive:
        facts = self.args.found
        return RuntimeArchive(
            f"python-{found.python}{'-gpu' if found.cuda else ''}",
            {
                "endpoint": facts.storage,
                "project": facts.place.project,
                "bucket": bucket,
                "python": found.python,
                "requirements": list(found.requirements),
                "constraints": list(found.constraints),
            },
            opts,
        )

    def _script(self, role: Role, found: Recipe, runtime: RuntimeArchive, bucket: Output[str]) -> Output[str]:
        config, accelerator = self.args.config, self.args.spec.roles[role].accelerator
        other = self.args.found.survey.subnet
        network = other.range if other else config.network
        return Output.all(bucket=bucket, sha256=runtime.sha256).apply(
            lambda known: startup_script(
                ImageArchive(found, known["bucket"], known["sha256"]), accelerator, config.idle_timeout, network, config.closed
            )
        )

    def _asked(self) -> dict[str, Any]:
        """Return the inputs for reading the guest attributes of all hosts."""
        facts = self.args.found
        return {
            "endpoint": facts.endpoint,
            "project": facts.place.project,
            "zone": facts.place.zone,
            "hosts": {replica.name: host.instance for replica, host in self.hosts.items()},
            "created": {replica.name: host.instance_id for replica, host in self.hosts.items()},
        }

    def _keys(self) -> HostKeys:
        inputs = {**self._asked(), "timeout": self.args.config.host_key_timeout}
        return HostKeys("host-keys", inputs, ResourceOptions(parent=self))

    def _ssh_host(self, host: InstanceHost) -> Output[str]:
        """Return the host for ssh: the instance's name with IAP, else the address that the operator reaches."""
        if self.args.config.operator_cidr is None:
            return Output.from_input(host.instance)
        # A host that is stopped has no public address until it runs again.
        return host.public_address.apply(lambda found: found or host.address)

    def cluster(self) -> ClusterResources:
        """Return the target's result."""
        spec, place, cost = self.args.spec, self.args.found.place, self.args.found.cost
        self.keys.late.apply(_warn)
        shapes = {role: self.args.found.survey.catalogue.machines[item.machine_type] for role, item in spec.roles.items()}
        instances = f"projects/{place.project}/zones/{place.zone}/instances"
        facts = [
            HostFacts(
                replica=replica,
                address=host.address,
                cpus=shapes[replica.role].cpus,
                memory=int(shapes[replica.role].memory * 2**30),
                hourly_cost=cost.host[replica.role] if cost else None,
                ssh_host=self._ssh_host(host),
                create_time=host.create_time,
                start=f"{instances}/{host.instance}/start" if replica.role.runs_jobs else None,
            )
            for replica, host in self.hosts.items()
        ]
        by_ssh_host = Output.all(
            keys=self.keys.hostKeys,
            ssh_hosts=Output.all(**{fact.replica.name: fact.ssh_host for fact in facts}),
        ).apply(lambda known: {known["ssh_hosts"][name]: key for name, key in known["keys"].items()})
        bucket = self.storage.bucket.apply(lambda name: f"gs://{name}")
        through_iap = f"gcloud compute start-iap-tunnel %h %p --listen-on-stdin --project {place.project} --zone {place.zone}"
        return ClusterResources(
            hosts=facts,
            bucket=bucket,
            operator_bucket=bucket,
            host_keys=by_ssh_host,
            poll_seconds=POLL_SECONDS,
            proxy_command=None if self.args.config.operator_cidr else through_iap,
            power=_power(self.args.found.endpoint),
            hourly_costs={**{str(role): usd for role, usd in cost.roles.items()}, "network": cost.network} if cost else None,
            tensorflow=self.args.config.runtime_version,
            python=self.python,
            depends_on=[self.keys],
        )


def _power(endpoint: str) -> PowerAccess:
    """Return the requests that start hosts.

    If the operator uses an endpoint of its own, hosts do not: they reach Google's without a public address.
    """
    return PowerAccess(
        url=COMPUTE[2],
        operator_url=endpoint,
        token=f"{_METADATA}/service-accounts/default/token",
        token_command="gcloud auth application-default print-access-token",  # noqa: S106  a command
        preempted=f"{_METADATA}/preempted",
        headers={"Metadata-Flavor": "Google"},
    )


def _warn(late: Sequence[str]) -> None:
    if late:
        pulumi.log.warn(
            f"no host key yet of {', '.join(late)}, so ssh refuses them: `pulumi up` looks again; "
            "if it stays so, see the instance's serial output, and that its image has Google's guest agent"
        )
