"""Check that the firewall table, VPC rules and nft rules agree; tests/e2e/test_firewall.py queries real hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from reachability import (
    PORTS,
    Reach,
    accepts_itself,
    can_open,
    compute_by_gcp,
    compute_by_host_rules,
    compute_by_nft,
    compute_by_table,
    in_port_range,
)
from stackmocks import PROJECT, Program

from infra.config import ClusterConfig
from infra.lxd.config import MAX_HOSTS_PER_ROLE
from infra.lxd.firewall import host_rules, rules
from infra.lxd.layout import address, block, interface_name
from infra.ports import FIREWALL, SERVING_PORT, SSH_PORT, TENSORFLOW_PORT, firewall_rows
from infra.scale_tiers import ClusterSpec, HostId, Role, ScaleTier

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


def addresses_by_role(spec: ClusterSpec) -> dict[Role, list[str]]:
    addresses: dict[Role, list[str]] = {}
    for host_id in spec.hosts:
        addresses.setdefault(host_id.role, []).append(str(address(NETWORK, host_id)))
    return addresses


def reach_by_nft(spec: ClusterSpec) -> Reach:
    ports = {str(address(NETWORK, host_id)): interface_name("st123", host_id) for host_id in spec.hosts}
    return compute_by_nft(rules(spec, "t", "st123", NETWORK), addresses_by_role(spec), ports)


def reach_by_host_rules(
    spec: ClusterSpec,
    operator: str = str(NETWORK[1]),
    source_peers: Collection[str] | None = None,
    destination_peers: Collection[str] | None = None,
) -> Reach:
    """Compute reachability by the hosts' rules; by default every host is a peer."""
    scripts = {role: host_rules(NETWORK, role) for role in spec.roles}
    all_peers = [host_address for role_addresses in addresses_by_role(spec).values() for host_address in role_addresses]
    return compute_by_host_rules(
        scripts,
        addresses_by_role(spec),
        operator,
        all_peers if source_peers is None else source_peers,
        all_peers if destination_peers is None else destination_peers,
    )


def reach_by_gcp(program: Program, config: dict[str, str], spec: ClusterSpec, operator: str = "35.235.240.9") -> Reach:
    stack = program("gcp", **config)
    accounts = {
        role: f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
        for role in spec.roles
    }
    return compute_by_gcp([item.inputs for item in stack.of("Firewall")], accounts, operator)


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_the_table_the_vpc_rules_and_the_nft_rules_agree(program: Program, config: dict[str, str]) -> None:
    spec = ClusterConfig.parse(config).spec()
    table = compute_by_table(spec)
    # A role of one host has no connection between its hosts.
    several = {role for role, role_spec in spec.roles.items() if role_spec.count > 1}
    assert reach_by_gcp(program, config, spec) == table
    between = {row for row in table if row[0] != row[1] or row[1] in several}
    assert reach_by_nft(spec) == between
    assert reach_by_host_rules(spec) == between


def test_hosts_of_other_jobs_reach_only_public_ports_of_a_host() -> None:
    spec = ClusterConfig.parse(SERVING[1]).spec()
    rows = {
        (row.source, row.destination, port) for row in firewall_rows(spec) for port in PORTS if row.has(port) and not row.peers
    }
    assert {row[2] for row in rows} == {SSH_PORT, SERVING_PORT}
    assert (
        reach_by_host_rules(spec, source_peers=())
        == reach_by_host_rules(spec, destination_peers=())
        == reach_by_host_rules(spec, source_peers=(), destination_peers=())
        == rows
    )
    (worker, *_) = addresses_by_role(spec)[Role.WORKER]
    assert {row[0] for row in reach_by_host_rules(spec, destination_peers=[worker]) - rows} == {Role.WORKER}
    assert reach_by_host_rules(spec, destination_peers=["10.77.1.2", str(NETWORK[1]), "192.0.2.1"]) == rows, (
        "peers outside the cluster are ignored"
    )


def test_a_host_of_another_stack_reaches_no_host() -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    other_scripts = {role: host_rules(ipaddress.IPv4Network("10.78.0.0/24"), role) for role in spec.roles}
    all_addresses = {**addresses_by_role(spec), Role.SERVING: ["10.78.0.64"]}
    scripts = {role: host_rules(NETWORK, role) for role in spec.roles}
    peers = [host_address for role_addresses in all_addresses.values() for host_address in role_addresses]
    reachable = compute_by_host_rules(
        {**scripts, Role.SERVING: other_scripts[Role.PS]}, all_addresses, "10.77.0.1", peers, peers
    )
    assert not {row for row in reachable if Role.SERVING in row}


