"""The effect of `pulumi up` after a change on a live Google stack, by the real engine with records.

Each row of the table in docs/google-cloud.md is tested here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest
from cloud import Cloud, PulumiError, Stack, Step
from provider import KINDS, is_within
from pydantic.alias_generators import to_camel

from infra.gcp.config import GcpConfig
from infra.templates import ROOT

LIVE = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "1",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "1",
    "evaluatorType": "n1-standard-4",
    "evaluatorCount": "1",
    "acceleratorType": '{"evaluator": "nvidia-tesla-t4"}',
    "image": "my-project-1/first",  # otherwise the image of all hosts changes with the last GPU
    "servingType": "n1-standard-4",
    "servingCount": "1",
}
SIZES = dict.fromkeys(key for key in LIVE if key != "image" and not key.startswith("serving"))
ROLES = {"master": "master", "worker": "worker", "parameterServer": "ps", "evaluator": "evaluator", "serving": "serving"}
OTHERS = "projects/my-project-1/regions/us-central1/subnetworks/theirs"
STARTS = "InstanceIAMBinding start-"


class Change(NamedTuple):
    """A change of one key of the configuration above, and a pattern of the steps that it causes."""

    values: Mapping[str, str | None]
    steps: str = ""


# Part of the steps that recreate a host.
_DEFINITION = r"|Instance .* metadata\.scaletier-definition"
# Plans with several keys each. Steps are assigned to keys by resource and property, as the engine lists each reason for a
# replacement. If it lists none, as for a trigger, the key has its own hosts or its own plan.
PLANS: tuple[Mapping[str, Change], ...] = (
    {
        **{
            f"{role}Type": Change({f"{role}Type": "n1-standard-8"}, f"Instance {host}-0 machineType")
            for role, host in ROLES.items()
        },
        "serviceAccount": Change(
            {"serviceAccount": '{"worker": "theirs@my-project-1.iam.gserviceaccount.com"}'},
            rf"Instance worker-0 serviceAccount\..*|Firewall .*ServiceAccounts|BucketIAMMember worker-.*|{STARTS}.* members|"
            "Account account-worker ",
        ),
        "labels": Change({"labels": '{"team": "vision"}'}, r"(Instance|Bucket) .* labels\.team"),
        "flowLogs": Change({"flowLogs": "true"}, "Subnetwork subnet logConfig"),
        "operatorCidr": Change({"operatorCidr": "203.0.113.7/32"}, "Firewall operator-.* sourceRanges"),
        "forceDestroy": Change({"forceDestroy": "true"}, "Bucket bucket forceDestroy"),
        "idleTimeout": Change({"idleTimeout": "30m"}, r"Instance .* metadata\.startup-script"),
    },
    {
        **{
            f"{role}Count": Change({f"{role}Count": "2"}, f"Instance {host}-1 |{STARTS}{host}-1 ")
            for role, host in ROLES.items()
            if role != "master"
        },
        "runtimeVersion": Change({"runtimeVersion": "2.20.0"}, r"Instance .*-0 metadata\.startup-script"),
        "retainBucket": Change({"retainBucket": "true"}),
        "disruptJobs": Change({"disruptJobs": "true"}),
        "maxHourlyCost": Change({"maxHourlyCost": "9"}),
        "hostKeyTimeout": Change({"hostKeyTimeout": "60"}),
        "readyTimeout": Change({"readyTimeout": "60"}),
    },
    {
        "acceleratorType": Change(
            {"acceleratorType": '{"evaluator": "nvidia-tesla-t4", "worker": "nvidia-tesla-t4"}'},
            f"(Instance |{STARTS})worker-0 .*|Firewall out-drivers .*",
        ),
        "acceleratorCount": Change({"acceleratorCount": '{"evaluator": 2}'}, f"(Instance |{STARTS})evaluator-0 .*"),
        "provisioningModel": Change({"provisioningModel": '{"master": "SPOT"}'}, f"(Instance |{STARTS})master-0 .*"),
    },
    {
        "gcp:zone": Change({"gcp:zone": "us-central1-b"}, f"Instance .* zone|{STARTS}.*{_DEFINITION}"),
        "image": Change(
            {"image": "my-project-1/scaletier"}, rf"Instance .* bootDisk\..*\.image|Firewall out-drivers .*{_DEFINITION}"
        ),
        "bootDiskType": Change({"bootDiskType": "pd-balanced"}, rf"Instance .* bootDisk\..*\.type{_DEFINITION}"),
        "bootDiskSize": Change({"bootDiskSize": "200"}, rf"Instance .* bootDisk\..*\.size{_DEFINITION}"),
    },
    {
        "zones": Change({"gcp:zone": None, "zones": "us-central1-b"}, f"Instance .* zone{_DEFINITION}"),
        "subnetwork": Change(
            {"subnetwork": OTHERS, "network": None},
            rf"Instance .* (networkInterfaces\..*|metadata\.startup-script)|{STARTS}.*|"
            f"(Address|Firewall|Network|Subnetwork|Router|RouterNat) .*{_DEFINITION}",
        ),
    },
    {"network": Change({"network": "10.80.0.0/20"}, ".*")},
    {"egress": Change({"egress": "open"}, r"Firewall out-.*|Instance .* metadata\.startup-script")},
    {"publicAddress": Change({"publicAddress": "true"}, ".*")},
    {"scaleTier": Change({**SIZES, "scaleTier": "STANDARD_1"}, ".*")},
    # Refused changes, one per plan, as only the first is reported.
    {"target": Change({"target": "lxd", "network": None, **dict.fromkeys(("operatorCidr", "gcp:project", "gcp:zone"))})},
    {"gcp:project": Change({"gcp:project": "my-project-2"})},
    {"gcp:region": Change({"gcp:zone": "europe-west4-a"})},
    {"bucket": Change({"bucket": "another-bucket"})},
    {"firewall": Change({"firewall": "false"})},
)
CHANGES = {key: (number, change) for number, plan in enumerate(PLANS) for key, change in plan.items()}
PlanSteps = Callable[[int], list[Step] | PulumiError]


@pytest.fixture(scope="module")
def live(records: Cloud) -> Iterator[Stack]:
    network = "https://www.googleapis.com/compute/v1/projects/my-project-1/global/networks/theirs"
    records.google.subnets[OTHERS] = {"network": network, "privateIpGoogleAccess": True, "ipCidrRange": "10.9.0.0/24"}
    with records.up(**LIVE) as stack:
        records.put(stack.inventory["bucket"].removeprefix("gs://"), "jobs/job01/output/model", b"dear")
        yield stack


@pytest.fixture(scope="module")
def plan_steps(live: Stack) -> PlanSteps:
    """Return the engine's steps for all changes of a plan on the cluster's own resources, or the error."""

    @functools.cache
    def steps(number: int) -> list[Step] | PulumiError:
        values = {key: value for change in PLANS[number].values() for key, value in change.values.items()}
        try:
            # Nothing has changed since the stack came up, as the first test checks.
            return [step for step in live.plan(refresh=False, **values) if step.kind in KINDS]
        except PulumiError as error:
            return error

    return steps


def effect_of(steps: list[Step]) -> str:
    """Return the effect of steps on the cluster, in the table's words."""
    hosts = [step for step in steps if step.kind == "Instance"]
    ops = {step.op for step in hosts}
    if "replace" in ops:
        return "recreated"
    if ops & {"create", "delete"}:
        return "added or removed"
    if any(is_within(step.property, KINDS["Instance"].stopped) for step in hosts):
        return "restarted"
    return "in place" if steps else "no effect"


