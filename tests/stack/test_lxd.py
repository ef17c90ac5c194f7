"""The local stack under mocks: what is declared, in which order, and that nothing moves by itself."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest
from stackmocks import KEY, Program, Recorder, Stack
from test_bad_input import GOOD, refusal
from test_firewall_answers import CUSTOM, SERVING, TIERS

from infra import guard, state
from infra.dynamic import plain
from infra.guard import Change
from infra.lxd.firewall import host_rules
from infra.lxd.host import REPLACE, definition
from infra.scale_tiers import Role


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_a_host_a_replica_behind_the_firewall(program: Program, config: dict[str, str]) -> None:
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
    assert stack.chain <= 8


def test_the_identity_is_made_first_and_the_seal_last(program: Program) -> None:
    stack = program("lxd", scaleTier="STANDARD_1", forceDestroy="true")
    identity, project, seal = stack.one("Identity"), stack.one("Project"), stack.one("Seal")
    assert identity.urn in project.depends
    assert (project.inputs["name"], project.inputs["stack"]) == (identity.inputs["project"], "dev")
    assert stack.one("OperatorFiles").urn in seal.depends
    assert not [item.name for item in stack.resources if seal.urn in item.depends], "a destroy takes it away before all else"
    assert (seal.inputs["retain"], seal.inputs["force"]) == (False, True)
    assert seal.inputs["name"] == stack.one("Bucket").inputs["name"]


def _up(stack: Stack, **host: str) -> dict[str, Any]:
    """Return the state after an update of this stack, except the readiness of every host."""
    whole = {item.urn: {"type": item.type, "outputs": dict(item.inputs)} for item in stack.resources}
    for found in whole.values():
        if found["type"].endswith(":Host"):
            found["outputs"] |= host
        if found["type"].endswith(":OperatorKey"):
            found["outputs"] |= {"publicKey": KEY}
        if found["type"] == "pulumi:pulumi:Stack":
            found["outputs"] = dict(stack.exports)
    return whole


def test_replaced_hosts_are_known_before_an_update(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Change] = []
    monkeypatch.setattr(guard, "check", lambda change, *_: changes.append(change))
    config = {"scaleTier": "BASIC", "servingCount": "1"}
    stack = program("lxd", **config)
    for other in ({}, {"image": "scaletier-another"}, {"gateway": "10.78.0.1"}, {"memory": "2GiB", "labels": "others"}):
        monkeypatch.setattr(Recorder, "state", _up(stack, **other))
        program("lxd", **config)
    program("lxd", scaleTier="BASIC")
    every = ["master-0", "serving-0"]
    assert changes == [Change(), Change(), Change([], every), Change([], every), Change(), Change(["serving-0"])]


def test_a_stack_that_is_up_stays_on_its_target(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "state", _up(program("lxd", scaleTier="BASIC")))
    said = refusal(monkeypatch, GOOD, scaleTier="BASIC")
    assert said.startswith("target is gcp, and this stack is up on lxd: `pulumi destroy` first")


@pytest.mark.parametrize("target", ["lxd", "gcp"])
def test_the_state_is_read_once_a_run(fresh_program: Program, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Two readings may disagree, as somebody else's update ends in between."""
    read, names = state._read, list[str]()

    def counted(name: str) -> state.StackState:
        names.append(name)
        return read(name)

    monkeypatch.setattr(state, "_read", counted)
    fresh_program(target)
    assert len(names) == 1


def test_every_host_is_ready_before_the_operators_files(program: Program) -> None:
    stack = program("lxd", scaleTier="STANDARD_1")
    ready = stack.one("Ready")
    assert {item.urn for item in stack.of("Host")} <= ready.depends
    assert ready.urn in stack.one("OperatorFiles").depends
    assert len(stack.files["known_hosts"].splitlines()) == 8
    assert "ProxyCommand" not in stack.files["ssh_config"]


def test_another_tier_touches_the_difference_alone(program: Program) -> None:
    small = {item.urn: item.inputs for item in program("lxd", scaleTier="STANDARD_1").resources}
    large = {item.urn: item.inputs for item in program("lxd", scaleTier="PREMIUM_1").resources}
    kept = {urn.rpartition("::")[2] for urn in small if urn in large and small[urn] == large[urn]}
    assert {"project", "network", "bucket", "operator-key"} <= kept
    addresses = {urn: inputs.get("address") for urn, inputs in small.items()}
    assert addresses == {urn: large[urn].get("address") for urn in small}


