"""The hosts: each is an instance and a resource of its own, so a change of one does not affect others."""

from __future__ import annotations

import re
from collections.abc import Sequence
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

from infra.gcp.config import GcpConfig
from infra.gcp.names import GoogleNames, address
from infra.gcp.zones import Place
from infra.scale_tiers import Accelerator, HostId, RoleSpec

FINGERPRINT = "scaletier-definition"
"""The metadata key of a host's fingerprint. A new value alone replaces no host, and no program of the host reads it."""
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


@dataclass(frozen=True)
class HostArgs:
    """Inputs of one host; `startup_script` runs at every boot.

    `fingerprint` is that of the settings whose change replaces the host. `subnet` is the link of the host's subnet, and
    `owned_subnet` its resource, or None if the stack does not own the subnet: then the host's address is reserved.
    """

    place: Place
    names: GoogleNames
    role: RoleSpec
    config: GcpConfig
    image: str
    fingerprint: str
    subnet: Output[str]
    owned_subnet: Resource | None
    account: Output[str]
    authorized_key: Output[str]
    startup_script: Output[str]


class InstanceHost(ComponentResource):
    """A host: its instance and its address, which is reserved if the stack does not own the subnet.

    Outputs: `instance_name`, `instance_name_output` (the same, known once the instance exists), `address`
    (internal), `public_address` (empty if it has none), `instance_id`, `create_time` (RFC 3339).
    """

    instance_name: str
    instance_name_output: Output[str]
    address: Output[str]
    public_address: Output[str]
    instance_id: Output[str]
    create_time: Output[str]

    def __init__(self, host_id: HostId, args: HostArgs, after: Sequence[Resource], opts: ResourceOptions) -> None:
        super().__init__("scaletier:gcp:Host", host_id.name, None, opts)
        self.instance_name = args.names.resource_name(host_id.name)
        role, config = args.role, args.config
        self.address = (
            Output.from_input(address(config.network, host_id)) if args.owned_subnet else self._reserved(host_id, args)
        )
        own = {"scaletier-stack": args.names.stack, "scaletier-role": str(host_id.role), "scaletier-replica": host_id.name}
        public = [InstanceNetworkInterfaceAccessConfigArgs(network_tier="PREMIUM")] if config.public_address else None
        instance = Instance(
            host_id.name,
            name=self.instance_name,
            project=args.place.project,
            zone=args.place.zone,
            machine_type=role.machine_type,
            boot_disk=InstanceBootDiskArgs(
                auto_delete=True,
                initialize_params=InstanceBootDiskInitializeParamsArgs(
                    image=args.image, type=config.boot_disk_type, size=config.boot_disk_size
                ),
            ),
            network_interfaces=[
                InstanceNetworkInterfaceArgs(subnetwork=args.subnet, network_ip=self.address, access_configs=public)
            ],
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
                FINGERPRINT: args.fingerprint,
            },
            labels={**config.labels, **own},
            can_ip_forward=False,
            deletion_protection=False,
            allow_stopping_for_update=True,
            # A host that was preempted, or stopped itself when idle, is started again by `pulumi up`.
            desired_status="RUNNING",
            # The name and the address are free only once the old instance is deleted.
            opts=ResourceOptions(
                parent=self,
                depends_on=list(after),
                delete_before_replace=True,
                replacement_trigger=_replacement_trigger(role.accelerator, config.public_address),
                # A new address range replaces the subnet, which Google deletes only if it has no hosts.
                replace_with=[args.owned_subnet] if args.owned_subnet else None,
                # Some machine types include local disks, which this program does not manage.
                ignore_changes=["scratchDisks"],
            ),
        )
        self.instance_name_output = instance.name
        self.instance_id, self.create_time = instance.instance_id, instance.creation_timestamp
        self.public_address = instance.network_interfaces.apply(
            lambda interfaces: (interfaces[0].access_configs[0].nat_ip or "") if interfaces[0].access_configs else ""
        )
        self.register_outputs({"instance": self.instance_name, "address": self.address})

    def _reserved(self, host_id: HostId, args: HostArgs) -> Output[str]:
        """Reserve an address and return it: a recreated host has the same, so its peers can reach it."""
        reserved = Address(
            f"{host_id.name}-address",
            name=self.instance_name,
            project=args.place.project,
            region=args.place.region,
            address_type="INTERNAL",
            subnetwork=args.subnet,
            opts=ResourceOptions(parent=self, delete_before_replace=True),
        )
        return reserved.address


def fingerprint(role: RoleSpec, config: GcpConfig, place: Place, image: str, network: str) -> str:
    """Return the settings whose change replaces a host, as a text; `network` is the stack's range, or an existing subnet.

    Images are in one spelling, since the provider replaces no host for another spelling.
    """
    image = re.sub("^([^/]+)/([^/]+)$", r"projects/\1/global/images/family/\2", image)
    trigger = _replacement_trigger(role.accelerator, config.public_address)
    return f"{place.zone}, {image}, {config.boot_disk_type} {config.boot_disk_size}, {network}, {trigger}, spot {role.spot}"


def _replacement_trigger(gpus: Accelerator | None, public: bool) -> str:
    """Return a text that changes if the host's GPUs change or it gets or loses a public address: then it is replaced.

    If the inputs no longer name GPUs or an address, the provider takes them from the existing host, and would keep them.
    """
    access = "public" if public else "private"
    return f"{access}, {gpus.count} x {gpus.type}" if gpus else access


def _scheduling(role: RoleSpec) -> InstanceSchedulingArgs:
    """Return the scheduling options: spot hosts and hosts with GPUs cannot migrate while they run.

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
