"""A cluster on Google Cloud, as one component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, Output, ResourceOptions

from infra.cluster import Cluster, HostFacts
from infra.cost import Cost
from infra.gcp.config import GcpConfig
from infra.gcp.firewall import IAP_RANGE, ClusterFirewall, FirewallArgs
from infra.gcp.hostkeys import HostKeys
from infra.gcp.identity import Identity, IdentityArgs
from infra.gcp.image import image, startup_script
from infra.gcp.instances import Host, HostArgs
from infra.gcp.machines import machine
from infra.gcp.names import Names
from infra.gcp.network import ClusterNetwork, NetworkArgs
from infra.gcp.storage import Storage, StorageArgs
from infra.gcp.zones import Place
from infra.spec import ClusterSpec, Replica

# As on every target: 31 hosts that look at the bucket every second cost 5 cents an hour.
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Found:
    """What was seen before anything is made; `endpoint` is the Compute API's, where the host keys are read."""

    place: Place
    names: Names
    bucket: str
    endpoint: str
    cost: Cost | None = None


@dataclass(frozen=True)
class GcpClusterArgs:
    """All that a cluster is made from."""

    spec: ClusterSpec
    config: GcpConfig
    found: Found
    authorized_key: Output[str]


class GcpCluster(ComponentResource):
    """Network, firewall, identities, bucket, and a host a replica.

    The longest chain of dependencies has 5: network, subnet (or firewall), host, host keys, the operator's files.
    """

    hosts: Mapping[Replica, Host]

    def __init__(self, name: str, args: GcpClusterArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Cluster", name, None, opts)
        self.args = args
        config, spec, place, names = args.config, args.spec, args.found.place, args.found.names
        inside = ResourceOptions(parent=self)
        network = ClusterNetwork("network", NetworkArgs(place, names, config.network, config.flow_logs), inside)
        labels = {**config.labels, "scaletier-stack": names.stack}
        storage = Storage(
            "storage", StorageArgs(place, args.found.bucket, labels, config.retain_bucket, config.force_destroy), inside
        )
        identity = Identity("identity", IdentityArgs(place.project, names, tuple(spec.roles)), inside)
        bindings = identity.grant(storage.bucket)
        operator = config.operator_cidr or IAP_RANGE
        firewall = ClusterFirewall(
            "firewall", FirewallArgs(place.project, names, network.network, spec, identity.emails, operator), inside
        )
        scripts = {
            role: startup_script(config.runtime_version, found.accelerator, config.idle_timeout)
            for role, found in spec.roles.items()
        }
        self.hosts = {
            replica: Host(
                replica.name,
                HostArgs(
                    place=place,
                    names=names,
                    replica=replica,
                    role=spec.roles[replica.role],
                    image=image(config.image, spec.roles[replica.role].accelerator),
                    disk_type=config.boot_disk_type,
                    disk_size=config.boot_disk_size,
                    network=config.network,
                    subnet=network.subnet,
                    account=identity.emails[replica.role],
                    authorized_key=args.authorized_key,
                    startup_script=scripts[replica.role],
                    labels=config.labels,
                    public_address=config.public_address,
                ),
                # No host starts before the firewall stands and it may use the bucket.
                [*firewall.rules, *bindings[replica.role]],
                inside,
            )
            for replica in spec.replicas
        }
        self.storage, self.keys = storage, self._keys()
        self.register_outputs({"bucket": storage.bucket})

    def _keys(self) -> HostKeys:
        found = self.args.found
        return HostKeys(
            "host-keys",
            {
                "endpoint": found.endpoint,
                "project": found.place.project,
                "zone": found.place.zone,
                "hosts": {replica.name: host.instance for replica, host in self.hosts.items()},
                "created": {replica.name: host.instance_id for replica, host in self.hosts.items()},
                "timeout": self.args.config.host_key_timeout,
            },
            ResourceOptions(parent=self),
        )

    def _ssh_host(self, host: Host) -> Output[str]:
        """What ssh connects to: the instance's name through IAP, else the address that the operator's range reaches."""
        if self.args.config.operator_cidr is None:
            return Output.from_input(host.instance)
        # A host that is stopped has no public address until it runs again.
        return host.public_address.apply(lambda found: found or host.address)

    def cluster(self) -> Cluster:
        """What every target gives back."""
        spec, place, cost = self.args.spec, self.args.found.place, self.args.found.cost
        self.keys.late.apply(_warn)
        shapes = {role: machine(found.machine_type) for role, found in spec.roles.items()}
        facts = [
            HostFacts(
                replica=replica,
                address=Output.from_input(host.address),
                cpus=shapes[replica.role].cpus,
                memory=int(shapes[replica.role].memory * 2**30),
                hourly_cost=cost.host[replica.role] if cost else None,
                ssh_host=self._ssh_host(host),
                create_time=host.create_time,
            )
            for replica, host in self.hosts.items()
        ]
        by_ssh_host = Output.all(
            keys=self.keys.hostKeys,
            ssh_hosts=Output.all(**{fact.replica.name: fact.ssh_host for fact in facts}),
        ).apply(lambda known: {known["ssh_hosts"][name]: key for name, key in known["keys"].items()})
        bucket = self.storage.bucket.apply(lambda name: f"gs://{name}")
        through_iap = f"gcloud compute start-iap-tunnel %h %p --listen-on-stdin --project {place.project} --zone {place.zone}"
        return Cluster(
            hosts=facts,
            bucket=bucket,
            operator_bucket=bucket,
            host_keys=by_ssh_host,
            poll_seconds=_POLL_SECONDS,
            proxy_command=None if self.args.config.operator_cidr else through_iap,
            hourly_costs={**{str(role): usd for role, usd in cost.roles.items()}, "network": cost.network} if cost else None,
            tensorflow=self.args.config.runtime_version,
            depends_on=[self.keys],
        )


def _warn(late: Sequence[str]) -> None:
    if late:
        pulumi.log.warn(
            f"no host key yet of {', '.join(late)}, so ssh refuses them: `pulumi up` looks again; "
            "if it stays so, see the instance's serial output, and that its image has Google's guest agent"
        )
