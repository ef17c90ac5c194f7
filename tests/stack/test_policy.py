"""Check that each policy finds its violation, and none in this project's programs, on both targets."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pulumi_policy
import pytest
from gcpcases import A100, GPUS, L4
from pulumi_gcp.compute import (
    Address,
    Firewall,
    FirewallAllowArgs,
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
from pulumi_gcp.projects import IAMMember
from pulumi_gcp.storage import Bucket, BucketAccessControl, BucketIAMMember
from stackmocks import Program, Stack, record_program
from test_firewall_answers import TIERS

from infra.cost import price_list
from infra.gcp.machines import MACHINES
from infra.policy.rules import DEFAULT_MAX_HOURLY_COST, INSTANCE, RULES, _cost, hourly_cost, policies
from infra.templates import ROOT


def violations(stack: Stack, **config: Any) -> set[str]:
    """Return the names of the violated rules."""
    names = {
        rule.name
        for rule in RULES
        for item in stack.resources
        if list(rule.check(item.type, item.inputs, config.get(rule.name.replace("-", "_"), {})))
    }
    ceiling = config.get("hourly_cost", {"maxHourlyCost": DEFAULT_MAX_HOURLY_COST})
    cost_violations = list(hourly_cost([(item.type, item.inputs) for item in stack.resources], ceiling))
    return names | ({"hourly-cost"} if cost_violations else set())


@pytest.mark.parametrize(
    "config", [*TIERS, GPUS, L4, A100], ids=lambda config: str(config.get("masterType", config["scaleTier"]))
)
def test_the_projects_own_programs_have_no_violation(program: Program, config: dict[str, str]) -> None:
    assert violations(program("gcp", **config)) == set()
    if config in TIERS:
        assert violations(program("lxd", **config)) == set()


def test_a_public_address_must_be_allowed(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC", publicAddress="true")
    assert violations(stack) == {"no-public-address"}
    assert violations(stack, no_public_address={"allowed": True}) == set()


def valid_instance(**changes: Any) -> Callable[[], object]:
    """Return a valid host, except the changes."""
    good: dict[str, Any] = {
        "machine_type": "n1-standard-4",
        "zone": "us-central1-a",
        "boot_disk": InstanceBootDiskArgs(initialize_params=InstanceBootDiskInitializeParamsArgs(size=100, type="pd-ssd")),
        "network_interfaces": [InstanceNetworkInterfaceArgs(subnetwork="subnet")],
        "service_account": InstanceServiceAccountArgs(email="a@p.iam.gserviceaccount.com", scopes=["cloud-platform"]),
        "shielded_instance_config": InstanceShieldedInstanceConfigArgs(
            enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
        ),
        "labels": {"scaletier-stack": "dev", "scaletier-role": "ps"},
    }
    return lambda: Instance("bad", **good | changes)


def valid_firewall(**changes: Any) -> Callable[[], object]:
    return lambda: Firewall("bad", network="n", allows=[FirewallAllowArgs(protocol="tcp", ports=["22"])], **changes)


def valid_bucket(**changes: Any) -> Callable[[], object]:
    good: dict[str, Any] = {
        "uniform_bucket_level_access": True,
        "public_access_prevention": "enforced",
        "labels": {"scaletier-stack": "d"},
    }
    return lambda: Bucket("bad", location="US", **good | changes)


TERMINATE = InstanceSchedulingArgs(on_host_maintenance="TERMINATE")
T4 = [InstanceGuestAcceleratorArgs(type="nvidia-tesla-t4", count=1)]
PUBLIC = [InstanceNetworkInterfaceArgs(subnetwork="s", access_configs=[InstanceNetworkInterfaceAccessConfigArgs()])]
BAD: list[tuple[str, Callable[[], object]]] = [
    ("no-open-ingress", valid_firewall(source_ranges=["0.0.0.0/0"])),
    ("no-open-ingress", valid_firewall(source_ranges=["10.0.0.0/8", "128.0.0.0/1"])),
    ("no-open-ingress", valid_firewall(source_ranges=["::/0"])),
    ("no-public-address", valid_instance(network_interfaces=PUBLIC)),
    ("no-public-address", lambda: Address("bad", region="us-central1")),
    ("no-default-account", valid_instance(service_account=InstanceServiceAccountArgs(scopes=["cloud-platform"]))),
    ("no-default-account",
     valid_instance(service_account=InstanceServiceAccountArgs(email="1-compute@developer.gserviceaccount.com", scopes=[]))),
    ("no-primitive-role", lambda: IAMMember("bad", project="p", role="roles/editor", member="serviceAccount:a@b")),
    ("no-primitive-role", lambda: BucketIAMMember("bad", bucket="b", role="roles/storage.admin", member="user:a@b.c")),
    ("bucket-is-private", valid_bucket(uniform_bucket_level_access=None)),
    ("bucket-is-private", valid_bucket(public_access_prevention="inherited")),
    ("bucket-is-private", lambda: BucketIAMMember("bad", bucket="b", role="roles/storage.objectViewer", member="allUsers")),
    ("bucket-is-private", lambda: BucketAccessControl("bad", bucket="b", entity="allUsers", role="READER")),
    ("labelled", valid_instance(labels={"scaletier-stack": "dev"})),
    ("labelled", valid_bucket(labels=None)),
    ("shielded", valid_instance(shielded_instance_config=None)),
    ("terminates", valid_instance(guest_accelerators=T4)),
    ("terminates", valid_instance(scheduling=InstanceSchedulingArgs(preemptible=True, on_host_maintenance="MIGRATE"))),
    ("known-machine-type", valid_instance(machine_type="m3-ultramem-128", zone="us-central1-a")),
    ("hourly-cost", valid_instance(machine_type="a2-megagpu-16g", scheduling=TERMINATE)),
    ("hourly-cost", valid_instance(zone="africa-south1-a")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "declare"), BAD, ids=[f"{at}-{name}" for at, (name, _) in enumerate(BAD)])
def test_each_policy_finds_its_violation(name: str, declare: Callable[[], object]) -> None:
    names = violations(record_program(declare), hourly_cost={"maxHourlyCost": 20})
    # An unknown machine type has no price either.
    assert names - ({"hourly-cost"} if name == "known-machine-type" else set()) == {name}


def test_the_valid_resources_of_these_tests_have_no_violation() -> None:
    assert violations(record_program(valid_instance())) == set()
    assert violations(record_program(valid_bucket())) == set()
    assert violations(record_program(valid_firewall(source_ranges=["10.0.0.0/8"]))) == set()


def test_allowed_machine_types_and_cost_are_configurable(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC")
    assert violations(stack, known_machine_type={"allowed": ["e2-standard-4"]}) == {"known-machine-type"}
    assert violations(stack, hourly_cost={"maxHourlyCost": 0.01}) == {"hourly-cost"}


def test_the_pack_has_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[tuple[str, list[pulumi_policy.Policy]]] = []
    monkeypatch.setattr(pulumi_policy, "PolicyPack", lambda name, pack: packs.append((name, pack)))
    runpy.run_path(str(ROOT / "infra" / "policy" / "__main__.py"), run_name="__main__")
    ((name, pack),) = packs
    assert name == "scaletier"
    assert {policy.name for policy in pack} == {rule.name for rule in RULES} | {"hourly-cost"}
    schemas = {policy.name: policy.config_schema.properties for policy in pack if policy.config_schema}
    assert schemas == {
        "no-public-address": {"allowed": {"type": "boolean", "default": False}},
        "known-machine-type": {"allowed": {"type": "array", "items": {"type": "string"}, "default": []}},
        "hourly-cost": {
            "maxHourlyCost": {"type": "number", "default": 50},
            "prices": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
        },
    }


def test_an_sdk_policy_reports_its_rules_violations(program: Program) -> None:
    reported: list[str] = []
    by_name = {policy.name: policy for policy in policies()}
    bad = record_program(valid_firewall(source_ranges=["0.0.0.0/0"])).one("Firewall")
    options = pulumi_policy.PolicyResourceOptions(False, [], [], None, pulumi_policy.PolicyCustomTimeouts(0, 0, 0), [])
    policy = by_name["no-open-ingress"]
    assert isinstance(policy, pulumi_policy.ResourceValidationPolicy)
    args = pulumi_policy.ResourceValidationArgs(bad.type, bad.inputs, bad.urn, bad.name, options, None)
    policy.validate(args, lambda message, _=None: reported.append(message))
    assert reported == ["bad: it lets 0.0.0.0/0 in"]


def test_the_policy_of_the_cost_reads_the_whole_stack(program: Program) -> None:
    reported: list[str] = []
    (policy,) = [policy for policy in policies() if policy.name == "hourly-cost"]
    assert isinstance(policy, pulumi_policy.StackValidationPolicy)
    resources = [SimpleNamespace(resource_type=item.type, props=item.inputs) for item in program("gcp").resources]
    args = SimpleNamespace(resources=resources, get_config=lambda: {"maxHourlyCost": 1})
    policy.validate(args, lambda message, _=None: reported.append(message))  # type: ignore[arg-type]
    assert reported == ["the hosts cost 2.17 USD an hour, more than 1"]


RULE = {rule.name: rule.check for rule in RULES}


@pytest.mark.parametrize(
    ("rule", "kind", "props", "lines"),
    [
        ("no-open-ingress", "gcp:compute/firewall:Firewall", {"allows": [{}], "direction": "EGRESS"}, []),
        ("no-open-ingress", "gcp:compute/firewall:Firewall",
         {"allows": [{}], "sourceRanges": ["2600::/12", "2600:1900::/28"]}, ["it lets 2600::/12 in"]),
        ("no-open-ingress", "gcp:compute/firewall:Firewall", {}, []),
        ("no-open-ingress", "gcp:compute/other:Other", {"allows": [{}]}, []),
        ("no-open-ingress", "gcp:compute/firewall:Firewall", {"allows": [{}]}, ["it names no source, which means everybody"]),
        ("no-open-ingress", "gcp:compute/firewall:Firewall",
         {"allows": [{}], "sourceRanges": ["10.0.0.0/8", "10.0.0.1/7"]}, ["it lets 10.0.0.1/7 in"]),
        *(("no-open-ingress", "gcp:compute/firewall:Firewall", {"allows": [{}], key: ["x"]}, [])
          for key in ("sourceServiceAccounts", "sourceTags")),
        ("no-public-address", INSTANCE, {"networkInterfaces": [{"ipv6AccessConfigs": [{}]}]}, ["it has a public address"]),
        ("no-public-address", "gcp:compute/globalAddress:GlobalAddress", {}, ["it is a public address"]),
        ("no-public-address", "gcp:compute/address:Address", {"addressType": "INTERNAL"}, []),
        ("no-public-address", "gcp:compute/addressing:X", {}, []),
        ("no-default-account", INSTANCE, {"serviceAccount": {"email": "default"}},
         ["it runs as the project's default service account, or as none"]),
        ("no-default-account", INSTANCE, {}, ["it runs as the project's default service account, or as none"]),
        ("no-default-account", INSTANCE, {"serviceAccount": {"email": "p@appspot.gserviceaccount.com"}},
         ["it runs as p@appspot.gserviceaccount.com, which is Google's default"]),
        ("no-default-account", "gcp:other:Other", {}, []),
        ("no-primitive-role", "gcp:projects/iAMMember:IAMMember", {"role": "roles/owner"}, ["it grants roles/owner"]),
        ("no-primitive-role", "gcp:projects/iAMMember:IAMMember", {"role": "roles/viewers"}, []),
        ("no-primitive-role", "gcp:projects/iAMPolicy:IAMPolicy",
         {"policyData": '{"bindings": [{"role": "roles/owner"}, {"role": "roles/a", "members": ["allUsers"]}]}'},
         ["it grants roles/owner"]),
        ("bucket-is-private", "gcp:storage/bucketIAMPolicy:BucketIAMPolicy",
         {"policyData": '{"bindings": [{"role": "roles/owner"}, {"role": "roles/a", "members": ["allUsers"]}]}'},
         ["it grants roles/a to allUsers"]),
        *(("no-primitive-role", "gcp:projects/iAMPolicy:IAMPolicy", {"policyData": data}, [])
          for data in ("", "no JSON", "[]", '{"bindings": [7]}', 5)),
        ("no-primitive-role", "aws:IAM", {"role": "roles/owner"}, []),
        ("no-primitive-role", "gcp:projects/service:Service", {"role": "roles/owner"}, []),
        ("bucket-is-private", "gcp:storage/bucketIAMBinding:BucketIAMBinding", {"role": "r", "members": ["a", "allUsers"]},
         ["it grants r to allUsers"]),
        ("bucket-is-private", "gcp:storage/bucketIAMMember:BucketIAMMember", {"role": "r", "member": "allAuthenticatedUsers"},
         ["it grants r to allAuthenticatedUsers"]),
        ("bucket-is-private", "aws:IAM", {"member": "allUsers"}, []),
        ("bucket-is-private", "gcp:projects/service:Service", {"member": "allUsers"}, []),
        ("bucket-is-private", "gcp:storage/defaultObjectACL:DefaultObjectACL", {}, ["it is an access control list: use IAM"]),
        ("bucket-is-private", "aws:storage:BucketACL", {}, []),
        ("bucket-is-private", "gcp:storage/bucket:Bucket", {},
         ["it has no uniform access", "its public access prevention is not enforced"]),
        ("labelled", INSTANCE, {}, ["it has no label scaletier-stack", "it has no label scaletier-role"]),
        ("labelled", "gcp:storage/bucket:Bucket", {"labels": {"scaletier-stack": ""}}, ["it has no label scaletier-stack"]),
        ("shielded", INSTANCE, {"shieldedInstanceConfig": {"enableVtpm": True}},
         ["enableSecureBoot is not on", "enableIntegrityMonitoring is not on"]),
        ("shielded", "gcp:other:Other", {}, []),
        ("terminates", INSTANCE, {"machineType": "g2-standard-4"}, ["onHostMaintenance is MIGRATE, and it must be TERMINATE"]),
        ("terminates", INSTANCE, {"machineType": "g2-standard-4", "scheduling": {"onHostMaintenance": "TERMINATE"}}, []),
        ("terminates", INSTANCE, {"machineType": "zones/z/g2-standard-4"},
         ["onHostMaintenance is MIGRATE, and it must be TERMINATE"]),
        ("terminates", INSTANCE, {"scheduling": {"provisioningModel": "SPOT", "onHostMaintenance": "X"}},
         ["onHostMaintenance is X, and it must be TERMINATE"]),
        ("terminates", INSTANCE, {"machineType": "n1-standard-4"}, []),
        ("terminates", "gcp:other:Other", {"machineType": "g2-standard-4"}, []),
        ("known-machine-type", INSTANCE, {"machineType": "zones/z/n1-standard-4"}, []),
        ("known-machine-type", INSTANCE, {"machineType": "zones/z/x"},
         [f"machine type x is not on the list of {len(MACHINES)}"]),
        ("known-machine-type", "gcp:other:Other", {"machineType": "x"}, []),
    ],
)  # fmt: skip
def test_a_rule_names_each_violation(rule: str, kind: str, props: dict[str, Any], lines: list[str]) -> None:
    assert list(RULE[rule](kind, props, {})) == lines


def test_the_cost_of_hosts_is_that_of_their_parts() -> None:
    plain = {
        "machineType": "n1-standard-4",
        "zone": "us-central1-a",
        "bootDisk": {"initializeParams": {"type": "pd-ssd", "size": 100}},
    }
    gpus = {"guestAccelerators": [{"type": "nvidia-tesla-t4", "count": 2}], "scheduling": {"provisioningModel": "SPOT"}}
    public = {"networkInterfaces": [{}, {"accessConfigs": [{}]}]}
    price = price_list()["regions"]["us-central1"]
    costs = [_cost(plain), _cost(plain | gpus), _cost(plain | public), _cost({**plain, "bootDisk": None})]
    t4, disks, address = price["gpus"]["nvidia-tesla-t4"]["spot"], price["disks"], price["address"]["onDemand"]
    machines = {kind: 4 * rates["vcpu"] + 15 * rates["gib"] for kind, rates in price["machines"]["n1"].items()}
    ssd = 100 * disks["pd-ssd"] / 730
    assert costs == pytest.approx(
        [
            machines["onDemand"] + ssd,
            machines["spot"] + ssd + 2 * t4,
            machines["onDemand"] + ssd + address,
            machines["onDemand"] + 10 * disks["pd-standard"] / 730,
        ],
        abs=1e-4,
    )
    preemptible, spot = ({"scheduling": each} for each in ({"preemptible": True}, {"provisioningModel": "SPOT"}))
    assert _cost(plain | preemptible) == _cost(plain | spot) != costs[0]
    included = _cost({"machineType": "g2-standard-4", "zone": "us-central1-a"})
    assert included
    assert included > price["gpus"]["nvidia-l4"]["onDemand"]
    limit, host = round(costs[0] or 0, 4), (INSTANCE, plain)
    assert list(hourly_cost([host, ("gcp:other:Other", {})], {"maxHourlyCost": limit})) == []
    assert list(hourly_cost([host] * 9, {})) == list(hourly_cost([host] * 9, {"maxHourlyCost": 0})) == []
    assert list(hourly_cost([host, (INSTANCE, {**plain, "zone": "mars-north1-a"})], {"maxHourlyCost": limit / 2})) == [
        "there is no price for a n1-standard-4 in mars-north1-a: add it to infra/prices.yaml",
        f"the hosts cost {limit:.2f} USD an hour, more than {limit / 2:g}",
    ]


def test_a_machine_type_that_the_pack_does_not_know_needs_a_price_in_its_configuration() -> None:
    resources = [(INSTANCE, {"machineType": f"{link}c3-standard-4", "zone": "us-central1-a"}) for link in ("", "zones/z/")]
    line = (
        'the price of a c3-standard-4 is unknown: set the USD an hour of such a host, as {"hourly-cost": {"prices": '
        '{"c3-standard-4": 0.5}}}, by --policy-pack-config'
    )
    assert list(hourly_cost(resources, {})) == [line] * 2
    assert list(hourly_cost(resources, {"prices": {"c3-standard-4": 0.5}, "maxHourlyCost": 1})) == []
    assert list(hourly_cost(resources, {"prices": {"c3-standard-4": 0.75}, "maxHourlyCost": 1})) == [
        "the hosts cost 1.50 USD an hour, more than 1"
    ]
    known = {"machineType": "zones/z/n1-standard-4", "zone": "us-central1-a"}
    assert _cost(known) == _cost({**known, "machineType": "n1-standard-4"}) is not None