def is_caused_by(change: Change, step: Step) -> bool:
    return bool(re.fullmatch(change.steps, f"{step.kind} {step.name} {step.property}"))


def documented_effects() -> dict[str, str]:
    """Return the table of docs/google-cloud.md: effects by key."""
    text = (ROOT / "docs/google-cloud.md").read_text().partition("### What a change does")[2].partition("\n### ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return {key: effect.strip() for keys, effect in rows for key in re.findall(r"`([^`]+)`", keys)}


def test_each_key_has_a_row_in_the_docs() -> None:
    keys = {to_camel(name) for name in GcpConfig.model_fields} | {"gcp:project", "gcp:region", "gcp:zone"}
    assert keys == CHANGES.keys() == documented_effects().keys()


def test_a_second_up_and_a_refresh_change_nothing(records: Cloud, live: Stack) -> None:
    before = list(records.world.history)
    live.up()
    live.pulumi("refresh", "--yes")
    assert live.plan() == []
    assert records.world.history == before


@pytest.mark.parametrize("key", CHANGES)
def test_a_change_has_the_documented_effect(plan_steps: PlanSteps, key: str) -> None:
    number, change = CHANGES[key]
    steps = plan_steps(number)
    if isinstance(steps, PulumiError):
        effect = "refused"
        assert len(str(steps).strip().splitlines()) <= 2, steps
    else:
        effect = effect_of([step for step in steps if is_caused_by(change, step)])
    assert effect == documented_effects()[key]


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_no_change_has_other_effects_or_deletes_the_bucket(plan_steps: PlanSteps, number: int) -> None:
    steps = plan_steps(number)
    if isinstance(steps, list):
        assert [step for step in steps if not any(is_caused_by(change, step) for change in PLANS[number].values())] == []
        assert [step for step in steps if step.kind == "Bucket" and step.op != "update"] == []


def test_up_restores_a_stopped_and_a_deleted_host(records: Cloud, live: Stack) -> None:
    by_replica = {each["labels"]["scaletier-replica"]: each for each in records.world.resources_of("Instance")}
    records.world.preempt(by_replica["worker-0"]["name"])
    records.world.delete("Instance", records.world.id_of("Instance", by_replica["ps-0"]))
    previous = len(records.world.history)
    live.up()
    assert sorted(records.world.history[previous:]) == [
        f"create Instance {by_replica['ps-0']['name']}",
        f"update Instance {by_replica['worker-0']['name']}",
    ]
    assert {each["currentStatus"] for each in records.world.resources_of("Instance")} == {"RUNNING"}
    assert live.plan() == []


def test_hosts_are_recreated_and_the_bucket_stays(records: Cloud, live: Stack) -> None:
    grants = set(records.google.grants)
    for change in (
        {"network": "10.80.0.0/20"},
        {"gcp:zone": "us-central1-b"},
        {"runtimeVersion": "2.20.0", "idleTimeout": "30m"},
    ):
        live.up(**change)
        assert live.plan() == []
        assert len(records.world.resources_of("Instance")) == len(live.inventory["hosts"]) == 5
    assert {each["zone"] for each in records.world.resources_of("Instance")} == {"us-central1-b"}
    assert records.google.grants == grants
    assert len(records.world.resources_of("RouterNat")) == 1
    assert records.objects("jobs/") == ["jobs/job01/output/model"]
