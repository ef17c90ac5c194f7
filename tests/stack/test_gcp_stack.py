"""The Google Cloud target as a whole: dependent changes, their order, and the operator's files."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pulumi
import pytest
from gcpcases import GPUS, role_of
from stackmocks import PROJECT, STACK, ZONE, Program, Stack

from infra.cost import price_list
from infra.gcp import target
from infra.gcp.cluster import _warn
from infra.scale_tiers import TargetError
from infra.state import StackState


def test_nothing_changes_by_itself(program: Program, fresh_program: Program) -> None:
    first, second = program("gcp", **GPUS), fresh_program("gcp", **GPUS)
    assert {item.urn: item.inputs for item in first.resources} == {item.urn: item.inputs for item in second.resources}


def test_another_tier_touches_the_difference_alone(program: Program) -> None:
    small = {item.urn: item.inputs for item in program("gcp", scaleTier="STANDARD_1").resources}
    large = {
        item.urn: item.inputs
        for item in program(
            "gcp",
            scaleTier="CUSTOM",
            masterType="n1-highcpu-8",
            workerType="n1-highcpu-8",
            workerCount="5",
            parameterServerType="n1-standard-4",
            parameterServerCount="3",
            evaluatorType="n1-standard-4",
            evaluatorCount="1",
        ).resources
    }
    changed = {urn.rpartition("::")[2] for urn, inputs in small.items() if large.get(urn) != inputs}
    hosts = {"master-0", *(f"worker-{index}" for index in range(4)), *(f"ps-{index}" for index in range(3))}
    # The evaluator's account may start them, too.
    assert changed == {"host-keys", "operator-files", "ready", *(f"start-{host}" for host in hosts)}
    new = {urn.rpartition("::")[2] for urn in large if urn not in small}
    assert new == {
        "worker-4",
        "evaluator-0",
        "account-evaluator",
        "evaluator-bucket",
        "evaluator-objects",
        "operator-evaluator-22",
        "evaluator-evaluator-peers",
        *(f"{role}-evaluator-peers" for role in ("ps", "master", "worker")),
        *(f"evaluator-{role}-peers" for role in ("ps", "master", "worker")),
        "start-worker-4",
        "start-evaluator-0",
    }


def test_the_longest_chain_has_five_links(stack: Stack) -> None:
    assert stack.chain == 5


def test_hosts_wait_for_the_firewall_and_for_their_right_to_the_bucket(stack: Stack) -> None:
    rules = {item.urn for item in stack.of("Firewall") if item.type.startswith("gcp:")}
    for item in stack.of("Instance"):
        grants = {found.urn for found in stack.of("BucketIAMMember") if found.name.startswith(f"{role_of(item)}-")}
        assert rules | grants <= item.depends
        assert not {found.urn for found in stack.of("Instance")} & item.depends


def test_what_is_one_thing_however_often_it_is_made_goes_before_it_comes_again(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1")
    first = {item.type.rpartition(":")[2] for item in stack.resources if item.options.deleteBeforeReplace}
    assert first == {"BucketIAMMember", "Instance", "RouterNat"}


@pytest.mark.parametrize("there", [True, False])
def test_an_existing_bucket_is_adopted(program: Program, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(target, "preflight", lambda *_: there)
    monkeypatch.setattr(target, "_bucket_of", lambda _: None)
    bucket = program("gcp", scaleTier="BASIC").one("Bucket")
    assert bucket.options.importId == (bucket.inputs["name"] if there else "")
    assert bool(bucket.options.ignoreChanges) is there
    monkeypatch.setattr(target, "_bucket_of", lambda _: bucket.inputs["name"])
    assert not program("gcp", scaleTier="BASIC").one("Bucket").options.importId


@pytest.mark.parametrize(("there", "known", "refused"), [(True, False, True), (True, True, False), (False, False, False)])
def test_another_person_s_stack_of_this_name_is_left_alone(there: bool, known: bool, refused: bool) -> None:
    with pytest.raises(TargetError, match="hosts of a stack dev that this state does not know") if refused else nullcontext():
        target._check_ours(there, known, PROJECT, STACK)


def test_hosts_that_a_killed_update_left_are_named_at_every_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the configuration no longer has, too."""
    said: list[str] = []
    monkeypatch.setattr("pulumi.log.warn", said.append)
    there = [SimpleNamespace(name=name) for name in ("master-0", "worker-0", "worker-3")]
    kind = "gcp:compute/instance:Instance"
    state = StackState({f"urn::{name}": {"type": kind, "outputs": {}} for name in ("master-0", "worker-0")})
    target._warn_unrecorded(SimpleNamespace(hosts=there[:2]), state)  # type: ignore[arg-type]
    target._warn_unrecorded(SimpleNamespace(hosts=None), state)  # type: ignore[arg-type]
    assert said == []
    target._warn_unrecorded(SimpleNamespace(hosts=there), state)  # type: ignore[arg-type]
    (line,) = said
    assert line.startswith("worker-3 at Google and not in the state")
    assert "python -m infra.gcp.orphans --delete" in line


