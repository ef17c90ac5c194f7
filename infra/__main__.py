"""The Pulumi program: reads the configuration, declares a cluster on its target, exports the outputs."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings

import pulumi
from pulumi import ResourceOptions

from infra import backend, state
from infra.config import ClusterConfig
from infra.connection import FOLDER
from infra.guard import Change, protect_jobs, removed_hosts, require_same_target
from infra.operator_files import OperatorFiles
from infra.operator_key import OperatorKey
from infra.scale_tiers import SpecError, TargetError
from infra.target import Target
from infra.templates import ROOT

# The exit code for an error that was already printed: Pulumi prints no other.
_EXIT_ERROR_PRINTED = 32


def main() -> None:
    """Build the stack; report every user error in one line."""
    stack = pulumi.get_stack()
    if note := backend.other_backend_note(ROOT):
        pulumi.log.info(note)
    raw = {
        key.partition(":")[2]: value
        for key, value in pulumi.runtime.config.get_config_env().items()
        if key.startswith("scaletier:")
    }
    try:
        previous = state.read_state()
        require_same_target(previous.target, ClusterConfig.target_of(raw))
        target_type = import_target_type(ClusterConfig.target_of(raw))
        config = target_type.config_type.parse(raw)
        target = target_type(stack, config.spec(), config, previous)
        change = Change(removed_hosts(previous.hosts, target.spec), target.replaced_hosts())
        protect_jobs(change, target.read_object, target.create_object, pulumi.runtime.is_dry_run(), config.disrupt_jobs)
        key = OperatorKey("operator-key", comment=f"scaletier-{stack}")
        cluster = target.build(key.publicKey)
    except (SpecError, TargetError) as error:
        pulumi.log.error(str(error))
        # The exit leaves coroutines of the SDK that were never awaited.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        sys.exit(_EXIT_ERROR_PRINTED)
    inventory = cluster.inventory(stack, target.spec, config)
    folder = f"{FOLDER}/{stack}"
    contents = {"folder": folder, "inventory": inventory, "privateKey": key.privateKey}
    files = OperatorFiles("operator-files", contents, ResourceOptions(depends_on=list(cluster.ready)))
    cluster.declare_guard([files])
    # `fab` reads these two from the stack's state on any machine. The inventory is secret only to keep it off the screen.
    pulumi.export("inventory", pulumi.Output.secret(inventory))
    pulumi.export("operatorKey", key.privateKey)
    # A preview shows the other outputs, because they do not come from the inventory, which waits for the hosts.
    pulumi.export("target", config.target)
    pulumi.export("scaleTier", str(target.spec.scale_tier))
    pulumi.export("bucket", cluster.inventory_fields["bucket"])
    pulumi.export("retainBucket", config.retain_bucket)
    pulumi.export("hosts", {host_id.name: fields["address"] for host_id, fields in cluster.hosts.items()})
    pulumi.export("sshConfig", f"{folder}/ssh_config")
    if cluster.hourly_costs is not None:
        pulumi.export("hourlyCost", round(sum(cluster.hourly_costs.values()), 4))
        pulumi.export("hourlyCostByRole", dict(cluster.hourly_costs))


def import_target_type(name: str) -> type[Target]:
    """Return the class of a target. Import no other target, because importing its libraries takes seconds."""
    # The import creates hundreds of thousands of objects: garbage collection would take a quarter of its time.
    gc.disable()
    try:
        target: type[Target] = importlib.import_module(f"infra.{name}.target").TARGET
    finally:
        gc.freeze()
        gc.enable()
    return target


main()
