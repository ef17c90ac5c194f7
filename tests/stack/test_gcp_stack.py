"""Check the whole Google Cloud target: dependent changes, their order, and the operator's files."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import nullcontext
from typing import Any

import pulumi
import pytest
from gcpcases import GPUS, role_of
from stackmocks import PROJECT, ZONE, Program, Recorder, Stack
from test_bad_input import GOOD, get_error
from test_lxd import state_of

from infra import guard
from infra.cost import price_list
from infra.gcp import target
from infra.gcp.discovery import ExistingHost
from infra.guard import Change
from infra.scale_tiers import TargetError
from infra.state import StackState


def test_a_second_run_declares_the_same(program: Program, fresh_program: Program) -> None:
    first, second = program("gcp", **GPUS), fresh_program("gcp", **GPUS)
    assert {item.urn: item.inputs for item in first.resources} == {item.urn: item.inputs for item in second.resources}


def test_a_renamed_stack_keeps_its_resources(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = program("gcp", **GPUS)
    monkeypatch.setattr(Recorder, "state", state_of(stack))
    monkeypatch.setattr(pulumi, "get_stack", lambda: "prod")
    renamed = program("gcp", **GPUS)
    assert renamed.inventory["stack"] == "prod"
    before, after = (
        {(item.type, item.name): item.inputs for item in each.resources if item.type.startswith("gcp:")}
        for each in (stack, renamed)
    )
    assert after == before


def test_another_tier_changes_only_what_differs(program: Program) -> None:
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
    # Also the evaluator's account may start them.
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


def test_the_longest_chain_has_five_links_and_the_guard(stack: Stack) -> None:
    assert stack.chain_length == 6
    without_guard = [item for item in stack.resources if not item.type.endswith(":BucketGuard")]
    assert dataclasses.replace(stack, resources=without_guard).chain_length == 5


def test_a_destroy_deletes_the_guard_first(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", servingCount="1", forceDestroy="true", disruptJobs="true")
    guard = stack.one("BucketGuard")
    first = {"pulumi:pulumi:Stack", guard.type}
    before = {item.urn for item in stack.resources if not item.type.startswith("scaletier:") and item.type not in first}
    key = stack.one("OperatorKey").urn
    assert before - guard.depends == {key}, "the key is only in the state"
    assert guard.inputs == {"bucket": stack.one("Bucket").inputs["name"], "retain": False, "force": True, "disrupt": True}


def test_hosts_depend_on_the_firewall_and_their_bucket_grants(stack: Stack) -> None:
    rules = {item.urn for item in stack.of("Firewall") if item.type.startswith("gcp:")}
    for item in stack.of("Instance"):
        grants = {other.urn for other in stack.of("BucketIAMMember") if other.name.startswith(f"{role_of(item)}-")}
        assert rules | grants <= item.depends
        assert not {other.urn for other in stack.of("Instance")} & item.depends


def test_resources_with_a_unique_identity_are_deleted_before_replacement(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1")
    kinds = {item.type.rpartition(":")[2] for item in stack.resources if item.options.deleteBeforeReplace}
    assert kinds == {"BucketIAMMember", "Instance", "RouterNat"}
    assert [item.name for kind in kinds for item in stack.of(kind) if not item.options.deleteBeforeReplace] == []


@pytest.mark.parametrize("exists", [True, False])
def test_an_existing_bucket_is_adopted(program: Program, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    monkeypatch.setattr(target, "preflight", lambda *_: exists)
    monkeypatch.setattr(target, "_bucket_of", lambda _: None)
    stack = program("gcp", scaleTier="BASIC", forceDestroy="true")
    bucket = stack.one("Bucket")
    assert stack.one("BucketGuard").inputs["force"] is not exists, "otherwise hosts are deleted before the bucket is refused"
    assert bucket.options.importId == (bucket.inputs["name"] if exists else "")
    assert bool(bucket.options.ignoreChanges) is exists
    monkeypatch.setattr(target, "_bucket_of", lambda _: bucket.inputs["name"])
    assert not program("gcp", scaleTier="BASIC").one("Bucket").options.importId
    monkeypatch.setattr(target, "_bucket_of", lambda _: "another-one")
    monkeypatch.setattr(target, "contents", lambda *_: "")
    assert program("gcp", scaleTier="BASIC").one("Bucket").options.importId == (bucket.inputs["name"] if exists else "")


@pytest.mark.parametrize(
    ("current", "has_content", "retain", "refused"),
    [
        ("old", True, False, True),
        ("old", False, False, False),
        ("old", True, True, False),
        ("new", True, False, False),
        (None, True, False, False),
    ],
)
def test_a_bucket_with_content_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, current: str | None, has_content: bool, retain: bool, refused: bool
) -> None:
    monkeypatch.setattr(target, "contents", lambda *_: "jobs" * has_content)
    bucket = {"type": "gcp:storage/bucket:Bucket", "outputs": {"name": current}}
    state = StackState({"urn:pulumi:dev::scaletier::gcp:storage/bucket:Bucket::bucket": bucket} if current else {})
    error = "this stack's bucket old contains data, and new would replace it: `pulumi config set bucket old` to go on using it"
    with pytest.raises(TargetError, match=error) if refused else nullcontext():
        target._check_replaced_bucket(target._bucket_of(state), "new", retain, lambda _: None)


def test_a_replaced_bucket_is_retained_only_if_the_last_update_retains_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "contents", lambda *_: "jobs")
    retaining = {"scaleTier": "BASIC", "bucket": "new", "forceDestroy": "true", "retainBucket": "true"}
    for outputs in ({}, dict(program("gcp", scaleTier="BASIC").exports)):
        monkeypatch.setattr(Recorder, "state", state_with_bucket("old", **outputs))
        error = get_error(monkeypatch, GOOD, **retaining)
        assert "`pulumi config set bucket old` to go on using it; to retain it unused, then also `pulumi config set" in error
    monkeypatch.setattr(Recorder, "state", state_with_bucket("old", **program("gcp", **retaining | {"bucket": "old"}).exports))
    assert program("gcp", **retaining).one("Bucket").inputs["name"] == "new"
    assert "contains data" in get_error(monkeypatch, GOOD, **retaining | {"retainBucket": "false"})


def state_with_bucket(name: str, **outputs: Any) -> dict[str, Any]:
    """Return the state of a stack with these outputs."""
    return {
        "urn::a::bucket": {"type": "gcp:storage/bucket:Bucket", "outputs": {"name": name}},
        "urn::a::stack": {"type": "pulumi:pulumi:Stack", "outputs": outputs},
    }


def test_a_host_that_an_update_replaces_is_known_before(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk goes, and with it a job that runs there; Google's answers are not comparable with the configuration."""
    changes, buckets = list[Change](), set[str]()

    def protect_jobs(change: Change, read: Any, *_: Any) -> None:
        changes.append(change)
        buckets.add(read.__self__.bucket)

    monkeypatch.setattr(guard, "protect_jobs", protect_jobs)
    config = {"scaleTier": "CUSTOM", "masterType": "n1-standard-4", "workerType": "n1-standard-4", "workerCount": "1"}
    config |= {"retainBucket": "true", "image": "my-project-1/first"}
    state = state_of(program("gcp", **config))
    hosts = ["master-0", "worker-0"]
    other_zone = {"project": PROJECT, "zone": "us-central1-b"}
    for values, replaced in (
        ({}, []),
        ({"masterType": "n1-standard-8", "labels": '{"team": "vision"}', "runtimeVersion": "2.20.0", "workerCount": "2"}, []),
        ({"provisioningModel": '{"worker": "SPOT"}'}, ["worker-0"]),
        ({"acceleratorType": '{"worker": "nvidia-tesla-t4"}'}, ["worker-0"]),
        ({"image": "projects/my-project-1/global/images/family/first"}, []),
        ({"image": "projects/my-project-1/global/images/first"}, hosts),
        ({"image": "my-project-1/second"}, hosts),
        ({"bootDiskType": "pd-balanced"}, hosts),
        ({"bootDiskSize": "200"}, hosts),
        ({"network": "10.80.0.0/20"}, hosts),
        ({"publicAddress": "true"}, hosts),
        ({"bucket": "another-bucket"}, hosts),
        ({"provider": other_zone}, hosts),
    ):
        monkeypatch.setattr(Recorder, "state", state)
        program("gcp", **{**config, **values})
        assert changes.pop() == Change([], replaced), values
    assert len(buckets) == 1, "jobs are in the present bucket, also if the configuration names another"
    other = state_of(program("gcp", **config, bootDiskSize="200"))
    components = {urn: resource for urn, resource in other.items() if resource["type"].startswith("scaletier:")}
    for interrupted, replaced in ((state | components, hosts), (other | {urn: state[urn] for urn in components}, [])):
        monkeypatch.setattr(Recorder, "state", interrupted)
        program("gcp", **config, bootDiskSize="200")
        assert changes.pop() == Change([], replaced), "the instance counts: its component's outputs are stored apart"
    monkeypatch.setattr(Recorder, "state", state)
    for resource in state.values():
        resource["outputs"].get("metadata", {}).pop("scaletier-definition", None)
    program("gcp", **config, bootDiskSize="200")
    assert changes.pop() == Change(), "a state of before"
    program("gcp", **config, bucket="another-bucket")
    assert changes.pop() == Change([], hosts)


