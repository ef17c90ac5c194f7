"""Use an existing network and existing accounts: the stack creates only its own resources."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

import pulumi
import pytest
from stackmocks import PROJECT, ZONE, Program, Recorder, discover_offline
from test_bad_input import GOOD, get_error

from infra.gcp import target as gcp_target
from infra.gcp.discovery import Discovery, Subnet
from infra.gcp.zones import Place
from infra.scale_tiers import ClusterSpec

LINK = "projects/the-host/regions/us-central1/subnetworks/shared"
NETWORK = "projects/the-host/global/networks/net"
RANGE = ipaddress.IPv4Network("10.9.0.0/24")
OWN = '{"worker": "trainers@my-project-1.iam.gserviceaccount.com"}'


@pytest.fixture
def shared_subnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the discovery find the subnet LINK of another project."""

    def discover_shared(spec: ClusterSpec, choice: Sequence[Place], *_: Any) -> Discovery:
        discovery = discover_offline(spec, choice)
        return Discovery(
            discovery.place, discovery.spec, discovery.catalogue, (), Subnet(LINK, NETWORK, "the-host", True, RANGE)
        )

    def new_resource(self: Recorder, args: Any) -> Any:
        name, outputs = original(self, args)
        if args.typ.endswith(":Address"):
            outputs["address"] = f"10.9.0.{len(args.name)}"
        return name, outputs

    original = Recorder.new_resource
    monkeypatch.setattr(Recorder, "new_resource", new_resource)
    monkeypatch.setattr(gcp_target, "discover", discover_shared)


@pytest.mark.usefixtures("shared_subnet")
def test_an_existing_subnet_is_used_unchanged(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", subnetwork=LINK)
    for kind in ("Subnetwork", "Router", "RouterNat"):
        assert stack.of(kind) == []
    assert [item for item in stack.of("Network") if item.type.startswith("gcp:")] == []
    reserved = {item.name: item for item in stack.of("Address")}
    assert len(reserved) == 8
    for instance in stack.of("Instance"):
        address = reserved[f"{instance.name}-address"]
        assert address.inputs["addressType"] == "INTERNAL"
        assert address.inputs["subnetwork"] == LINK
        assert address.inputs["project"] == PROJECT
        (interface,) = instance.inputs["networkInterfaces"]
        assert (interface["subnetwork"], interface["networkIp"]) == (LINK, f"10.9.0.{len(address.name)}")
        assert address.urn in instance.depends
        assert f"\n{RANGE}\nSCALETIER_FILE\n" in instance.inputs["metadata"]["startup-script"]
    assert {host["address"] for host in stack.inventory["hosts"]} <= {f"10.9.0.{length}" for length in range(10, 20)}


@pytest.mark.usefixtures("shared_subnet")
def test_firewall_rules_target_only_the_stacks_own_accounts(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", subnetwork=LINK)
    rules = [item for item in stack.of("Firewall") if item.type.startswith("gcp:")]
    assert rules
    accounts = {item.inputs["serviceAccount"]["email"] for item in stack.of("Instance")}
    for rule in rules:
        assert (rule.inputs["project"], rule.inputs["network"]) == ("the-host", NETWORK)
        assert set(rule.inputs["targetServiceAccounts"]) <= accounts
    (deny,) = [rule for rule in rules if rule.inputs.get("denies")]
    assert set(deny.inputs["targetServiceAccounts"]) == accounts
    assert program("gcp", scaleTier="STANDARD_1", subnetwork=LINK, firewall="false").of("Firewall") == []


def test_an_existing_account_is_used_and_may_use_the_bucket(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", serviceAccount=OWN)
    assert {item.name for item in stack.of("Account")} == {"account-ps", "account-master"}
    account = "trainers@my-project-1.iam.gserviceaccount.com"
    worker = next(item for item in stack.of("Instance") if item.name == "worker-0")
    assert worker.inputs["serviceAccount"]["email"] == account
    granted = {
        item.inputs["role"] for item in stack.of("BucketIAMMember") if item.inputs["member"] == f"serviceAccount:{account}"
    }
    assert granted == {"roles/storage.objectUser", "roles/storage.legacyBucketReader"}
    rule = stack.one("Firewall", "worker-ps-peers")
    assert rule.inputs["sourceServiceAccounts"] == [account]


def test_the_next_zone_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lambda message, *_: messages.append(message))
    for zones in ("us-central1-a,us-central1-b", '["us-central1-a", "us-central1-b"]'):
        stack = program("gcp", scaleTier="BASIC", zones=zones)
        assert stack.one("Instance").inputs["zone"] == ZONE
        assert "`pulumi config set zones us-central1-b` creates them all in us-central1-b" in messages[-1]
    program("gcp", scaleTier="BASIC")
    assert "zone" not in messages[-1]


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("scaletier:firewall false goes with a subnetwork only", {"firewall": "false"}),
        ("scaletier:network applies only to the stack's own subnet", {"subnetwork": "mine", "network": "10.64.0.0/20"}),
        ("scaletier:flowLogs applies only to the stack's own subnet", {"subnetwork": "mine", "flowLogs": "true"}),
        ("write NAME, or projects/PROJECT/regions/REGION/subnetworks/NAME", {"subnetwork": "https://x/y"}),
        (
            "serviceAccount.worker 'me@example.com' is invalid: it is no service account of a project's own",
            {"serviceAccount": '{"worker": "me@example.com"}'},
        ),
        ("two roles have the same", {"serviceAccount": OWN.replace("}", ", ") + OWN.replace("worker", "ps").strip("{")}),
        ("serviceAccount.evaluator: this cluster has no evaluator", {"serviceAccount": OWN.replace("worker", "evaluator")}),
        ("must be a map: set one with `pulumi config set --path serviceAccount.name value`", {"serviceAccount": "x"}),
        ("must be of one region", {"zones": "us-central1-a,us-east1-b"}),
        ("gcp:zone 'us-central1' is not a zone", {"zones": "us-central1"}),
        ("write zones of one region", {"zones": "[us-central1-a"}),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_options_that_conflict_are_refused(monkeypatch: pytest.MonkeyPatch, words: str, config: dict[str, str]) -> None:
    assert words in get_error(monkeypatch, GOOD, **config)
