"""The rules, as pure functions of a resource's type and inputs (in Pulumi's spelling), and as policies of Pulumi's SDK.

Each function yields the violations of its rule.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyConfigSchema,
    ReportViolation,
    ResourceValidation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)

from infra.cost import HostSpec, hourly, price_list
from infra.gcp.machines import MACHINES
from infra.scale_tiers import Accelerator, Role

Props = Mapping[str, Any]
Check = Callable[[str, Props, Props], Iterator[str]]

INSTANCE = "gcp:compute/instance:Instance"
# The shortest prefix that a source range may have, by version of IP.
_SHORTEST_PREFIX = {4: 8, 6: 16}
_TOO_BROAD = ("roles/owner", "roles/editor", "roles/viewer", "roles/storage.admin", "roles/storage.legacyBucketOwner")
_EVERYBODY = ("allUsers", "allAuthenticatedUsers")
_DEFAULT_ACCOUNTS = (
    "-compute@developer.gserviceaccount.com",
    "@appspot.gserviceaccount.com",
    "@cloudservices.gserviceaccount.com",
)
_ACLS = (
    "BucketAccessControl",
    "BucketACL",
    "DefaultObjectAccessControl",
    "DefaultObjectACL",
    "ObjectAccessControl",
    "ObjectACL",
)
_SHIELDED = ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring")


@dataclass(frozen=True)
class Rule:
    """One rule of the pack; `schema` is the schema of its configuration, with defaults."""

    name: str
    description: str
    check: Check
    schema: Mapping[str, Any] = field(default_factory=dict)


def _list_of(props: Props, key: str) -> Sequence[Any]:
    return props.get(key) or ()


def _machine_type(props: Props) -> str:
    """Return the name of an instance's machine type, which may be given as a link."""
    return str(props.get("machineType")).rpartition("/")[2]


def _is_spot(props: Props) -> bool:
    scheduling = props.get("scheduling") or {}
    return scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True


def _grants(kind: str, props: Props) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the role and the members of each binding of an IAM resource; none for a policy that is no JSON."""
    if not kind.startswith("gcp:") or "IAM" not in kind:
        return
    yield props.get("role"), (*_list_of(props, "members"), props.get("member"))
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        for binding in json.loads(props.get("policyData") or "{}").get("bindings", ()):
            yield binding.get("role"), binding.get("members") or ()


def no_open_ingress(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a firewall rule that allows ingress has a source, which is not a large part of the internet."""
    if (
        kind != "gcp:compute/firewall:Firewall"
        or props.get("direction", "INGRESS") != "INGRESS"
        or not _list_of(props, "allows")
    ):
        return
    if not any(_list_of(props, key) for key in ("sourceRanges", "sourceServiceAccounts", "sourceTags")):
        yield "it names no source, which means everybody"
    for text in _list_of(props, "sourceRanges"):
        network = ipaddress.ip_network(text, strict=False)
        if network.prefixlen < _SHORTEST_PREFIX[network.version]:
            yield f"it lets {text} in"


