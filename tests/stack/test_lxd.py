"""Check the local stack under mocks: resources, their order, and that nothing changes by itself."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import runpy
from typing import Any

import pulumi
import pytest
from stackmocks import KEY, Program, Recorder, Stack, record_program
from test_bad_input import GOOD, get_error
from test_firewall_answers import CUSTOM, SERVING, TIERS

from infra import guard, state
from infra.dynamic import normalize
from infra.guard import Change
from infra.lxd import target as lxd_target
from infra.lxd.api import LxdError
from infra.lxd.firewall import host_rules
from infra.lxd.host import REPLACE_ON_CHANGES, definition
from infra.scale_tiers import Role
from infra.templates import ROOT


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_each_replica_is_a_host_behind_the_firewall(program: Program, config: dict[str, str]) -> None:
    stack = program("lxd", **config)
    hosts = stack.of("Host")
    assert {item.name for item in hosts} == {host["name"] for host in stack.inventory["hosts"]}
    before = {stack.one("Firewall").urn, stack.one("Bucket").urn}
    for item in hosts:
        assert before <= item.depends
        assert not {other.urn for other in hosts} & item.depends
        assert item.inputs["authorizedKey"] == KEY
        assert item.options.deleteBeforeReplace
        assert item.inputs["bucket"] == stack.one("Bucket").inputs["name"]
    assert len({item.inputs["address"] for item in hosts}) == len(hosts)
    assert stack.chain_length <= 8


def test_the_identity_is_created_first_and_the_bucket_guard_last(program: Program) -> None:
    stack = program("lxd", scaleTier="STANDARD_1", forceDestroy="true", disruptJobs="true")
    identity, project, bucket_guard = stack.one("Identity"), stack.one("Project"), stack.one("Seal")
    assert identity.urn in project.depends
    assert (project.inputs["name"], project.inputs["stack"]) == (identity.inputs["project"], "dev")
    assert {stack.one("OperatorFiles").urn, stack.one("Ready").urn} <= bucket_guard.depends
    assert not [item.name for item in stack.resources if bucket_guard.urn in item.depends], "a destroy deletes it first"
    assert [bucket_guard.inputs[key] for key in ("retain", "force", "disrupt")] == [False, True, True]
    assert bucket_guard.inputs["name"] == stack.one("Bucket").inputs["name"]


def state_of(stack: Stack, **host: str) -> dict[str, Any]:
    """Return the state after an update of this stack, except the readiness of every host."""
    resources: dict[str, dict[str, Any]] = {
        item.urn: {"type": item.type, "outputs": {**item.inputs, **stack.completed.get(item.urn, {})}}
        for item in stack.resources
    }
    for resource in resources.values():
        if resource["type"].endswith(":Host"):
            resource["outputs"] |= host
        if resource["type"].endswith(":OperatorKey"):
            resource["outputs"] |= {"publicKey": KEY}
        if resource["type"] == "pulumi:pulumi:Stack":
            resource["outputs"] = dict(stack.exports)
    return resources


def test_replaced_hosts_are_known_before_an_update(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Change] = []
    monkeypatch.setattr(guard, "protect_jobs", lambda change, *_: changes.append(change))
    config = {"scaleTier": "BASIC", "servingCount": "1"}
    stack = program("lxd", **config)
    for other in ({}, {"image": "scaletier-another"}, {"gateway": "10.78.0.1"}, {"memory": "2GiB", "labels": "others"}):
        monkeypatch.setattr(Recorder, "state", state_of(stack, **other))
        program("lxd", **config)
    program("lxd", scaleTier="BASIC")
    all_hosts = ["master-0", "serving-0"]
    assert changes == [Change(), Change(), Change([], all_hosts), Change([], all_hosts), Change(), Change(["serving-0"])]


def test_a_stack_that_is_up_stays_on_its_target(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "state", state_of(program("lxd", scaleTier="BASIC")))
    error = get_error(monkeypatch, GOOD, scaleTier="BASIC")
    assert error.startswith("target is gcp, and this stack is up on lxd: `pulumi destroy` first")


def test_a_refusal_of_lxd_while_resources_are_declared_is_one_line(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = list[str]()

    def refuse(*_: Any) -> None:
        raise LxdError("volume bucket: it is busy")

    def run() -> None:
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "infra" / "__main__.py"), run_name="infra.__main__")

    monkeypatch.setattr(Recorder, "state", state_of(program("lxd", scaleTier="BASIC")))
    monkeypatch.setattr(lxd_target, "rules", refuse)
    monkeypatch.setattr(pulumi.log, "error", lambda message, *_: errors.append(message))
    monkeypatch.setenv("PULUMI_CONFIG", json.dumps({"scaletier:target": "lxd", "scaletier:scaleTier": "BASIC"}))
    record_program(run)
    assert errors == ["volume bucket: it is busy"]


@pytest.mark.parametrize("target", ["lxd", "gcp"])
def test_the_state_is_read_once_a_run(fresh_program: Program, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Two reads may differ if another update ends in between."""
    original, names = state._read, list[str]()

    def count_read(name: str) -> state.StackState:
        names.append(name)
        return original(name)

    monkeypatch.setattr(state, "_read", count_read)
    fresh_program(target)
    assert len(names) == 1


