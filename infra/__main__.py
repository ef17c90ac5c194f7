"""The Pulumi program: configuration in, a cluster on the target that it names, one schema of outputs out."""

from __future__ import annotations

import pulumi
from pulumi import ResourceOptions

from infra.cluster import inventory
from infra.config import ClusterConfig, ConfigError
from infra.operator_files import FOLDER, OperatorFiles, files
from infra.operator_key import OperatorKey
from infra.spec import SpecError
from infra.targets import TargetError, target


def main() -> None:
    """Builds the stack; every error that a user can make is one line."""
    stack = pulumi.get_stack()
    raw = {key.partition(":")[2]: value for key, value in pulumi.runtime.config.get_config_env().items() if key.startswith("scaletier:")}
    try:
        chosen = target(ClusterConfig.target_of(raw))
        config = chosen.config.parse(raw)
        spec = config.spec()
        key = OperatorKey("operator-key", comment=f"scaletier-{stack}")
        cluster = chosen.build(stack, spec, config, key.publicKey)
    except (ConfigError, SpecError, TargetError) as error:
        raise pulumi.RunError(str(error)) from None
    outputs = inventory(stack, config.target, spec, config.labels, cluster)
    folder = f"{FOLDER}/{stack}"
    contents = pulumi.Output.all(outputs, cluster.host_keys, key.privateKey).apply(
        lambda known: files(folder, known[0], known[1], known[2], cluster.proxy_command)
    )
    OperatorFiles("operator-files", {"folder": folder, "files": contents}, ResourceOptions(depends_on=list(cluster.depends_on)))
    for name in ("target", "scaleTier", "bucket"):
        pulumi.export(name, outputs[name])
    pulumi.export("hosts", outputs["hosts"].apply(lambda hosts: {host["name"]: host["address"] for host in hosts}))
    pulumi.export("sshConfig", f"{folder}/ssh_config")


main()