@pytest.mark.parametrize(
    ("there", "holds", "retain", "refused"),
    [
        ("old", True, False, True),
        ("old", False, False, False),
        ("old", True, True, False),
        ("new", True, False, False),
        (None, True, False, False),
    ],
)
def test_no_bucket_that_holds_anything_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch, there: str | None, holds: bool, retain: bool, refused: bool
) -> None:
    monkeypatch.setattr(target, "has_content", lambda *_: holds)
    bucket = {"type": "gcp:storage/bucket:Bucket", "outputs": {"name": there}}
    state = StackState({"urn:pulumi:dev::scaletier::gcp:storage/bucket:Bucket::bucket": bucket} if there else {})
    words = "this stack's bucket old holds something, and new would take its place: `pulumi config set bucket old` keeps it"
    with pytest.raises(TargetError, match=words) if refused else nullcontext():
        target._check_kept(target._bucket_of(state), "new", retain, lambda _: None)


def test_the_outputs_are_of_the_one_schema(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", labels='{"team": "vision"}')
    inventory = stack.inventory
    assert set(inventory) == set(program("lxd", scaleTier="STANDARD_1").inventory)
    assert inventory["bucket"] == inventory["operatorBucket"] == f"gs://{stack.one('Bucket').inputs['name']}"
    assert inventory["labels"] == {"team": "vision"}
    ps = inventory["hosts"][0]
    assert (ps["name"], ps["address"], ps["cpus"], ps["memoryBytes"]) == ("ps-0", "10.64.4.0", 4, 15 * 2**30)
    assert ps["hourlyCost"] == pytest.approx(0.2133, abs=1e-4)
    assert all(host["createTime"] == f"created-{host['name']}" for host in inventory["hosts"])


def ssh_of(stack: Stack) -> tuple[dict[str, str], str]:
    hosts = dict(re.findall(r"^Host (\S+) .*\n  HostName (.*)$", stack.files["ssh_config"], re.MULTILINE))
    return hosts, stack.files["ssh_config"]


def test_ssh_goes_through_iap_by_the_instances_names(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC")
    hosts, text = ssh_of(stack)
    name = stack.one("Instance").inputs["name"]
    assert hosts == {"master-0": name}
    assert f"ProxyCommand gcloud compute start-iap-tunnel %h %p --listen-on-stdin --project {PROJECT} --zone {ZONE}" in text
    assert "StrictHostKeyChecking yes" in text
    assert stack.files["known_hosts"] == f"{name} ssh-ed25519 master-0\n"


@pytest.mark.parametrize(("public", "host"), [("false", "10.64.0.2"), ("true", "203.0.113.9")])
def test_ssh_goes_straight_from_an_operators_range(program: Program, public: str, host: str) -> None:
    stack = program("gcp", scaleTier="BASIC", operatorCidr="198.51.100.0/24", publicAddress=public)
    hosts, text = ssh_of(stack)
    assert hosts == {"master-0": host}
    assert "ProxyCommand" not in text
    assert stack.files["known_hosts"] == f"{host} ssh-ed25519 master-0\n"
    assert stack.one("Firewall", "operator-master-22").inputs["sourceRanges"] == ["198.51.100.0/24"]


def test_no_secret_and_no_token_is_in_a_resource(program: Program) -> None:
    stack = program("gcp", provider={"project": PROJECT, "zone": ZONE, "accessToken": "ya29.secret"}, scaleTier="BASIC")
    assert "ya29" not in json.dumps([item.inputs for item in stack.resources], default=str)


def test_host_keys_are_asked_for_where_the_provider_is_pointed(program: Program) -> None:
    place = {"project": PROJECT, "zone": ZONE, "computeCustomEndpoint": "http://127.0.0.1:1/compute/v1"}
    assert program("gcp", provider=place).one("HostKeys").inputs["endpoint"] == "http://127.0.0.1:1/compute/v1/"


def test_a_host_whose_key_is_late_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda message, *_: said.append(message))
    program("gcp", scaleTier="BASIC")
    assert said == []
    _warn(["worker-1"])
    assert said[0].startswith("no host key yet of worker-1, so ssh refuses them: `pulumi up` looks again")


def test_the_price_is_said_at_every_preview(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lambda message, *_: said.append(message))
    program("gcp", scaleTier="STANDARD_1")
    assert said == [
        "about 2.18 USD an hour in us-central1: ps 0.64, master 0.31, worker 1.23, network 0.01 "
        f"(estimated on {price_list()['date']}, without traffic and the bucket)"
    ]