def test_every_host_is_ready_before_the_operators_files(program: Program) -> None:
    stack = program("lxd", scaleTier="STANDARD_1")
    ready = stack.one("Ready")
    assert {item.urn for item in stack.of("Host")} <= ready.depends
    assert ready.urn in stack.one("OperatorFiles").depends
    assert len(stack.files["known_hosts"].splitlines()) == 8
    assert "ProxyCommand" not in stack.files["ssh_config"]


def test_another_tier_changes_only_what_differs(program: Program) -> None:
    small = {item.urn: item.inputs for item in program("lxd", scaleTier="STANDARD_1").resources}
    large = {item.urn: item.inputs for item in program("lxd", scaleTier="PREMIUM_1").resources}
    unchanged = {urn.rpartition("::")[2] for urn in small if urn in large and small[urn] == large[urn]}
    assert {"project", "network", "bucket", "operator-key"} <= unchanged
    addresses = {urn: inputs.get("address") for urn, inputs in small.items()}
    assert addresses == {urn: large[urn].get("address") for urn in small}


@pytest.mark.parametrize("target", ["lxd", "gcp"])
@pytest.mark.parametrize("config", TIERS, ids=lambda config: config["scaleTier"])
def test_serving_hosts_go_with_every_tier_and_change_no_other(program: Program, target: str, config: dict[str, str]) -> None:
    without, with_serving = program(target, **config), program(target, **config, servingCount="2", servingType="n1-highcpu-32")
    old_inputs = {item.urn: item.inputs for item in without.resources}
    changed = {item.name for item in with_serving.resources if item.urn in old_inputs and item.inputs != old_inputs[item.urn]}
    shared = {"operator-files", "host-keys", "ready", "firewall"}
    assert changed <= shared
    assert with_serving.inventory["scaleTier"] == config["scaleTier"]
    added = with_serving.inventory["hosts"][len(without.inventory["hosts"]) :]
    assert with_serving.inventory["hosts"][: len(without.inventory["hosts"])] == without.inventory["hosts"]
    assert [(host["name"], host["role"], host["machineType"]) for host in added] == [
        (f"serving-{index}", "serving", "n1-highcpu-32") for index in range(2)
    ]
    assert "Host serving-1 serving-replica-1\n" in with_serving.files["ssh_config"]


@pytest.mark.parametrize(
    ("config", "machine_type"),
    [
        ({"scaleTier": "STANDARD_1"}, "n1-highcpu-8"),
        ({"scaleTier": "BASIC"}, "n1-standard-4"),
        ({**CUSTOM, "workerType": "n1-highmem-8"}, "n1-highmem-8"),
    ],
)
def test_serving_hosts_have_the_workers_machine_type_by_default(
    program: Program, config: dict[str, str], machine_type: str
) -> None:
    assert program("lxd", **config, servingCount="1").inventory["hosts"][-1]["machineType"] == machine_type


def test_a_second_run_declares_the_same(program: Program, fresh_program: Program) -> None:
    first, second = program("lxd", scaleTier="PREMIUM_1"), fresh_program("lxd", scaleTier="PREMIUM_1")
    assert {item.urn: item.inputs for item in first.resources} == {item.urn: item.inputs for item in second.resources}


def test_the_default_tier_is_standard_1(program: Program) -> None:
    assert program("lxd").inventory["scaleTier"] == "STANDARD_1"


