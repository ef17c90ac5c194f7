"""The resources that a job asks for: replicas of each role, and their candidate hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from infra.inventory import Inventory
from infra.scale_tiers import JOB_ROLES, Role, ScaleTier, SpecError, preset, suggest
from ops.errors import UsageError
from ops.submit.arguments import STRATEGY
from ops.terminal import plural

if TYPE_CHECKING:
    from ops.package.trainer_config import TrainerConfig

Counts = Mapping[Role, int]
TYPE_KEYS: Mapping[Role, str] = {
    Role.MASTER: "masterType",
    Role.WORKER: "workerType",
    Role.PS: "parameterServerType",
    Role.EVALUATOR: "evaluatorType",
}
COUNT_KEYS: Mapping[Role, str] = {
    Role.WORKER: "workerCount",
    Role.PS: "parameterServerCount",
    Role.EVALUATOR: "evaluatorCount",
}
ROLE_KEYS = (*TYPE_KEYS.values(), *COUNT_KEYS.values())
_PATH = "trainingInput"
_DIGITS = 10
_COUNTS_ALONE = "leave scaleTier and the types out, to choose hosts of it by the counts alone"


def requested_counts(
    scale_tier: str | None,
    replicas: str | None,
    config: Mapping[str, Any],
    roles: Collection[str] | None,
    inventory: Inventory,
    where: str,
) -> Counts:
    """Return the count of each role: from the flags, else config.yaml, else all hosts of the strategy's `roles`.

    UsageError for more than the cluster has, a role that it lacks, and contradictions.
    """
    if scale_tier is not None and replicas is not None:
        raise UsageError("--scale-tier and --replicas both say how much of the cluster is wanted: use only one of them")
    if replicas is not None:
        return _parse_replicas(replicas, inventory)
    role_keys = [key for key in ROLE_KEYS if key in config]
    if scale_tier is not None and not (role_keys and _parse_tier(scale_tier, "--scale-tier: ") is ScaleTier.CUSTOM):
        return _tier_counts(_parse_tier(scale_tier, "--scale-tier: "), inventory, "--scale-tier")
    if "scaleTier" in config or role_keys:
        return _config_counts(config, role_keys, inventory, where)
    available = counts(inventory)
    return available if roles is None else {role: available[role] for role in available if role is Role.MASTER or role in roles}


def counts(inventory: Inventory) -> dict[Role, int]:
    """Count the hosts of each role that a cluster has for jobs."""
    return dict(Counter(host.role for host in inventory.job_hosts))


def describe_counts(requested: Counts, inventory: Inventory) -> dict[str, Any]:
    """Return `scaleTier` and, if no tier has these counts, machine types and counts, in Cloud ML's names."""
    tier = inventory.scale_tier if requested == counts(inventory) else _match_preset(requested, inventory)
    if tier != ScaleTier.CUSTOM:
        return {"scaleTier": str(tier)}
    types = {key: inventory.of_role(role)[0].machine_type for role, key in TYPE_KEYS.items() if requested.get(role)}
    return {
        "scaleTier": str(tier),
        **types,
        **{key: requested[role] for role, key in COUNT_KEYS.items() if requested.get(role)},
    }


def _match_preset(requested: Counts, inventory: Inventory) -> ScaleTier:
    gpu = inventory.chief.accelerator is not None
    for tier in ScaleTier:
        if tier is not ScaleTier.CUSTOM:
            roles = preset(tier).roles
            if requested == {role: spec.count for role, spec in roles.items()} and gpu == bool(roles[Role.MASTER].accelerator):
                return tier
    return ScaleTier.CUSTOM


def candidate_hosts(requested: Counts, inventory: Inventory) -> dict[str, list[str]]:
    """Map each replica, the chief first, to its candidate hosts, the best first.

    Candidates are the hosts of its role. If the job takes all hosts of a role, each replica's candidate is the one of its name.
    The master may also run on a worker's host of equal hardware, so that a one-host job need not wait for the master's.
    """
    requested = requested or counts(inventory)
    subset = inventory.subset(requested)
    spare = {
        role: inventory.of_role(role) for role, available in counts(inventory).items() if requested.get(role, 0) < available
    }
    candidates = {}
    for name in subset.replicas:
        own = inventory.host(name)
        others = [host for host in spare.get(own.role, ()) if host is not own]
        if own.role is Role.MASTER:
            others += [host for host in spare.get(Role.WORKER, ()) if host.hardware == own.hardware]
        candidates[name] = [own.name, *(host.name for host in others)]
    return candidates


def _parse_replicas(text: str, inventory: Inventory) -> Counts:
    """Parse `--replicas master,worker` for all of a role, `worker=2,ps=1` for counts; a master is implied."""
    available = counts(inventory)
    totals, roles = {Role.MASTER: 1}, set[Role]()
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, number = word.partition("=")
        if name not in JOB_ROLES:
            example = "such as worker=2,ps=1 or worker"
            raise UsageError(
                f"--replicas {word!r} is no role{suggest(name, JOB_ROLES)}; valid are {', '.join(JOB_ROLES)}, {example}"
            )
        role = Role(name)
        if role in roles:
            raise UsageError(f"--replicas names {role} twice: say it once")
        roles.add(role)
        if equals and not (number.isdecimal() and len(number) < _DIGITS):
            how = "worker=2 is two workers, worker all that there are, and a comma stands between two roles"
            raise UsageError(f"--replicas {word!r} has no valid number: {how}")
        totals[role] = int(number) if equals else available.get(role, 0)
        if totals[role] == 0 and not equals:
            _check({role: 1}, inventory, f"--replicas {word}")
    if not text.strip(" ,"):
        raise UsageError(f"--replicas names no role; valid are {', '.join(JOB_ROLES)}, such as worker=2,ps=1 or worker")
    if totals[Role.MASTER] != 1:
        raise UsageError(f"--replicas master={totals[Role.MASTER]}: a job has one master")
    return _check({role: count for role, count in totals.items() if count}, inventory, f"--replicas {text}")


