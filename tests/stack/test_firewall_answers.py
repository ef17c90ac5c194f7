"""The firewall table, VPC rules and nft rules agree; tests/e2e/test_firewall.py queries real hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from reachability import PORTS, Reach, by_gcp, by_nft, by_table, by_walls, leaves, within
from stackmocks import PROJECT, Program

from infra.config import ClusterConfig
from infra.lxd.config import MAX_REPLICAS_PER_ROLE
from infra.lxd.firewall import host_rules, rules
from infra.lxd.layout import address, block, port
from infra.ports import FIREWALL, SERVING_PORT, SSH_PORT, TENSORFLOW_PORT, allowed
from infra.scale_tiers import ClusterSpec, Replica, Role, ScaleTier

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


def addresses(spec: ClusterSpec) -> dict[Role, list[str]]:
    found: dict[Role, list[str]] = {}
    for replica in spec.replicas:
        found.setdefault(replica.role, []).append(str(address(NETWORK, replica)))
    return found


def nft(spec: ClusterSpec) -> Reach:
    ports = {str(address(NETWORK, replica)): port("st123", replica) for replica in spec.replicas}
    return by_nft(rules(spec, "t", "st123", NETWORK), addresses(spec), ports)


def walls(
    spec: ClusterSpec,
    operator: str = str(NETWORK[1]),
    sends: Collection[str] | None = None,
    takes: Collection[str] | None = None,
) -> Reach:
    """Compute reachability by the hosts' rules; their peers are each other, unless they are named."""
    scripts = {role: host_rules(NETWORK, role) for role in spec.roles}
    own = [each for found in addresses(spec).values() for each in found]
    return by_walls(scripts, addresses(spec), operator, own if sends is None else sends, own if takes is None else takes)


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
    between = {row for row in table if row[0] != row[1] or row[1] in several}
    assert nft(spec) == between
    assert walls(spec) == between


def test_hosts_of_other_jobs_reach_nothing_of_a_jobs_host() -> None:
    spec = ClusterConfig.parse(SERVING[1]).spec()
    rows = {(row.source, row.destination, port) for row in allowed(spec) for port in PORTS if row.has(port) and not row.peers}
    assert {row[2] for row in rows} == {SSH_PORT, SERVING_PORT}
    assert walls(spec, sends=()) == walls(spec, takes=()) == walls(spec, sends=(), takes=()) == rows
    (worker, *_) = addresses(spec)[Role.WORKER]
    assert {row[0] for row in walls(spec, takes=[worker]) - rows} == {Role.WORKER}
    assert walls(spec, takes=["10.77.1.2", str(NETWORK[1]), "192.0.2.1"]) == rows, "no peer that is no host of the cluster"


def test_a_host_of_another_stack_is_a_stranger_to_every_wall() -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    elsewhere = {role: host_rules(ipaddress.IPv4Network("10.78.0.0/24"), role) for role in spec.roles}
    both = {**addresses(spec), Role.SERVING: ["10.78.0.64"]}
    scripts = {role: host_rules(NETWORK, role) for role in spec.roles}
    peers = [each for found in both.values() for each in found]
    reached = by_walls({**scripts, Role.SERVING: elsewhere[Role.PS]}, both, "10.77.0.1", peers, peers)
    assert not {row for row in reached if Role.SERVING in row}


def test_a_host_itself_reaches_its_peers_and_nothing_else() -> None:
    spec = ClusterConfig.parse(SERVING[1]).spec()
    rows = {(row.source, row.destination, port) for row in FIREWALL for port in PORTS if row.has(port)}
    peers = [str(block(NETWORK, role)[0]) for role in Role]
    for replica in spec.replicas:
        script, own = host_rules(NETWORK, replica.role), str(address(NETWORK, replica))
        for place in (str(NETWORK[1]), "10.78.0.64", "192.0.2.1", "169.254.169.254"):
            assert not [port for port in PORTS if leaves(script, own, place, port, [*peers, place])], (
                "the machine, strangers, the world"
            )
        for other in Role:
            there = str(block(NETWORK, other)[0])
            assert {port for port in PORTS if leaves(script, own, there, port, peers)} == {
                port for port in PORTS if (replica.role, other, port) in rows
            }
            assert not leaves(script, own, there, TENSORFLOW_PORT)


