"""The hosts: one instance a replica, each on its own, so that a change of one leaves the others alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pulumi import ComponentResource, Output, Resource, ResourceOptions
from pulumi_gcp.compute import (
    Address,
    Instance,
    InstanceBootDiskArgs,
    InstanceBootDiskInitializeParamsArgs,
    InstanceGuestAcceleratorArgs,
    InstanceNetworkInterfaceAccessConfigArgs,
    InstanceNetworkInterfaceArgs,
    InstanceSchedulingArgs,
    InstanceServiceAccountArgs,
    InstanceShieldedInstanceConfigArgs,
)

from infra.gcp.names import GoogleNames, address
from infra.gcp.zones import Place
from infra.spec import Replica, RoleSpec

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


@dataclass(frozen=True)
class HostArgs:
    """Inputs of one host; `disk_size` in GB (2^30 bytes), `startup_script` runs at every boot.

    `network` is the range in which each replica has its address, None if one is to be reserved in a subnet that others use;
    `holds` is the subnet if the stack owns it.
    """

    place: Place
    names: GoogleNames
    replica: Replica
    role: RoleSpec
    image: str
    disk_type: str
    disk_size: int
    network: ipaddress.IPv4Network | None
    subnet: Output[str]
    holds: Resource | None
    account: Output[str]
    authorized_key: Output[str]
    startup_script: Output[str]
    labels: Mapping[str, str]
    public_address: bool = False


class InstanceHost(ComponentResource):
    """A host: its instance and its address.

    Outputs: `instance` (its name), `made` (the same, once it exists), `address` (internal), `public_address` (empty if it has
    none), `instance_id`, `create_time` (RFC 3339).
    """

    instance: str
    made: Output[str]
    address: Output[str]
    public_address: Output[str]
    instance_id: Output[str]
    create_time: Output[str]

    def __init__(self, name: str, args: HostArgs, after: Sequence[Resource], opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Host", name, None, opts)
        self.args = args
        self.instance = args.names.of(args.replica.name)
        self.address = Output.from_input(address(args.network, args.replica)) if args.network else self._reserved()
        role = args.role
        own = {
            "scaletier-stack": args.names.stack,
            "scaletier-role": str(args.replica.role),
            "scaletier-replica": args.replica.name,
        }
        instance = Instance(
            name,
            name=self.instance,
            project=args.place.project,
            zone=args.place.zone,
            machine_type=role.machine_type,
            boot_disk=InstanceBootDiskArgs(
                auto_delete=True,
                initialize_params=InstanceBootDiskInitializeParamsArgs(
                    image=args.image, type=args.disk_type, size=args.disk_size
                ),
            ),
            network_interfaces=[self._interface()],
            guest_accelerators=[InstanceGuestAcceleratorArgs(type=role.accelerator.type, count=role.accelerator.count)]
            if role.accelerator
            else None,
            scheduling=_scheduling(role),
            service_account=InstanceServiceAccountArgs(email=args.account, scopes=list(_SCOPES)),
            shielded_instance_config=InstanceShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
            ),
            metadata={
                "block-project-ssh-keys": "true",
                "enable-oslogin": "FALSE",
                "enable-guest-attributes": "TRUE",
                "serial-port-enable": "FALSE",
                "ssh-keys": args.authorized_key.apply(lambda key: f"admin:{key}"),
                "startup-script": args.startup_script,
            },
            labels={**args.labels, **own},
            can_ip_forward=False,
            deletion_protection=False,
            allow_stopping_for_update=True,
            # A host that was preempted, or stopped itself when idle, is started again by `pulumi up`.
            desired_status="RUNNING",
            # A name and an address belong to one instance at a time.
            opts=ResourceOptions(
                parent=self,
                depends_on=list(after),
                delete_before_replace=True,
                replacement_trigger=self._made_anew_for(),
                # A subnet of another range is another one, and none goes while a host is in it.
                replace_with=[args.holds] if args.holds else None,
                # Some machine types come with local disks of their own, which are none of this program's.
                ignore_changes=["scratchDisks"],
            ),
        )
        self.made = instance.name
        self.instance_id, self.create_time = instance.instance_id, instance.creation_timestamp
        self.public_address = instance.network_interfaces.apply(
            lambda interfaces: (interfaces[0].access_configs[0].nat_ip or "") if interfaces[0].access_configs else ""
        )
        self.register_outputs({"instance": self.instance, "address": self.address})

    def _reserved(self) -> Output[str]:
        """Return an address that stays the same if the host is recreated, so that its peers reach it again."""
        args = self.args
        reserved = Address(
            f"{args.replica.name}-address",
            name=self.instance,
            project=args.place.project,
            region=args.place.region,
            address_type="INTERNAL",
            subnetwork=args.subnet,
            opts=ResourceOptions(parent=self, delete_before_replace=True),
        )
        return reserved.address

    def _made_anew_for(self) -> str:
        """Return the computed properties whose removal needs a new host: GPUs, a public address.

        A host keeps them if its inputs no longer name them, since the provider then computes them.
        """
        gpus, reach = self.args.role.accelerator, "public" if self.args.public_address else "private"
        return f"{reach}, {gpus.count} x {gpus.type}" if gpus else reach

    def _interface(self) -> InstanceNetworkInterfaceArgs:
        public = [InstanceNetworkInterfaceAccessConfigArgs(network_tier="PREMIUM")] if self.args.public_address else None
        return InstanceNetworkInterfaceArgs(subnetwork=self.args.subnet, network_ip=self.address, access_configs=public)


def _scheduling(role: RoleSpec) -> InstanceSchedulingArgs:
    """Return the scheduling: spot hosts and hosts with GPUs cannot migrate while they run.

    Source: Compute Engine documentation, "Spot VMs" and "GPU VMs and host maintenance events".
    """
    if role.spot:
        return InstanceSchedulingArgs(
            provisioning_model="SPOT",
            preemptible=True,
            automatic_restart=False,
            on_host_maintenance="TERMINATE",
            instance_termination_action="STOP",
        )
    return InstanceSchedulingArgs(
        provisioning_model="STANDARD",
        preemptible=False,
        automatic_restart=True,
        on_host_maintenance="TERMINATE" if role.accelerator else "MIGRATE",
    )
