"""Every property of the Google Cloud target that the documentation promises, for all tiers, with and without GPUs and spot."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import pulumi
import pytest
from stackmocks import KEY, PROJECT, STACK, ZONE, Program, Recorded, Stack
from test_firewall_answers import CUSTOM, TIERS

from infra.cost import price_list
from infra.gcp.cluster import _warn
from infra.gcp.firewall import DENY_PRIORITY, IAP_RANGE
from infra.spec import ScaleTier

GPUS = {
    **CUSTOM,
    "acceleratorType": '{"worker": "NVIDIA_TESLA_V100", "evaluator": "nvidia-tesla-t4"}',
    "acceleratorCount": '{"worker": 2}',
    "provisioningModel": '{"worker": "SPOT", "ps": "SPOT"}',
}
L4 = {"scaleTier": "CUSTOM", "masterType": "g2-standard-24", "provisioningModel": '{"master": "SPOT"}'}
A100 = {"scaleTier": "CUSTOM", "masterType": "a2-highgpu-2g"}
ALL = [*TIERS, GPUS, L4, A100, {"scaleTier": "BASIC_GPU", "publicAddress": "true"}]
HOSTS = {ScaleTier.BASIC: 1, ScaleTier.STANDARD_1: 8, ScaleTier.PREMIUM_1: 31, ScaleTier.BASIC_GPU: 1}
LEGAL = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")


@pytest.fixture(params=ALL, ids=lambda config: "-".join(re.findall(r"\w+", str([*config.values()])))[:60])
def stack(request: pytest.FixtureRequest, program: Program) -> Stack:
    return program("gcp", **request.param)


def email(role: str, stack: Stack) -> str:
    return f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"


def role_of(instance: Recorded) -> str:
    return instance.name.rpartition("-")[0]


def test_every_name_is_legal_and_used_once(stack: Stack) -> None:
    names: set[tuple[str, str]] = set()
    for item in stack.resources:
        name = item.inputs.get("accountId") or item.inputs.get("name")
        if item.type.startswith("gcp:") and "IAMMember" not in item.type:
            assert LEGAL.match(name), name
            assert (item.type, name) not in names
            names.add((item.type, name))
        if "accountId" in item.inputs:
            assert 6 <= len(name) <= 30


def test_everything_says_its_project_and_place(stack: Stack) -> None:
    for item in stack.resources:
        if item.type.startswith("gcp:") and "IAMMember" not in item.type:
            assert item.inputs["project"] == PROJECT
        if "region" in item.inputs:
            assert item.inputs["region"] == ZONE[:-2]


def test_the_network_has_one_subnet_with_private_access_and_nat(stack: Stack) -> None:
    (network,) = [item for item in stack.of("Network") if item.type.startswith("gcp:")]
    assert network.inputs["autoCreateSubnetworks"] is False
    assert network.inputs["routingMode"] == "REGIONAL"
    subnet, nat = stack.one("Subnetwork"), stack.one("RouterNat")
    assert subnet.inputs["privateIpGoogleAccess"] is True
    assert subnet.inputs["ipCidrRange"] == "10.64.0.0/20"
    assert "logConfig" not in subnet.inputs
    assert nat.inputs["natIpAllocateOption"] == "AUTO_ONLY"
    assert nat.inputs["sourceSubnetworkIpRangesToNat"] == "LIST_OF_SUBNETWORKS"
    assert nat.inputs["subnetworks"][0]["sourceIpRangesToNats"] == ["ALL_IP_RANGES"]
    assert nat.inputs["logConfig"] == {"enable": True, "filter": "ERRORS_ONLY"}


def test_flow_logs_are_there_when_asked_for(program: Program) -> None:
    assert program("gcp", flowLogs="true").one("Subnetwork").inputs["logConfig"]["flowSampling"] == 0.5


def test_what_no_rule_allows_is_refused_and_logged(stack: Stack) -> None:
    (deny,) = [item for item in stack.of("Firewall") if item.inputs.get("denies")]
    assert deny.inputs["priority"] == DENY_PRIORITY
    assert deny.inputs["denies"] == [{"protocol": "all"}]
    assert deny.inputs["sourceRanges"] == ["0.0.0.0/0"]
    assert deny.inputs["logConfig"] == {"metadata": "INCLUDE_ALL_METADATA"}
    for key in ("targetServiceAccounts", "targetTags"):
        assert key not in deny.inputs


def test_rules_go_by_service_account_and_ssh_comes_from_iap(stack: Stack) -> None:
    for item in stack.of("Firewall"):
        if "allows" not in item.inputs:
            continue
        assert len(item.inputs["targetServiceAccounts"]) == 1
        (allow,) = item.inputs["allows"]
        assert allow["protocol"] == "tcp"
        if allow["ports"] == ["22"]:
            assert item.inputs["sourceRanges"] == [str(IAP_RANGE)]
            assert "sourceServiceAccounts" not in item.inputs
        else:
            assert allow["ports"] == ["2222"]
            assert "sourceRanges" not in item.inputs
            assert len(item.inputs["sourceServiceAccounts"]) == 1


def test_a_role_has_one_account_which_may_use_the_bucket_alone(stack: Stack) -> None:
    roles = {role_of(item) for item in stack.of("Instance")}
    assert {item.name for item in stack.of("Account")} == {f"account-{role}" for role in roles}
    assert {item.type for item in stack.resources if "IAM" in item.type} == {"gcp:storage/bucketIAMMember:BucketIAMMember"}
    granted = {(item.inputs["member"], item.inputs["role"]) for item in stack.of("BucketIAMMember")}
    assert granted == {
        (f"serviceAccount:{email(role, stack)}", name)
        for role in roles
        for name in ("roles/storage.objectUser", "roles/storage.legacyBucketReader")
    }


def test_the_bucket_is_private_versioned_and_not_destroyed_with_data(stack: Stack) -> None:
    bucket = stack.one("Bucket")
    assert bucket.inputs["uniformBucketLevelAccess"] is True
    assert bucket.inputs["publicAccessPrevention"] == "enforced"
    assert bucket.inputs["versioning"] == {"enabled": True}
    assert bucket.inputs["forceDestroy"] is False
    assert bucket.inputs["location"] == "US-CENTRAL1"
    assert [rule["action"]["type"] for rule in bucket.inputs["lifecycleRules"]] == ["Delete", "AbortIncompleteMultipartUpload"]
    assert bucket.inputs["labels"]["scaletier-stack"] == STACK
    assert not bucket.options.retainOnDelete


def test_the_bucket_is_kept_or_emptied_when_asked_for(program: Program) -> None:
    kept = program("gcp", retainBucket="true", bucket="my-own-bucket").one("Bucket")
    assert kept.options.retainOnDelete
    assert kept.inputs["name"] == "my-own-bucket"
    assert program("gcp", forceDestroy="true").one("Bucket").inputs["forceDestroy"] is True


def test_every_host_is_as_safe_as_it_can_be(stack: Stack) -> None:
    for item in stack.of("Instance"):
        inputs = item.inputs
        assert inputs["shieldedInstanceConfig"] == {
            "enableSecureBoot": True,
            "enableVtpm": True,
            "enableIntegrityMonitoring": True,
        }
        assert inputs["canIpForward"] is False
        assert inputs["serviceAccount"]["email"] == email(role_of(item), stack)
        metadata = inputs["metadata"]
        assert metadata["block-project-ssh-keys"] == "true"
        assert metadata["enable-oslogin"] == "FALSE"
        assert metadata["enable-guest-attributes"] == "TRUE"
        assert metadata["serial-port-enable"] == "FALSE"
        assert metadata["ssh-keys"] == f"scaletier:{KEY}"
        assert len(metadata["startup-script"]) < 2**18
        assert inputs["allowStoppingForUpdate"] is True
        assert inputs["desiredStatus"] == "RUNNING"
        assert inputs["labels"] == {
            "scaletier-stack": STACK,
            "scaletier-role": role_of(item),
            "scaletier-replica": item.name,
        }
        assert item.options.deleteBeforeReplace


def test_no_host_has_a_public_address_unless_asked_for(program: Program) -> None:
    for item in program("gcp", scaleTier="STANDARD_1").of("Instance"):
        (interface,) = item.inputs["networkInterfaces"]
        assert set(interface) == {"subnetwork", "networkIp"}
    for item in program("gcp", scaleTier="STANDARD_1", publicAddress="true").of("Instance"):
        assert item.inputs["networkInterfaces"][0]["accessConfigs"] == [{"networkTier": "PREMIUM"}]


def test_addresses_are_the_roles_and_stay(program: Program) -> None:
    def addresses(**config: str) -> dict[str, str]:
        return {item.name: item.inputs["networkInterfaces"][0]["networkIp"] for item in program("gcp", **config).of("Instance")}

    small, large = addresses(scaleTier="STANDARD_1"), addresses(scaleTier="PREMIUM_1")
    assert small.items() <= large.items()
    assert len(set(large.values())) == len(large)
    assert all(ipaddress.ip_address(found) in ipaddress.ip_network("10.64.0.0/20") for found in large.values())


@pytest.mark.parametrize("config", TIERS, ids=lambda config: config["scaleTier"])
def test_machine_types_and_disks_are_the_tiers(program: Program, config: dict[str, str]) -> None:
    stack = program("gcp", **config)
    found = {item.name: item.inputs["machineType"] for item in stack.of("Instance")}
    assert len(found) == HOSTS.get(ScaleTier(config["scaleTier"]), 7)
    assert found == {host["name"]: host["machineType"] for host in stack.inventory["hosts"]}
    for item in stack.of("Instance"):
        disk = item.inputs["bootDisk"]
        assert disk["autoDelete"] is True
        assert disk["initializeParams"]["type"] == "pd-ssd"
        assert disk["initializeParams"]["size"] == 100
        assert item.inputs["bootDisk"]["initializeParams"]["image"].startswith("projects/")


def test_a_disk_can_be_of_another_kind(program: Program) -> None:
    stack = program("gcp", scaleTier="BASIC", bootDiskType="pd-balanced", bootDiskSize="200", image="my-project/my-family")
    disk = stack.one("Instance").inputs["bootDisk"]["initializeParams"]
    assert (disk["type"], disk["size"], disk["image"]) == ("pd-balanced", 200, "my-project/my-family")


STANDARD = {"provisioningModel": "STANDARD", "preemptible": False, "automaticRestart": True}
SPOT = {
    "provisioningModel": "SPOT",
    "preemptible": True,
    "automaticRestart": False,
    "onHostMaintenance": "TERMINATE",
    "instanceTerminationAction": "STOP",
}


def shape(item: Recorded) -> tuple[Any, Mapping[str, Any], str]:
    image = item.inputs["bootDisk"]["initializeParams"]["image"]
    return item.inputs.get("guestAccelerators"), item.inputs["scheduling"], image.rpartition("/")[2]


def test_gpus_and_spot_are_by_role(program: Program) -> None:
    found = {item.name: shape(item) for item in program("gcp", **GPUS).of("Instance")}
    assert found["master-0"] == (None, STANDARD | {"onHostMaintenance": "MIGRATE"}, "debian-12")
    assert found["ps-0"] == (None, SPOT, "debian-12")
    assert found["worker-2"] == ([{"type": "nvidia-tesla-v100", "count": 2}], SPOT, "ubuntu-2404-lts-amd64")
    assert found["evaluator-0"] == (
        [{"type": "nvidia-tesla-t4", "count": 1}],
        STANDARD | {"onHostMaintenance": "TERMINATE"},
        "ubuntu-2404-lts-amd64",
    )


def test_a_host_that_loses_its_gpus_or_its_address_is_made_anew(program: Program) -> None:
    def triggers(**config: str) -> dict[str, str]:
        stack = program("gcp", **config)
        return {item.name: item.options.replacement_trigger.string_value for item in stack.of("Instance")}

    plain, gpus = triggers(**CUSTOM), triggers(**GPUS)
    assert {name for name in plain if plain[name] != gpus[name]} == {"worker-0", "worker-1", "worker-2", "evaluator-0"}
    assert gpus["worker-0"] == "private, 2 x nvidia-tesla-v100"
    assert triggers(scaleTier="BASIC", publicAddress="true") == {"master-0": "public"}


def test_basic_gpu_has_a_t4_and_machine_types_with_gpus_bring_theirs(program: Program) -> None:
    terminates = STANDARD | {"onHostMaintenance": "TERMINATE"}
    basic = program("gcp", scaleTier="BASIC_GPU")
    assert shape(basic.one("Instance"))[:2] == ([{"type": "nvidia-tesla-t4", "count": 1}], terminates)
    assert shape(program("gcp", **L4).one("Instance"))[:2] == ([{"type": "nvidia-l4", "count": 2}], SPOT)
    a100 = program("gcp", **A100)
    assert shape(a100.one("Instance"))[:2] == ([{"type": "nvidia-tesla-a100", "count": 2}], terminates)
    assert a100.inventory["hosts"][0]["accelerator"] == {"type": "nvidia-tesla-a100", "count": 2}


def test_a_startup_script_makes_the_host_and_is_bash(program: Program) -> None:
    stack = program("gcp", **GPUS, idleTimeout="30m")
    scripts = {item.name: item.inputs["metadata"]["startup-script"] for item in stack.of("Instance")}
    assert scripts["worker-0"] == scripts["worker-1"]
    assert "tensorflow-cpu==2.21.0" in scripts["ps-0"]
    assert "nvidia" not in scripts["ps-0"]
    assert "tensorflow[and-cuda]==2.21.0" in scripts["worker-0"]
    assert "linux-modules-nvidia-" in scripts["worker-0"]
    assert "AllowUsers scaletier" in scripts["ps-0"]
    assert "-lt 1800 ]" in scripts["ps-0"]
    for script in scripts.values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    other = program("gcp", scaleTier="BASIC", runtimeVersion="2.20.0").one("Instance").inputs["metadata"]["startup-script"]
    assert "tensorflow-cpu==2.20.0" in other
    assert "numpy==" not in other
    assert "enable --now --quiet scaletier-idle.timer" not in other


def test_nothing_changes_by_itself(program: Program) -> None:
    first, second = program("gcp", **GPUS), program("gcp", **GPUS)
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
    assert changed == {"host-keys", "operator-files"}
    new = {urn.rpartition("::")[2] for urn in large if urn not in small}
    assert new == {
        "worker-4",
        "evaluator-0",
        "account-evaluator",
        "evaluator-bucket",
        "evaluator-objects",
        "operator-evaluator-22",
    }


def test_the_longest_chain_has_five_links(stack: Stack) -> None:
    assert stack.chain == 5


def test_hosts_wait_for_the_firewall_and_for_their_right_to_the_bucket(stack: Stack) -> None:
    rules = {item.urn for item in stack.of("Firewall") if item.type.startswith("gcp:")}
    for item in stack.of("Instance"):
        grants = {found.urn for found in stack.of("BucketIAMMember") if found.name.startswith(f"{role_of(item)}-")}
        assert rules | grants <= item.depends
        assert not {found.urn for found in stack.of("Instance")} & item.depends


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
