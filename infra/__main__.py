"""The Pulumi program: reads the configuration, declares a cluster on its target, exports the outputs."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial

import pulumi
from pulumi import ResourceOptions

from infra import backend
from infra.cluster import inventory
from infra.config import ClusterConfig, ConfigError
from infra.connection import FOLDER
from infra.guard import Change, check, hosts_lost, same_target
from infra.operator_files import OperatorFiles
from infra.operator_key import OperatorKey
from infra.spec import SpecError
from infra.state import StackState, before
from infra.target import TargetError
from infra.targets import target
from infra.templates import ROOT

# Tells Pulumi's language host that the user has been told already.
_SHOWN = 32


def main() -> None:
    """Build the stack; report every user error in one line."""
    stack = pulumi.get_stack()
    if elsewhere := backend.note(ROOT):
        pulumi.log.info(elsewhere)
    raw = {
        key.partition(":")[2]: value
        for key, value in pulumi.runtime.config.get_config_env().items()
        if key.startswith("scaletier:")
    }
    try:
        state = _state()
        same_target(state.target, ClusterConfig.target_of(raw))
        chosen = target(ClusterConfig.target_of(raw))
        config = chosen.config.parse(raw)
        spec = config.spec()
        found = chosen.prepare(stack, spec, config, state)
        spec = chosen.settled(spec, found)
        change = Change(hosts_lost(state.hosts, spec), chosen.anew(spec, config, found, state))
        bucket = (partial(chosen.read, stack, found), partial(chosen.create, stack, found))
        check(change, *bucket, pulumi.runtime.is_dry_run(), config.disrupt_jobs)
    except (ConfigError, SpecError, TargetError) as error:
        pulumi.log.error(str(error))
        # The SDK's own calls that the exit cuts off are no concern of the user's.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        sys.exit(_SHOWN)
    key = OperatorKey("operator-key", comment=f"scaletier-{stack}")
    cluster = chosen.build(stack, spec, config, found, key.publicKey)
    outputs = inventory(stack, config.target, spec, config.labels, cluster).apply(
        lambda found: json.dumps(found, indent=1) + "\n"
    )
    folder = f"{FOLDER}/{stack}"
    contents = {"folder": folder, "inventory": outputs, "privateKey": key.privateKey}
    files = OperatorFiles("operator-files", contents, ResourceOptions(depends_on=list(cluster.depends_on)))
    cluster.last([files])
    # With these two `fab` works wherever the stack's state is at hand. Both are secret, the first as it would fill the screen.
    pulumi.export("inventory", pulumi.Output.secret(outputs))
    pulumi.export("operatorKey", key.privateKey)
    # Not from the inventory, which waits for the hosts: a preview shows these.
    pulumi.export("target", config.target)
    pulumi.export("scaleTier", str(spec.scale_tier))
    pulumi.export("bucket", cluster.bucket)
    pulumi.export("hosts", {host.replica.name: host.address for host in cluster.hosts})
    pulumi.export("sshConfig", f"{folder}/ssh_config")
    if cluster.hourly_costs is not None:
        pulumi.export("hourlyCost", round(sum(cluster.hourly_costs.values()), 4))
        pulumi.export("hourlyCostByRole", dict(cluster.hourly_costs))


def _state() -> StackState:
    """Return the stack's present state.

    Raises:
        TargetError: the engine cannot return it.
    """
    try:
        return before()
    except Exception as error:  # noqa: BLE001  the SDK raises nothing narrower
        reason = " ".join(str(error).split())
        raise TargetError(f"the stack's state cannot be read: {reason.rpartition('returned an error: ')[2]}") from None


main()
