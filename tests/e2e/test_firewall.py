"""The firewall on real hosts: every pair, on TensorFlow's port, ssh's and another, against the table."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from connections import CONNECT, list_mismatches, listening
from stacks import ROOT, Stack
from waiting import limit, wait_for

from infra.lxd import nft
from infra.ports import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT

_OTHER_PORT = 8080
_ADDRESS = re.compile(r"\d+(?:\.\d+){3}")
_PORTS = (SSH_PORT, TENSORFLOW_PORT, SERVING_PORT, _OTHER_PORT)
_CONNECT_FROM = """
import socket, sys
try:
    socket.create_connection((sys.argv[2], 2222), timeout=float(sys.argv[3]), source_address=(sys.argv[1], 0))
    print("connected")
except OSError as error:
    print(error)
"""


@pytest.fixture
def addresses(cluster: Stack) -> Iterator[dict[str, str]]:
    """Return each host's address, with a listener on every port of the test."""
    with listening(cluster, cluster.host_names, _PORTS[1:]):
        yield cluster.addresses


def test_connections_match_the_firewall_table(cluster: Stack, addresses: dict[str, str]) -> None:
    assert list_mismatches(cluster, addresses, _PORTS) == []


def test_no_host_reaches_the_machine_or_spoofs_an_address(cluster: Stack, addresses: dict[str, str]) -> None:
    gateway = next(iter(addresses.values())).rpartition(".")[0] + ".1"
    with socket.create_server((gateway, 0)) as listener:
        endpoint = json.dumps([[gateway, listener.getsockname()[1]]])
        answer = cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{endpoint}'")
    assert json.loads(answer.out) == [False]
    # Without the hosts' own firewalls, the outer one lets the evaluator reach a ps by its own address only.
    cluster.stop("worker-1")
    borrowed = addresses["worker-1"]
    try:
        for host in ("evaluator-0", "ps-0"):
            cluster.must_ssh(host, "sudo nft flush ruleset")
        connect_directly = f"python3 -c '{_CONNECT_FROM}' {addresses['evaluator-0']} {addresses['ps-0']} {limit(60)}"
        assert cluster.ssh("evaluator-0", connect_directly).out.strip() == "connected"
        cluster.must_ssh("evaluator-0", f"sudo ip addr add {borrowed}/32 dev lo")
        connect = f"python3 -c '{_CONNECT_FROM}' {borrowed} {addresses['ps-0']} 3"
        answer = cluster.ssh("evaluator-0", connect)
        assert answer.out.strip() == "timed out", answer.text
    finally:
        cluster.ssh("evaluator-0", f"sudo ip addr del {borrowed}/32 dev lo")
        for host in ("evaluator-0", "ps-0"):
            cluster.ssh(host, "sudo systemctl restart scaletier-firewall")
        cluster.start_host("worker-1")


def test_a_job_reaches_only_ports_of_its_own_hosts(cluster: Stack) -> None:
    hosts = cluster.addresses
    script = ("--script", "tests/trainers/peers/ports.py")
    cluster.must("train", "held", "--replicas", "worker=1", *script, "--no-follow", "--", "hold")
    message = "all hosts of the job reached on 7 ports"
    wait_for(
        lambda: cluster.fab("logs", "all", "--job", "held", "--lines", "all").out.count(message) == 2, message, 120, poll=0.5
    )
    job_hosts, other_host = ("master-0", "worker-0"), "worker-1"
    assert {name: cluster.describe("held")["hosts"].count(name) for name in job_hosts} == dict.fromkeys(job_hosts, 1)
    assert [_peers(cluster, name) for name in job_hosts] == [{hosts["worker-0"]}, {hosts["master-0"]}]
    # The program of another job, then root there, who bypasses that host's firewall.
    scan = ["scan", *(hosts[name] for name in job_hosts)]
    scanned = cluster.must("train", "scans", "--scale-tier", "BASIC", *script, "--", *scan)
    nothing = [f"open at {hosts[name]}: []" for name in job_hosts]
    assert all(line in scanned.out for line in nothing), scanned.out
    program = (ROOT / "tests/trainers/peers/ports.py").read_text()
    try:
        cluster.must_ssh(other_host, f"sudo nft flush ruleset; cat >/tmp/ports.py <<'END'\n{program}\nEND")
        answer = cluster.ssh(other_host, f"sudo python3 /tmp/ports.py {' '.join(scan)}", timeout=600)
        assert answer.out.splitlines() == nothing, answer.text
    finally:
        cluster.ssh(other_host, "sudo systemctl restart scaletier-firewall")
    # A reloaded firewall keeps the peers; after the job it has none, in whatever way the job ended.
    cluster.must_ssh("worker-0", "sudo systemctl restart scaletier-firewall")
    assert _peers(cluster, "worker-0") == {hosts["master-0"]}
    cluster.ssh("worker-0", "sudo systemctl kill --signal KILL scaletier.service 'scaletier-launch@*'")
    cluster.must("cancel", "held")
    cluster.wait("held", "CANCELLED")
    for name in job_hosts:
        wait_for(lambda name=name: _peers(cluster, name) == set(), f"nobody is a peer of {name}")


def _peers(cluster: Stack, host: str) -> set[str]:
    """Return the addresses that a host lets through by its firewall and by its routing, which must match."""
    output = cluster.must_ssh(host, "sudo nft list set inet scaletier peers; echo; ip -4 rule show pref 12")
    by_firewall, by_routing = (set(_ADDRESS.findall(part)) for part in output.out.split("\n\n"))
    assert by_firewall == by_routing
    return by_firewall


def test_up_restores_a_changed_firewall_rule(cluster: Stack) -> None:
    table = cluster.names.table
    before = nft.list_table(table)
    assert before
    assert "Firewall" not in cluster.pulumi("preview", "--diff")
    nft.load(f"insert rule bridge {table} between accept\nflush chain bridge {table} to_operator\n")
    assert nft.list_table(table) != before
    assert "Firewall" in cluster.pulumi("preview", "--diff")
    cluster.up()
    assert nft.list_table(table) == before


def test_hosts_refuse_the_same_without_the_outer_firewall(
    cluster: Stack, addresses: dict[str, str], empty_stack: Stack
) -> None:
    empty_stack.up()
    (stranger,) = empty_stack.addresses.values()
    gateways = [address.rpartition(".")[0] + ".1" for address in (addresses["ps-0"], stranger)]
    endpoints = json.dumps([[address, port] for address in addresses.values() for port in _PORTS])
    try:
        for stack in (cluster, empty_stack):
            nft.remove(stack.names.table)
        # A stranger without a firewall of its own.
        empty_stack.must_ssh("master-0", "sudo nft flush ruleset")
        assert list_mismatches(cluster, addresses, _PORTS) == []
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            outside = json.dumps([[stranger, SSH_PORT], *([gateway, port] for gateway in gateways)])
            assert True not in json.loads(cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{outside}'").out)
        assert True not in json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{endpoints}'").out)
        # Only the firewall keeps the stranger out.
        cluster.must_ssh("ps-0", "sudo nft flush ruleset")
        open_ = json.dumps([[addresses["ps-0"], TENSORFLOW_PORT, limit(60)]])
        assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{open_}'").out) == [True]
    finally:
        cluster.ssh("ps-0", "sudo systemctl restart scaletier-firewall")
        cluster.up()
    assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{endpoints}'").out) == [False] * len(
        json.loads(endpoints)
    )