@pytest.mark.parametrize("target", ["lxd", "gcp"])
@pytest.mark.parametrize("config", TIERS, ids=lambda config: config["scaleTier"])
def test_hosts_for_models_go_with_every_tier_and_leave_its_hosts_alone(
    program: Program, target: str, config: dict[str, str]
) -> None:
    before, after = program(target, **config), program(target, **config, servingCount="2", servingType="n1-highcpu-32")
    known = {item.urn: item.inputs for item in before.resources}
    changed = {item.name for item in after.resources if item.urn in known and item.inputs != known[item.urn]}
    both = {"operator-files", "host-keys", "ready", "firewall"}
    assert changed <= both
    assert after.inventory["scaleTier"] == config["scaleTier"]
    added = after.inventory["hosts"][len(before.inventory["hosts"]) :]
    assert after.inventory["hosts"][: len(before.inventory["hosts"])] == before.inventory["hosts"]
    assert [(host["name"], host["role"], host["machineType"]) for host in added] == [
        (f"serving-{index}", "serving", "n1-highcpu-32") for index in range(2)
    ]
    assert "Host serving-1 serving-replica-1\n" in after.files["ssh_config"]


@pytest.mark.parametrize(
    ("config", "machine_type"),
    [
        ({"scaleTier": "STANDARD_1"}, "n1-highcpu-8"),
        ({"scaleTier": "BASIC"}, "n1-standard-4"),
        ({**CUSTOM, "workerType": "n1-highmem-8"}, "n1-highmem-8"),
    ],
)
def test_hosts_for_models_are_as_the_workers_where_nothing_is_said(
    program: Program, config: dict[str, str], machine_type: str
) -> None:
    assert program("lxd", **config, servingCount="1").inventory["hosts"][-1]["machineType"] == machine_type


def test_nothing_changes_by_itself(program: Program, fresh_program: Program) -> None:
    first, second = program("lxd", scaleTier="PREMIUM_1"), fresh_program("lxd", scaleTier="PREMIUM_1")
    assert {item.urn: item.inputs for item in first.resources} == {item.urn: item.inputs for item in second.resources}


def test_a_stack_of_no_tier_is_standard_1(program: Program) -> None:
    assert program("lxd").inventory["scaleTier"] == "STANDARD_1"


def test_a_local_stack_has_no_price_and_nothing_of_google(program: Program) -> None:
    stack = program("lxd", scaleTier="BASIC")
    assert "hourlyCost" not in stack.exports
    (host,) = stack.inventory["hosts"]
    assert (host["hourlyCost"], host["createTime"]) == (None, "created-master-0")
    assert not [item for item in stack.resources if item.type.startswith("gcp:")]


def test_a_host_has_whole_processors_or_a_share_of_one(program: Program) -> None:
    stack = program("lxd", **CUSTOM, cpus='{"master": 2, "ps": 0.25}')
    found = {item.name: definition(plain({**item.inputs, "labels": {}}))["config"] for item in stack.of("Host")}
    assert (found["master-0"]["limits.cpu"], found["ps-0"]["limits.cpu.allowance"]) == ("2", "25ms/100ms")
    assert "limits.cpu.allowance" not in found["master-0"], "else the rest of its time is nobody's"
    assert "limits.cpu" not in found["ps-0"], "else it would have one processor, whoever else has it"
    told = {host["name"]: host["cpus"] for host in json.loads(stack.exports["inventory"])["hosts"]}
    assert (told["master-0"], told["ps-0"]) == (2, 0.25)


def test_every_host_has_its_wall_and_the_size_of_its_disk(program: Program) -> None:
    stack = program("lxd", **CUSTOM, disk='{"ps": "8GiB"}')
    network = ipaddress.IPv4Network("10.77.0.0/24")
    for item in stack.of("Host"):
        role = Role(item.name.rpartition("-")[0])
        assert item.inputs["disk"] == (8 if role is Role.PS else 4) * 2**30
        assert item.inputs["wall"] == host_rules(network, role)
        made = definition(plain({**item.inputs, "labels": {}}))
        assert made["config"]["user.scaletier.wall"] == item.inputs["wall"]
        assert made["config"]["user.scaletier.network"] == "10.77.0.0/24"
        assert made["devices"]["root"]["size"] == str(int(item.inputs["disk"]))
        assert f'"{made["devices"]["eth0"]["host_name"]}" . {item.inputs["address"]}' in stack.one("Firewall").inputs["rules"]
    assert {"wall", "port"} <= REPLACE
    assert "disk" not in REPLACE
