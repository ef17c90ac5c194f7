"""Whether a job can be what its flags and config.yaml ask for: on this cluster, with this package, into this bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.spec import Role, ScaleTier, SpecError
from ops.cluster.inventory import Inventory
from ops.errors import UsageError
from ops.package.declared import Declared
from ops.train.arguments import STRATEGY
from ops.train.schema import ROLE_KEYS

_NOT_FOR_OUTPUT = ("data", "cluster", "models")


def check_strategy(name: str | None, declared: Declared, inventory: Inventory) -> None:
    """Whether the trainer knows a strategy, None for its default one, and the cluster has whom it needs.

    A trainer that declares none may know any.
    """
    if not declared.strategies:
        return
    name = name or declared.default
    if name is None:
        return
    if name not in declared.strategies:
        raise UsageError(f"{STRATEGY} {name!r} is unknown; valid are {', '.join(declared.strategies)}")
    there = {str(host.role) for host in inventory.hosts}
    lacks = {known: [role for role in each.needs if role not in there] for known, each in declared.strategies.items()}
    if lacks[name]:
        others = " or ".join(known for known, missing in lacks.items() if not missing)
        lacking = f"{STRATEGY} {name} needs a {lacks[name][0]}, and stack {inventory.stack} ({inventory.scale_tier}) has none"
        instead = f"take {STRATEGY} {others}, or " if others else ""
        raise UsageError(f"{lacking}: {instead}run pulumi config set scaleTier STANDARD_1 && pulumi up")


def check_tier(given: Mapping[str, Any], inventory: Inventory, where: str) -> None:
    """Whether the cluster that is up is the one that config.yaml asks for."""
    stack, path = inventory.stack, f"{where}: trainingInput"
    shape = [key for key in ROLE_KEYS if key in given]
    tier = inventory.scale_tier
    if "scaleTier" in given:
        try:
            tier = str(ScaleTier.parse(given["scaleTier"]))
        except SpecError as error:
            raise UsageError(f"{path}.{error}") from None
    if shape and tier != ScaleTier.CUSTOM:
        raise UsageError(f"{path}.{shape[0]} goes with scaleTier CUSTOM only, and this is {tier}: take it out")
    if tier != inventory.scale_tier:
        fix = f"pulumi config set scaleTier {tier} && pulumi up"
        raise UsageError(f"{path}.scaleTier is {tier}, but stack {stack} has {inventory.scale_tier}: run {fix}")
    for key in shape:
        role, is_count = ROLE_KEYS[key]
        hosts = [host for host in inventory.hosts if host.role is role]
        there: Any = len(hosts) if is_count else (hosts[0].machine_type if hosts else None)
        if given[key] != there:
            has = "none" if there is None else there
            fix = f"pulumi config set {key} {given[key]} && pulumi up"
            raise UsageError(f"{path}.{key} is {given[key]}, but stack {stack} has {has}: run {fix}")
    if inventory.scale_tier == ScaleTier.CUSTOM and "scaleTier" in given and "masterType" not in given:
        raise UsageError(f"{path}.masterType is missing: scaleTier CUSTOM needs it, stack {stack} has {_type_of(inventory)}")


def _type_of(inventory: Inventory) -> str:
    return next(host.machine_type for host in inventory.hosts if host.role is Role.MASTER)


def check_job_dir(job_dir: str, bucket: str, default: str) -> None:
    """A path on a host is writable only in the bucket; a URL is TensorFlow's affair, where a host can reach it."""
    inside = job_dir.startswith(f"{bucket}/") and ".." not in job_dir.split("/")
    if "://" in job_dir and "://" not in bucket:
        raise UsageError(f"jobDir {job_dir!r} cannot be reached: local hosts have no way out; take a path below {bucket}/")
    if inside and job_dir.removeprefix(bucket).strip("/").split("/")[0] in _NOT_FOR_OUTPUT:
        raise UsageError(f"jobDir {job_dir!r} is where the bucket keeps other things: take a path such as {default}")
    if not job_dir.isprintable() or not (inside or "://" in job_dir):
        raise UsageError(f"jobDir {job_dir!r} is not in the bucket: take a path below {bucket}/, such as {default}")