def test_a_hosts_own_rules_allow_only_its_peers() -> None:
    spec = ClusterConfig.parse(SERVING[1]).spec()
    rows = {(row.source, row.destination, port) for row in FIREWALL for port in PORTS if row.has(port)}
    peers = [str(block(NETWORK, role)[0]) for role in Role]
    for host_id in spec.hosts:
        script, own = host_rules(NETWORK, host_id.role), str(address(NETWORK, host_id))
        for outside in (str(NETWORK[1]), "10.78.0.64", "192.0.2.1", "169.254.169.254"):
            assert not [port for port in PORTS if can_open(script, own, outside, port, [*peers, outside])], (
                "the local machine, other stacks, the internet"
            )
        for other in Role:
            peer = str(block(NETWORK, other)[0])
            assert {port for port in PORTS if can_open(script, own, peer, port, peers)} == {
                port for port in PORTS if (host_id.role, other, port) in rows
            }
            assert not can_open(script, own, peer, TENSORFLOW_PORT)


def test_a_program_of_a_host_reaches_all_of_its_ports_but_ssh() -> None:
    """A trainer that holds all connections that wait for a login would lock the operator out."""
    for role in Role:
        script = host_rules(NETWORK, role)
        assert {port for port in PORTS if not accepts_itself(script, port)} == {SSH_PORT}


def test_address_blocks_of_roles_do_not_overlap() -> None:
    blocks = sorted(block(NETWORK, role) for role in Role)
    assert all(last < first for (_, last), (first, _) in pairwise(blocks))
    for role in Role:
        first, last = block(NETWORK, role)
        count = 1 if role is Role.MASTER else MAX_HOSTS_PER_ROLE
        assert all(first <= address(NETWORK, HostId(role, index)) <= last for index in range(count))


def test_packets_with_a_spoofed_address_are_dropped() -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    ports = {str(address(NETWORK, host_id)): "st123e0" for host_id in spec.hosts}
    reachable = compute_by_nft(rules(spec, "t", "st123", NETWORK), addresses_by_role(spec), ports)
    assert {row[0] for row in reachable} == {None, Role.EVALUATOR}, "the port's own role"


def test_the_table_has_the_rows_of_the_operator_of_peers_and_of_predictions() -> None:
    jobs = (Role.PS, Role.MASTER, Role.WORKER, Role.EVALUATOR)
    peers = ((1024, 8500), (8502, 65535))
    rows = [(row.source, row.destination, row.ports, row.peers) for row in FIREWALL]
    assert rows == [
        *((None, role, ((22, 22),), False) for role in Role),
        *((source, end, peers, True) for source in jobs for end in jobs if (source, end) != (Role.MASTER, Role.MASTER)),
        *((role, Role.SERVING, ((8501, 8501),), False) for role in (Role.PS, Role.MASTER, Role.WORKER)),
    ]
    assert [row.ranges for row in FIREWALL[4:6]] == [["22"], ["1024-8500", "8502-65535"]]
    spec = ClusterConfig.parse({"scaleTier": "BASIC", "servingCount": "1"}).spec()
    assert [(row.source, row.destination) for row in firewall_rows(spec)] == [
        (None, Role.MASTER),
        (None, Role.SERVING),
        (Role.MASTER, Role.SERVING),
    ]


def test_only_the_operators_address_reaches_hosts(program: Program) -> None:
    spec = ClusterConfig.parse(CUSTOM).spec()
    assert not {row for row in reach_by_host_rules(spec, operator="10.77.1.1") if row[0] is None}
    assert not {row for row in reach_by_gcp(program, CUSTOM, spec, operator="198.51.100.7") if row[0] is None}


def test_the_operator_has_ssh_and_hosts_have_tensorflow_ports() -> None:
    table = compute_by_table(ClusterConfig.parse(CUSTOM).spec())
    assert {row[2] for row in table if row[0] is None} == {SSH_PORT}
    assert {row[2] for row in table if row[0] is not None} == {TENSORFLOW_PORT, 8080, 65535}, "no port of a host's services"
    assert {row[2] for row in table} < set(PORTS)