def _tier_counts(tier: ScaleTier, inventory: Inventory, what: str) -> Counts:
    if tier == inventory.scale_tier:
        return counts(inventory)
    if tier is ScaleTier.CUSTOM:
        raise UsageError(f"{what} CUSTOM does not say how many: --replicas worker=2,ps=1 does, or counts in config.yaml")
    roles = preset(tier).roles
    needed = {role: spec.count for role, spec in roles.items()}
    fix = f"pulumi config set scaleTier {tier} && pulumi up"
    _check(needed, inventory, f"{what} {tier}", fix)
    if roles[Role.MASTER].accelerator and not inventory.chief.accelerator:
        raise UsageError(f"{what} {tier} needs a GPU, and the master of stack {inventory.stack} has none: run {fix}")
    return needed


def _config_counts(config: Mapping[str, Any], role_keys: list[str], inventory: Inventory, where: str) -> Counts:
    path = f"{where}: {_PATH}"
    tier = _parse_tier(config["scaleTier"], f"{path}.") if "scaleTier" in config else ScaleTier.CUSTOM
    if tier is not ScaleTier.CUSTOM:
        if role_keys:
            raise UsageError(f"{path}.{role_keys[0]} goes with scaleTier CUSTOM only, and this is {tier}: take it out")
        return _tier_counts(tier, inventory, f"{path}.scaleTier")
    if "scaleTier" in config and "masterType" not in config:
        has = inventory.chief.machine_type
        raise UsageError(
            f"{path}.masterType is missing: scaleTier CUSTOM needs it, stack {inventory.stack} has {has}; {_COUNTS_ALONE}"
        )
    for role, key in TYPE_KEYS.items():
        hosts = inventory.of_role(role)
        if key in config and hosts and config[key] != hosts[0].machine_type:
            has = f"stack {inventory.stack} has {hosts[0].machine_type}"
            fix = f"run pulumi config set {key} {config[key]} && pulumi up" if inventory.scale_tier == ScaleTier.CUSTOM else ""
            raise UsageError(f"{path}.{key} is {config[key]}, but {has}: {fix}{', or ' if fix else ''}{_COUNTS_ALONE}")
    totals = {Role.MASTER: 1} | {role: config[key] for role, key in COUNT_KEYS.items() if config.get(key)}
    for role, count in totals.items():
        if role in COUNT_KEYS:
            key = COUNT_KEYS[role]
            grows = f"pulumi config set {key} {count} && pulumi up" if inventory.scale_tier == ScaleTier.CUSTOM else None
            _check({role: count}, inventory, f"{path}.{key}", grows)
    return totals


def _parse_tier(text: str, path: str) -> ScaleTier:
    try:
        return ScaleTier.parse(text)
    except SpecError as error:
        raise UsageError(f"{path}{error}") from None


def _check(requested: Counts, inventory: Inventory, what: str, fix: str | None = None) -> Counts:
    """Check that the cluster has the requested hosts; UsageError if it has fewer."""
    available = counts(inventory)
    for role, count in requested.items():
        has = available.get(role, 0)
        if count > has:
            many = f"{count} {role}" if role is Role.PS else plural(count, role)
            problem = f"{what} needs {many}, and stack {inventory.stack} ({inventory.scale_tier}) has {has or 'none'}"
            raise UsageError(f"{problem}: {f'run {fix}, or ' if fix else ''}take no more than it has")
    return requested


def check_strategy(name: str | None, declared: TrainerConfig, inventory: Inventory, requested: Counts) -> None:
    """Check that the trainer has a strategy, None for its default, and that the requested hosts have its roles.

    A trainer that declares no strategies may have any.
    """
    if not declared.strategies:
        return
    name = name or declared.strategy
    if name is None:
        return
    if name not in declared.strategies:
        raise UsageError(f"{STRATEGY} {name!r} is unknown; valid are {', '.join(declared.strategies)}")
    missing_roles = {
        strategy: [role for role in each.requiredRoles if role not in requested]
        for strategy, each in declared.strategies.items()
    }
    all_or_none = declared.strategies[name].allOrNone
    if (has := [role for role in all_or_none if role in requested]) and (
        missing := [role for role in all_or_none if role not in requested]
    ):
        raise UsageError(f"{STRATEGY} {name} needs a {missing[0]} where it has a {has[0]}: --replicas {has[0]},{missing[0]}")
    if not missing_roles[name]:
        return
    role = Role(missing_roles[name][0])
    if inventory.of_role(role):
        raise UsageError(f"{STRATEGY} {name} needs a {role}, and the job asks for none: --replicas master,{role} does")
    others = " or ".join(strategy for strategy, missing in missing_roles.items() if not missing)
    problem = f"{STRATEGY} {name} needs a {role}, and stack {inventory.stack} ({inventory.scale_tier}) has none"
    instead = f"take {STRATEGY} {others}, or " if others else ""
    raise UsageError(f"{problem}: {instead}run pulumi config set scaleTier STANDARD_1 && pulumi up")
