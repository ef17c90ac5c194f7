"""Checks whether the cluster, the package and the bucket can run a job as requested."""

from __future__ import annotations

from infra.inventory import Inventory
from infra.spec import Role
from ops.errors import UsageError
from ops.package.declared import TrainerConfig
from ops.submit.arguments import STRATEGY
from ops.submit.part import Counts

_NOT_FOR_OUTPUT = ("data", "cluster", "models")


def check_strategy(name: str | None, declared: TrainerConfig, inventory: Inventory, wanted: Counts) -> None:
    """Check that the trainer knows a strategy, None for its default, and that the part has its roles.

    A trainer that declares none may know any.
    """
    if not declared.strategies:
        return
    name = name or declared.strategy
    if name is None:
        return
    if name not in declared.strategies:
        raise UsageError(f"{STRATEGY} {name!r} is unknown; valid are {', '.join(declared.strategies)}")
    lacks = {
        strategy: [role for role in each.requiredRoles if role not in wanted] for strategy, each in declared.strategies.items()
    }
    together = declared.strategies[name].allOrNone
    if (has := [role for role in together if role in wanted]) and (
        missing := [role for role in together if role not in wanted]
    ):
        raise UsageError(f"{STRATEGY} {name} needs a {missing[0]} where it has a {has[0]}: --replicas {has[0]},{missing[0]}")
    if not lacks[name]:
        return
    role = Role(lacks[name][0])
    if inventory.of_role(role):
        raise UsageError(f"{STRATEGY} {name} needs a {role}, and the job asks for none: --replicas master,{role} does")
    others = " or ".join(strategy for strategy, missing in lacks.items() if not missing)
    lacking = f"{STRATEGY} {name} needs a {role}, and stack {inventory.stack} ({inventory.scale_tier}) has none"
    instead = f"take {STRATEGY} {others}, or " if others else ""
    raise UsageError(f"{lacking}: {instead}run pulumi config set scaleTier STANDARD_1 && pulumi up")


def check_job_dir(job_dir: str, bucket: str, default: str, what: str = "jobDir") -> None:
    """Check that a path on a host is in the bucket, the only writable place.

    TensorFlow handles a URL, if a host can reach it.
    """
    inside = job_dir.startswith(f"{bucket}/") and ".." not in job_dir.split("/")
    if "://" in job_dir and "://" not in bucket:
        raise UsageError(f"{what} {job_dir!r} cannot be reached: local hosts have no way out; take a path below {bucket}/")
    if inside and job_dir.removeprefix(bucket).strip("/").split("/")[0] in _NOT_FOR_OUTPUT:
        raise UsageError(f"{what} {job_dir!r} is where the bucket keeps other things: take a path such as {default}")
    if not job_dir.isprintable() or not (inside or "://" in job_dir):
        raise UsageError(f"{what} {job_dir!r} is not in the bucket: take a path below {bucket}/, such as {default}")
