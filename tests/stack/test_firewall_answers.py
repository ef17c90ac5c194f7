"""The firewall table, the VPC rules and the nft rules say the same; real hosts are asked in tests/e2e/test_firewall.py."""

from __future__ import annotations

import ipaddress

import pytest
from reachability import PORTS, Reach, by_gcp, by_nft, by_table
from stackmocks import PROJECT, Program

from infra.config import ClusterConfig
from infra.lxd.firewall import rules
from infra.lxd.layout import address
from infra.spec import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT, ClusterSpec, Role, ScaleTier

NETWORK = ipaddress.IPv4Network("10.77.0.0/24")
CUSTOM = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "3",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "2",
    "evaluatorType": "n1-standard-4",
    "evaluatorCount": "1",
}
TIERS = [*({"scaleTier": tier} for tier in ScaleTier if tier is not ScaleTier.CUSTOM), CUSTOM]
SERVING = [{"scaleTier": "STANDARD_1", "servingCount": "2"}, {**CUSTOM, "servingCount": "1", "servingType": "n1-highcpu-8"}]


def nft(spec: ClusterSpec) -> Reach:
    addresses: dict[Role, list[str]] = {}
    for replica in spec.replicas:
        addresses.setdefault(replica.role, []).append(str(address(NETWORK, replica)))
    return by_nft(rules(spec, "t", "st123", NETWORK), addresses, "st123")


def gcp(program: Program, config: dict[str, str], spec: ClusterSpec, operator: str = "35.235.240.9") -> Reach:
    stack = program("gcp", **config)
    accounts = {
        role: f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
        for role in spec.roles
    }
    return by_gcp([item.inputs for item in stack.of("Firewall")], accounts, operator)


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_the_table_the_vpc_rules_and_the_nft_rules_agree(program: Program, config: dict[str, str]) -> None:
    spec = ClusterConfig.parse(config).spec()
    table = by_table(spec)
    # A role of one host reaches itself without a network, and so has no answer there.
    several = {role for role, found in spec.roles.items() if found.count > 1}
    assert gcp(program, config, spec) == table
    assert nft(spec) == {row for row in table if row[0] != row[1] or row[1] in several}


def test_who_is_not_the_operator_reaches_nothing(program: Program) -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    assert not {row for row in gcp(program, CUSTOM, spec, operator="198.51.100.7") if row[0] is None}


def test_what_the_table_is_for() -> None:
    table = by_table(ClusterConfig.parse(CUSTOM).spec())
    assert not {row for row in table if row[0] is Role.EVALUATOR}
    assert {row[2] for row in table if row[0] is None} == {SSH_PORT}
    assert {row[2] for row in table if row[0] is not None} == {TENSORFLOW_PORT}
    assert {row[2] for row in table} < set(PORTS)


def test_predictions_are_for_whoever_trains_and_serving_hosts_reach_nobody() -> None:
    table = by_table(ClusterConfig.parse(SERVING[1]).spec())
    asked = {row for row in table if row[1] is Role.SERVING and row[0] is not None}
    assert asked == {(role, Role.SERVING, SERVING_PORT) for role in (Role.PS, Role.MASTER, Role.WORKER)}
    assert {row[2] for row in table if row[:2] == (None, Role.SERVING)} == {SSH_PORT}
    assert {row for row in table if row[2] == SERVING_PORT} == asked
    assert not {row for row in table if row[0] is Role.SERVING}


def test_an_answer_changes_with_a_rule() -> None:
    deny = {"priority": 65000, "sourceRanges": ["0.0.0.0/0"], "denies": [{"protocol": "all"}]}
    allow = {
        "priority": 1000,
        "sourceServiceAccounts": ["w"],
        "targetServiceAccounts": ["p"],
        "allows": [{"protocol": "tcp", "ports": ["2222"]}],
    }
    accounts = {Role.WORKER: "w", Role.PS: "p"}
    one = frozenset({(Role.WORKER, Role.PS, 2222)})
    assert by_gcp([deny, allow], accounts, "192.0.2.1") == one
    assert by_gcp([allow], accounts, "192.0.2.1") == one
    assert by_gcp([deny | {"priority": 1000}, allow], accounts, "192.0.2.1") == frozenset()
    assert by_gcp([deny, allow | {"disabled": True}], accounts, "192.0.2.1") == frozenset()
    with pytest.raises(ValueError, match="not known"):
        by_nft(
            "chain a {\n\ttype filter hook output priority filter;\n\t\tct state new accept\n\t}", {Role.PS: ["10.0.0.1"]}, "b"
        )