def test_a_role_has_its_own_addresses_and_no_other() -> None:
    blocks = sorted(block(NETWORK, role) for role in Role)
    assert all(last < first for (_, last), (first, _) in pairwise(blocks))
    for role in Role:
        first, last = block(NETWORK, role)
        most = 1 if role is Role.MASTER else MAX_REPLICAS_PER_ROLE
        assert all(first <= address(NETWORK, Replica(role, index)) <= last for index in range(most))


def test_who_speaks_from_anothers_address_is_not_heard() -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    exchanged = {str(address(NETWORK, replica)): "st123e0" for replica in spec.replicas}
    reached = by_nft(rules(spec, "t", "st123", NETWORK), addresses(spec), exchanged)
    assert {row[0] for row in reached} == {None, Role.EVALUATOR}, "whose port it is"


def test_who_is_not_the_operator_reaches_nothing(program: Program) -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    assert not {row for row in walls(spec, operator="10.77.1.1") if row[0] is None}
    assert not {row for row in gcp(program, CUSTOM, spec, operator="198.51.100.7") if row[0] is None}


def test_what_the_table_is_for() -> None:
    table = by_table(ClusterConfig.parse(CUSTOM).spec())
    assert {row[2] for row in table if row[0] is None} == {SSH_PORT}
    assert {row[2] for row in table if row[0] is not None} == {TENSORFLOW_PORT, 8080, 65535}, "and no port of a host's service"
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
            "chain a {\n\ttype filter hook output priority filter; policy accept;\n\t\tct state new accept\n\t}",
            {Role.PS: ["10.0.0.1"]},
            {"10.0.0.1": "b"},
        )


ELSEWHERE, GOOGLE, PEER = "93.184.216.34", "199.36.153.10", "10.64.9.9"


def _leaves(rules: Iterable[Mapping[str, Any]], account: str, address: str, port: int) -> bool:
    """Return whether VPC rules let a host open a connection; without a rule it may.

    The lowest number decides; of two rules with one number, a denial.
    """
    matching = [
        (rule["priority"], not rule.get("denies"))
        for rule in rules
        if rule.get("direction") == "EGRESS"
        and account in (rule.get("targetServiceAccounts") or [account])
        and any(ipaddress.ip_address(address) in ipaddress.ip_network(item) for item in rule["destinationRanges"])
        and any(
            not each.get("ports") or any(within(text, port) for text in each["ports"])
            for each in rule.get("allows") or rule.get("denies") or ()
        )
    ]
    return min(matching, default=(0, True))[1]


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_a_host_reaches_its_peers_and_google_and_nothing_else(program: Program, config: dict[str, str]) -> None:
    stack = program("gcp", **config)
    rules = [item.inputs for item in stack.of("Firewall")]
    spec = ClusterConfig.parse(config).spec()
    for role, found in spec.roles.items():
        account = f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
        assert _leaves(rules, account, GOOGLE, 443)
        assert not _leaves(rules, account, GOOGLE, 22)
        assert _leaves(rules, account, PEER, TENSORFLOW_PORT)
        assert _leaves(rules, account, PEER, 65535)
        assert not _leaves(rules, account, PEER, SSH_PORT)
        assert [_leaves(rules, account, ELSEWHERE, port) for port in (22, 80, 443)] == [False, *[bool(found.accelerator)] * 2]


def test_who_asks_for_it_reaches_all(program: Program) -> None:
    for open_ in ({"egress": "open"}, {"subnetwork": "projects/host-1/regions/us-central1/subnetworks/theirs"}):
        stack = program("gcp", **CUSTOM, **open_)
        assert not [item for item in stack.of("Firewall") if item.inputs.get("direction") == "EGRESS"]
        assert "199.36.153.8" not in stack.one("Instance", "master-0").inputs["metadata"]["startup-script"]
    script = program("gcp", **CUSTOM).one("Instance", "master-0").inputs["metadata"]["startup-script"]
    assert 'echo "199.36.153.8 $name # scaletier" >>/etc/hosts' in script
    own = program("gcp", scaleTier="BASIC_GPU", image="my-project-1/with-driver")
    assert not [item for item in own.of("Firewall") if item.name == "out-drivers"]