def test_both_targets_export_the_same_schema(program: Program) -> None:
    stack = program("gcp", scaleTier="STANDARD_1", labels='{"team": "vision"}')
    inventory = stack.inventory
    assert set(inventory) == set(program("lxd", scaleTier="STANDARD_1").inventory)
    assert inventory["bucket"] == inventory["operatorBucket"] == f"gs://{stack.one('Bucket').inputs['name']}"
    assert inventory["labels"] == {"team": "vision"}
    ps = inventory["hosts"][0]
    assert (ps["name"], ps["address"], ps["cpus"], ps["memoryBytes"]) == ("ps-0", "10.64.4.0", 4, 15 * 2**30)
    assert ps["hourlyCost"] == pytest.approx(0.2133, abs=1e-4)
    assert all(host["createTime"] == f"created-{host['name']}" for host in inventory["hosts"])


def read_ssh_config(stack: Stack) -> tuple[dict[str, str], str]:
    hosts = dict(re.findall(r"^Host (\S+) .*\n  HostName (.*)$", stack.files["ssh_config"], re.MULTILINE))
    return hosts, stack.files["ssh_config"]


def test_ssh_goes_through_iap_by_the_instances_names(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC")
    hosts, text = read_ssh_config(stack)
    name = stack.one("Instance").inputs["name"]
    assert hosts == {"master-0": name}
    assert f"ProxyCommand gcloud compute start-iap-tunnel %h %p --listen-on-stdin --project {PROJECT} --zone {ZONE}" in text
    assert "StrictHostKeyChecking yes" in text
    assert stack.files["known_hosts"] == f"{name} ssh-ed25519 master-0\n"


@pytest.mark.parametrize(("public", "host"), [("false", "10.64.0.2"), ("true", "203.0.113.9")])
def test_ssh_goes_straight_from_an_operators_range(program: Program, public: str, host: str) -> None:
    stack = program("gcp", scaleTier="BASIC", operatorCidr="198.51.100.0/24", publicAddress=public)
    hosts, text = read_ssh_config(stack)
    assert hosts == {"master-0": host}
    assert "ProxyCommand" not in text
    assert stack.files["known_hosts"] == f"{host} ssh-ed25519 master-0\n"
    assert stack.one("Firewall", "operator-master-22").inputs["sourceRanges"] == ["198.51.100.0/24"]


def test_no_secret_and_no_token_is_in_a_resource(program: Program) -> None:
    stack = program("gcp", provider={"project": PROJECT, "zone": ZONE, "accessToken": "ya29.secret"}, scaleTier="BASIC")
    assert "ya29" not in json.dumps([item.inputs for item in stack.resources], default=str)


def test_host_keys_are_read_from_the_providers_endpoint(program: Program) -> None:
    provider = {"project": PROJECT, "zone": ZONE, "computeCustomEndpoint": "http://127.0.0.1:1/compute/v1"}
    assert program("gcp", provider=provider).one("HostKeys").inputs["endpoint"] == "http://127.0.0.1:1/compute/v1/"


def test_every_preview_prints_the_price(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lambda message, *_: messages.append(message))
    program("gcp", scaleTier="STANDARD_1")
    assert messages == [
        "about 2.18 USD an hour in us-central1: ps 0.64, master 0.31, worker 1.23, network 0.01 "
        f"(estimated on {price_list()['date']}, without traffic and the bucket)"
    ]


def test_what_is_found_at_google_is_compared_with_the_state(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts, the bucket and the price are checked by the program before it declares anything."""
    warnings: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda message, *_: warnings.append(message))
    hosts = tuple(ExistingHost(name, ZONE, "n1-standard-4", None, False, 100) for name in ("master-0", "worker-7"))
    offline = target.discover
    monkeypatch.setattr(target, "discover", lambda *args: dataclasses.replace(offline(*args), hosts=hosts))
    monkeypatch.setattr(target, "contents", lambda *_: "jobs")
    assert "hosts of a stack dev that are not in this state" in get_error(monkeypatch, GOOD, scaleTier="BASIC")
    bucket = {"type": "gcp:storage/bucket:Bucket", "outputs": {"name": "old"}}
    master = {"type": "gcp:compute/instance:Instance", "outputs": {}}
    up = {"type": "pulumi:pulumi:Stack", "outputs": {"hosts": {"master-0": "10.64.0.2"}, "target": "gcp"}}
    monkeypatch.setattr(Recorder, "state", {"urn::a::bucket": bucket, "urn::a::master-0": master})
    assert "this stack's bucket old contains data" in get_error(monkeypatch, GOOD, scaleTier="BASIC", bucket="new")
    for state in ({"urn::a::bucket": bucket}, {"urn::a::stack": up}):
        monkeypatch.setattr(Recorder, "state", {**state, "urn::a::master-0": master})
        warnings.clear()
        program("gcp", scaleTier="BASIC", bucket="old", disruptJobs="true")
        (warning,) = warnings
        assert "left hosts at Google that are not in the state, worker-7: `python -m infra.gcp.orphans --delete`" in warning


def test_hosts_without_a_key_are_named_by_the_program(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda message, *_: warnings.append(message))
    original = Recorder.new_resource

    def new_resource(self: Recorder, args: Any) -> Any:
        name, outputs = original(self, args)
        return name, outputs | ({"late": ["master-0"]} if args.typ.endswith(":HostKeys") else {})

    monkeypatch.setattr(Recorder, "new_resource", new_resource)
    program("gcp", scaleTier="BASIC")
    (warning,) = warnings
    assert warning.startswith("no host key yet of master-0, so ssh refuses them: `pulumi up` looks again")


def test_the_inventory_tells_how_hosts_are_started(program: Program) -> None:
    metadata = "http://metadata.google.internal/computeMetadata/v1/instance"
    inventory = program("gcp", scaleTier="BASIC").inventory
    assert inventory["power"] == {
        "url": "https://compute.googleapis.com/compute/v1/",
        "operatorUrl": "https://compute.googleapis.com/compute/v1/",
        "token": f"{metadata}/service-accounts/default/token",
        "tokenCommand": "gcloud auth application-default print-access-token",
        "preempted": f"{metadata}/preempted",
        "headers": {"Metadata-Flavor": "Google"},
    }
    assert (inventory["pollSeconds"], inventory["tensorflow"]) == (4.0, "2.21.0")