def test_a_local_stack_has_no_price_and_nothing_of_google(program: Program) -> None:
    stack = program("lxd", scaleTier="BASIC")
    assert "hourlyCost" not in stack.exports
    assert stack.exports["inventory"] == json.dumps(stack.inventory, indent=1) + "\n"
    assert stack.one("Bucket").inputs["size"] == 2**34
    (host,) = stack.inventory["hosts"]
    assert (host["hourlyCost"], host["createTime"]) == (None, "created-master-0")
    assert not [item for item in stack.resources if item.type.startswith("gcp:")]


def test_a_host_has_whole_cpus_or_a_share_of_one(program: Program) -> None:
    stack = program("lxd", **CUSTOM, cpus='{"master": 2, "ps": 0.25}')
    configs = {item.name: definition(normalize({**item.inputs, "labels": {}}))["config"] for item in stack.of("Host")}
    assert (configs["master-0"]["limits.cpu"], configs["ps-0"]["limits.cpu.allowance"]) == ("2", "25ms/100ms")
    assert "limits.cpu.allowance" not in configs["master-0"], "else the rest of its CPU time is unused"
    assert "limits.cpu" not in configs["ps-0"], "else it is pinned to one CPU, however busy that is"
    cpus = {host["name"]: host["cpus"] for host in json.loads(stack.exports["inventory"])["hosts"]}
    assert (cpus["master-0"], cpus["ps-0"]) == (2, 0.25)


def test_every_host_has_its_firewall_and_disk_size(program: Program) -> None:
    stack = program("lxd", **CUSTOM, disk='{"ps": "8GiB"}')
    network = ipaddress.IPv4Network("10.77.0.0/24")
    for item in stack.of("Host"):
        role = Role(item.name.rpartition("-")[0])
        assert item.inputs["disk"] == (8 if role is Role.PS else 4) * 2**30
        assert item.inputs["firewall"] == host_rules(network, role)
        instance = definition(normalize({**item.inputs, "labels": {}}))
        assert instance["config"]["user.scaletier.firewall"] == item.inputs["firewall"]
        assert instance["config"]["user.scaletier.network"] == "10.77.0.0/24"
        assert instance["devices"]["root"]["size"] == str(int(item.inputs["disk"]))
        assert (
            f'"{instance["devices"]["eth0"]["host_name"]}" . {item.inputs["address"]}' in stack.one("Firewall").inputs["rules"]
        )
    assert {"firewall", "port"} <= REPLACE_ON_CHANGES
    assert "disk" not in REPLACE_ON_CHANGES


@pytest.mark.parametrize("target", ["lxd", "gcp"])
def test_every_component_tells_the_engine_that_it_is_complete(program: Program, target: str) -> None:
    stack = program(target, scaleTier="BASIC")
    components = {item.urn for item in stack.resources if item.type.startswith("scaletier:")}
    assert components
    assert components <= stack.completed.keys()


@pytest.mark.parametrize(("processors", "cpus"), [(2, 2), (64, 4), (None, 1)])
def test_a_hosts_inputs_are_those_of_its_replica_and_this_machine(
    program: Program, monkeypatch: pytest.MonkeyPatch, processors: int | None, cpus: int
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda message, *_: warnings.append(message))
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    facts = dataclasses.replace(lxd_target.preflight(), warnings=("it is slow", "it is old"))  # type: ignore[call-arg]
    monkeypatch.setattr(lxd_target, "preflight", lambda *_: facts)
    stack = program("lxd", scaleTier="BASIC", labels='{"team": "vision"}')
    inputs = {key: value for key, value in stack.one("Host").inputs.items() if key not in ("firewall", "memory", "runtimes")}
    assert inputs == {
        "project": "scaletier-dev-abcdef",
        "name": "master-0",
        "image": "scaletier-image",
        "pool": "scaletier",
        "bridge": "stabcdef",
        "port": "stabcdefm0",
        "address": "10.77.0.2",
        "gateway": "10.77.0.1",
        "bucket": "bucket",
        "runtime": "/runtime",
        "authorizedKey": KEY,
        "machineType": "n1-standard-4",
        "cpus": cpus,
        "disk": 2**32,
        "labels": {"team": "vision"},
        "running": True,
    }
    assert stack.inventory["sharedCpus"] == processors
    assert warnings == ["it is slow", "it is old"]
