"""Check the shared resources of the Google target: names, network, firewall, accounts, bucket; in all tiers."""

from __future__ import annotations

import re

from gcpcases import account_email, role_of
from stackmocks import PROJECT, STACK, ZONE, Program, Stack

from infra.gcp import names
from infra.gcp.firewall import DENY_PRIORITY, IAP_RANGE
from infra.ports import SERVING_PORT
from infra.scale_tiers import Role

LEGAL = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")


def test_every_name_is_legal_and_used_once(stack: Stack) -> None:
    names: set[tuple[str, str]] = set()
    for item in stack.resources:
        name = item.inputs.get("accountId") or item.inputs.get("name")
        if item.type.startswith("gcp:") and "IAM" not in item.type:
            assert LEGAL.match(name), name
            assert (item.type, name) not in names
            names.add((item.type, name))
        if "accountId" in item.inputs:
            assert 6 <= len(name) <= 30


def test_every_resource_has_project_and_place(stack: Stack) -> None:
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


def test_flow_logs_are_optional(program: Program) -> None:
    assert program("gcp", flowLogs="true").one("Subnetwork").inputs["logConfig"]["flowSampling"] == 0.5


def test_packets_that_no_rule_allows_are_refused_and_logged(stack: Stack) -> None:
    denies = {item.inputs["direction"]: item.inputs for item in stack.of("Firewall") if item.inputs.get("denies")}
    assert [denies["INGRESS"].get("sourceRanges"), denies["EGRESS"].get("destinationRanges")] == [["0.0.0.0/0"]] * 2
    for deny in denies.values():
        assert deny["priority"] == DENY_PRIORITY
        assert deny["denies"] == [{"protocol": "all"}]
        assert deny["logConfig"] == {"metadata": "INCLUDE_ALL_METADATA"}
        for key in ("targetServiceAccounts", "targetTags"):
            assert key not in deny


def test_rules_go_by_service_account_and_ssh_comes_from_iap(stack: Stack) -> None:
    for item in stack.of("Firewall"):
        if "allows" not in item.inputs or item.inputs["direction"] == "EGRESS":
            continue
        assert len(item.inputs["targetServiceAccounts"]) == 1
        (allow,) = item.inputs["allows"]
        assert allow["protocol"] == "tcp"
        if allow["ports"] == ["22"]:
            assert item.inputs["sourceRanges"] == [str(IAP_RANGE)]
            assert "sourceServiceAccounts" not in item.inputs
        else:
            assert allow["ports"] == ([str(SERVING_PORT)] if "-serving-" in item.name else ["1024-8500", "8502-65535"])
            assert "sourceRanges" not in item.inputs
            assert len(item.inputs["sourceServiceAccounts"]) == 1


def test_a_role_has_one_account_which_may_use_the_bucket(stack: Stack) -> None:
    roles = {role_of(item) for item in stack.of("Instance")}
    assert {item.name for item in stack.of("Account")} == {f"account-{role}" for role in roles}
    granted = {(item.inputs["member"], item.inputs["role"]) for item in stack.of("BucketIAMMember")}
    # A host that serves models writes nothing.
    objects = {role: "roles/storage.objectViewer" if role == Role.SERVING else "roles/storage.objectUser" for role in roles}
    assert granted == {
        (f"serviceAccount:{account_email(role, stack)}", name)
        for role in roles
        for name in (objects[role], "roles/storage.legacyBucketReader")
    }


def test_accounts_of_jobs_may_only_start_the_hosts_of_jobs(stack: Stack) -> None:
    assert {item.type for item in stack.resources if "IAM" in item.type} == {
        "gcp:storage/bucketIAMMember:BucketIAMMember",
        "gcp:projects/iAMCustomRole:IAMCustomRole",
        "gcp:compute/instanceIAMBinding:InstanceIAMBinding",
    }
    role = stack.one("IAMCustomRole")
    assert role.inputs["permissions"] == ["compute.instances.start"]
    assert role.inputs["title"] == names.names(PROJECT, STACK).role_title, "a leftover is found by it"
    assert "roleId" not in role.inputs, "an id that was used once cannot be used again for weeks"
    hosts = {item.name: item for item in stack.of("Instance") if role_of(item) != Role.SERVING}
    bindings = {item.name.removeprefix("start-"): item for item in stack.of("InstanceIAMBinding")}
    assert bindings.keys() == hosts.keys()
    members = {f"serviceAccount:{account_email(role_of(item), stack)}" for item in hosts.values()}
    for name, item in bindings.items():
        assert item.inputs["instanceName"] == hosts[name].inputs["name"]
        assert hosts[name].urn in item.depends, "a recreated host gets its grant again"
        assert (item.inputs["zone"], item.inputs["role"]) == (ZONE, f"projects/{PROJECT}/roles/start1a2b3c4")
        assert set(item.inputs["members"]) == members


def test_the_inventory_has_the_url_that_starts_each_host(stack: Stack) -> None:
    inventory = stack.inventory
    assert inventory["power"]["url"] == "https://compute.googleapis.com/compute/v1/"
    for host in inventory["hosts"]:
        name = stack.one("Instance", host["name"]).inputs["name"]
        url = f"projects/{PROJECT}/zones/{ZONE}/instances/{name}/start"
        assert host["start"] == (None if host["role"] == Role.SERVING else url)


def test_the_bucket_is_private_versioned_and_not_destroyed_with_data(stack: Stack) -> None:
    bucket = stack.one("Bucket")
    assert bucket.inputs["uniformBucketLevelAccess"] is True
    assert bucket.inputs["publicAccessPrevention"] == "enforced"
    assert bucket.inputs["versioning"] == {"enabled": True}
    assert bucket.inputs["forceDestroy"] is False
    assert bucket.inputs["location"] == "US-CENTRAL1"
    assert bucket.inputs["lifecycleRules"] == [
        {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 7, "withState": "ARCHIVED"}},
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1, "withState": "ANY"}},
    ]
    assert bucket.inputs["labels"]["scaletier-stack"] == STACK
    assert not bucket.options.retainOnDelete


def test_the_bucket_is_retained_or_emptied_if_configured(program: Program) -> None:
    bucket = program("gcp", retainBucket="true", bucket="my-own-bucket").one("Bucket")
    assert bucket.options.retainOnDelete
    assert bucket.inputs["name"] == "my-own-bucket"
    assert program("gcp", forceDestroy="true").one("Bucket").inputs["forceDestroy"] is True
