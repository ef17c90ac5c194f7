"""The Pulumi program: configuration in, a cluster on the target that it names, one schema of outputs out."""

from __future__ import annotations

import sys
import warnings
from functools import partial

import pulumi
from pulumi import ResourceOptions

from infra.cluster import inventory
from infra.config import ClusterConfig, ConfigError
from infra.guard import check, hosts_lost
from infra.operator_files import FOLDER, OperatorFiles, files
from infra.operator_key import OperatorKey
from infra.spec import SpecError
from infra.targets import TargetError, target
from infra.templates import ROOT

# Tells Pulumi's language host that the user has been told already.
_SHOWN = 32


def main() -> None:
    """Builds the stack; every error that a user can make is one line."""
    stack = pulumi.get_stack()
    raw = {
        key.partition(":")[2]: value
        for key, value in pulumi.runtime.config.get_config_env().items()
        if key.startswith("scaletier:")
    }
    try:
        chosen = target(ClusterConfig.target_of(raw))
        config = chosen.config.parse(raw)
        spec = config.spec()
        found = chosen.prepare(stack, spec, config)
        lost = hosts_lost(ROOT / FOLDER / stack / "inventory.json", spec)
        bucket = (partial(chosen.read, stack, found), partial(chosen.create, stack, found))
        check(lost, *bucket, pulumi.runtime.is_dry_run(), config.disrupt_jobs)
    except (ConfigError, SpecError, TargetError) as error:
        pulumi.log.error(str(error))
        # The SDK's own calls that the exit cuts off are no concern of the user's.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        sys.exit(_SHOWN)
    key = OperatorKey("operator-key", comment=f"scaletier-{stack}")
    cluster = chosen.build(stack, spec, config, found, key.publicKey)
    outputs = inventory(stack, config.target, spec, config.labels, cluster)
    folder = f"{FOLDER}/{stack}"
    contents = pulumi.Output.all(outputs, cluster.ssh_hosts, cluster.host_keys, key.privateKey).apply(
        lambda known: files(folder, known[0], known[1], known[2], known[3], cluster.proxy_command)
    )
    OperatorFiles("operator-files", {"folder": folder, "files": contents}, ResourceOptions(depends_on=list(cluster.depends_on)))
    # Not from the inventory, which waits for the hosts: a preview shows these.
    pulumi.export("target", config.target)
    pulumi.export("scaleTier", str(spec.scale_tier))
    pulumi.export("bucket", cluster.bucket)
    pulumi.export("hosts", {host.replica.name: host.address for host in cluster.hosts})
    pulumi.export("sshConfig", f"{folder}/ssh_config")
    if cluster.hourly_costs is not None:
        pulumi.export("hourlyCost", round(sum(cluster.hourly_costs.values()), 4))
        pulumi.export("hourlyCostByRole", dict(cluster.hourly_costs))


main()