def no_public_address(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a host has no public address, unless the pack's configuration has `allowed`."""
    if config.get("allowed"):
        return
    if kind == INSTANCE:
        for interface in _list_of(props, "networkInterfaces"):
            if _list_of(interface, "accessConfigs") or _list_of(interface, "ipv6AccessConfigs"):
                yield "it has a public address"
    if kind.startswith(("gcp:compute/address:", "gcp:compute/globalAddress:")) and props.get("addressType") != "INTERNAL":
        yield "it is a public address"


def no_default_account(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a host runs as a service account of its own."""
    if kind != INSTANCE:
        return
    email = (props.get("serviceAccount") or {}).get("email")
    if not email or email == "default":
        yield "it runs as the project's default service account, or as none"
    elif email.endswith(_DEFAULT_ACCOUNTS):
        yield f"it runs as {email}, which is Google's default"


def no_broad_role(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Refuse roles that are too broad."""
    yield from (f"it grants {role}" for role, _ in _grants(kind, props) if role in _TOO_BROAD)


def bucket_is_private(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a bucket uses only IAM, prevents public access, and is granted to no group of all users."""
    if kind == "gcp:storage/bucket:Bucket":
        if props.get("uniformBucketLevelAccess") is not True:
            yield "it has no uniform access"
        if props.get("publicAccessPrevention") != "enforced":
            yield "its public access prevention is not enforced"
    if kind.startswith("gcp:storage/") and kind.rpartition(":")[2] in _ACLS:
        yield "it is an access control list: use IAM"
    for role, members in _grants(kind, props):
        yield from (f"it grants {role} to {member}" for member in members if member in _EVERYBODY)


def labelled(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require the label scaletier-stack on instances and buckets, and scaletier-role on instances."""
    required = {INSTANCE: ("scaletier-stack", "scaletier-role"), "gcp:storage/bucket:Bucket": ("scaletier-stack",)}
    labels = props.get("labels") or {}
    yield from (f"it has no label {label}" for label in required.get(kind, ()) if not labels.get(label))


def shielded(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a host is a shielded VM, with all three of its parts."""
    if kind == INSTANCE:
        settings = props.get("shieldedInstanceConfig") or {}
        yield from (f"{part} is not on" for part in _SHIELDED if settings.get(part) is not True)


def terminates_on_maintenance(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require that a host with GPUs and a spot host end at maintenance, as they cannot migrate."""
    if kind != INSTANCE:
        return
    machine = MACHINES.get(_machine_type(props))
    scheduling = props.get("scheduling") or {}
    gpus = _list_of(props, "guestAccelerators") or (machine and machine.accelerator)
    if (gpus or _is_spot(props)) and scheduling.get("onHostMaintenance") != "TERMINATE":
        yield f"onHostMaintenance is {scheduling.get('onHostMaintenance', 'MIGRATE')}, and it must be TERMINATE"


def known_machine_type(kind: str, props: Props, config: Props) -> Iterator[str]:
    """Require a machine type of the pack's list `allowed`, or of MACHINES without such a list."""
    if kind == INSTANCE:
        allowed = config.get("allowed") or MACHINES
        name = _machine_type(props)
        if name not in allowed:
            yield f"machine type {name} is not on the list of {len(allowed)}"


def hourly_cost(resources: Iterable[tuple[str, Props]], config: Props) -> Iterator[str]:
    """Require that all hosts cost at most `maxHourlyCost` US dollars an hour.

    A host's price is that of its machine type in the pack's `prices`, else that by `infra/prices.yaml`.
    """
    total, limit, prices = 0.0, float(config.get("maxHourlyCost") or 0), config.get("prices") or {}
    for kind, props in resources:
        if kind != INSTANCE:
            continue
        name = _machine_type(props)
        dollars = prices[name] if name in prices else _cost(props)
        if dollars is not None:
            total += dollars
        elif name in MACHINES:
            yield f"there is no price for a {name} in {props.get('zone')}: add it to infra/prices.yaml"
        else:
            setting = json.dumps({"hourly-cost": {"prices": {name: 0.5}}})
            yield f"the price of a {name} is unknown: set the USD an hour of such a host, as {setting}, by --policy-pack-config"
    if limit and total > limit:
        yield f"the hosts cost {total:.2f} USD an hour, more than {limit:g}"


def _cost(props: Props) -> float | None:
    machine = MACHINES.get(_machine_type(props))
    if machine is None:
        return None
    disk = (props.get("bootDisk") or {}).get("initializeParams") or {}
    gpus = [Accelerator(str(item["type"]), int(item["count"])) for item in _list_of(props, "guestAccelerators")]
    host_spec = HostSpec(
        series=machine.series,
        cpus=machine.cpus,
        memory=machine.memory,
        accelerator=gpus[0] if gpus else machine.accelerator,
        spot=_is_spot(props),
        disk_type=disk.get("type", "pd-standard"),
        disk_size=int(disk.get("size", 10)),
        public_address=any(_list_of(item, "accessConfigs") for item in _list_of(props, "networkInterfaces")),
    )
    cost = hourly(price_list(), str(props.get("zone")).rpartition("-")[0], {Role.MASTER: (1, host_spec)})
    return cost.host[Role.MASTER] if cost else None


RULES = (
    Rule("no-open-ingress", "Nothing is open to the internet", no_open_ingress),
    Rule(
        "no-public-address",
        "Hosts have no public address unless asked for",
        no_public_address,
        {"allowed": {"type": "boolean", "default": False}},
    ),
    Rule("no-default-account", "Hosts run as service accounts of their own", no_default_account),
    Rule("no-primitive-role", "Roles that are too broad, such as Owner and Editor, are not granted", no_broad_role),
    Rule("bucket-is-private", "The bucket is never public", bucket_is_private),
    Rule("labelled", "Instances and buckets have the labels of their stack", labelled),
    Rule("shielded", "Hosts are shielded VMs", shielded),
    Rule("terminates", "Hosts with GPUs and spot hosts terminate on maintenance", terminates_on_maintenance),
    Rule(
        "known-machine-type",
        "Machine types are on the list",
        known_machine_type,
        {"allowed": {"type": "array", "items": {"type": "string"}, "default": []}},
    ),
)
# US dollars. The most expensive tier without GPUs, PREMIUM_1, costs about 17.
DEFAULT_MAX_HOURLY_COST = 50


def policies() -> list[Policy]:
    """Return every rule as a policy, and a policy of the whole stack that limits the cost."""
    schema = PolicyConfigSchema(
        properties={
            "maxHourlyCost": {"type": "number", "default": DEFAULT_MAX_HOURLY_COST},
            "prices": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
        }
    )
    cost_policy = StackValidationPolicy(
        name="hourly-cost",
        description="The hosts together cost no more than maxHourlyCost",
        validate=_validate_cost,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=schema,
    )
    return [*(_policy(rule) for rule in RULES), cost_policy]


def _policy(rule: Rule) -> Policy:
    return ResourceValidationPolicy(
        name=rule.name,
        description=rule.description,
        validate=_validation(rule),
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=PolicyConfigSchema(properties={key: dict(value) for key, value in rule.schema.items()})
        if rule.schema
        else None,
    )


def _validation(rule: Rule) -> ResourceValidation:
    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        for violation in rule.check(args.resource_type, args.props, args.get_config()):
            report(f"{args.name}: {violation}", None)

    return validate


def _validate_cost(args: StackValidationArgs, report: ReportViolation) -> None:
    for violation in hourly_cost([(item.resource_type, item.props) for item in args.resources], args.get_config()):
        report(violation, None)