def test_hosts_of_jobs_reach_serving_hosts_which_reach_no_host() -> None:
    table = compute_by_table(ClusterConfig.parse(SERVING[1]).spec())
    predictions = {row for row in table if row[1] is Role.SERVING and row[0] is not None}
    assert predictions == {(role, Role.SERVING, SERVING_PORT) for role in (Role.PS, Role.MASTER, Role.WORKER)}
    assert {row[2] for row in table if row[:2] == (None, Role.SERVING)} == {SSH_PORT}
    assert {row for row in table if row[2] == SERVING_PORT} == predictions
    assert not {row for row in table if row[0] is Role.SERVING}


def test_reachability_changes_with_each_rule() -> None:
    deny = {"priority": 65000, "sourceRanges": ["0.0.0.0/0"], "denies": [{"protocol": "all"}]}
    allow = {
        "priority": 1000,
        "sourceServiceAccounts": ["w"],
        "targetServiceAccounts": ["p"],
        "allows": [{"protocol": "tcp", "ports": ["2222"]}],
    }
    accounts = {Role.WORKER: "w", Role.PS: "p"}
    one = frozenset({(Role.WORKER, Role.PS, 2222)})
    assert compute_by_gcp([deny, allow], accounts, "192.0.2.1") == one
    assert compute_by_gcp([allow], accounts, "192.0.2.1") == one
    assert compute_by_gcp([deny | {"priority": 1000}, allow], accounts, "192.0.2.1") == frozenset()
    assert compute_by_gcp([deny, allow | {"disabled": True}], accounts, "192.0.2.1") == frozenset()
    with pytest.raises(ValueError, match="not known"):
        compute_by_nft(
            "chain a {\n\ttype filter hook output priority filter; policy accept;\n\t\tct state new accept\n\t}",
            {Role.PS: ["10.0.0.1"]},
            {"10.0.0.1": "b"},
        )


ELSEWHERE, GOOGLE, PEER = "93.184.216.34", "199.36.153.10", "10.64.9.9"


def vpc_allows_outgoing(rules: Iterable[Mapping[str, Any]], account: str, address: str, port: int) -> bool:
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
            not entry.get("ports") or any(in_port_range(text, port) for text in entry["ports"])
            for entry in rule.get("allows") or rule.get("denies") or ()
        )
    ]
    return min(matching, default=(0, True))[1]


@pytest.mark.parametrize("config", TIERS + SERVING, ids=lambda config: config["scaleTier"])
def test_a_gcp_host_reaches_only_its_peers_and_google(program: Program, config: dict[str, str]) -> None:
    stack = program("gcp", **config)
    rules = [item.inputs for item in stack.of("Firewall")]
    spec = ClusterConfig.parse(config).spec()
    for role, role_spec in spec.roles.items():
        account = f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
        assert vpc_allows_outgoing(rules, account, GOOGLE, 443)
        assert not vpc_allows_outgoing(rules, account, GOOGLE, 22)
        assert vpc_allows_outgoing(rules, account, PEER, TENSORFLOW_PORT)
        assert vpc_allows_outgoing(rules, account, PEER, 65535)
        assert not vpc_allows_outgoing(rules, account, PEER, SSH_PORT)
        assert [vpc_allows_outgoing(rules, account, ELSEWHERE, port) for port in (22, 80, 443)] == [
            False,
            *[bool(role_spec.accelerator)] * 2,
        ]


def test_open_egress_or_an_own_subnetwork_has_no_egress_rules(program: Program) -> None:
    for open_config in ({"egress": "open"}, {"subnetwork": "projects/host-1/regions/us-central1/subnetworks/theirs"}):
        stack = program("gcp", **CUSTOM, **open_config)
        assert not [item for item in stack.of("Firewall") if item.inputs.get("direction") == "EGRESS"]
        assert "199.36.153.8" not in stack.one("Instance", "master-0").inputs["metadata"]["startup-script"]
    script = program("gcp", **CUSTOM).one("Instance", "master-0").inputs["metadata"]["startup-script"]
    assert 'echo "199.36.153.8 $name # scaletier" >>/etc/hosts' in script
    with_driver = program("gcp", scaleTier="BASIC_GPU", image="my-project-1/with-driver")
    assert not [item for item in with_driver.of("Firewall") if item.name == "out-drivers"]
