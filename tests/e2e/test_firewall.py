"""The firewall on real hosts: every pair, on TensorFlow's port, ssh's and another, against the table."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from reaching import CONNECT, listening, mistakes
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
    socket.create_connection((sys.argv[2], 2222), timeout=3, source_address=(sys.argv[1], 0))
    print("connected")
except OSError as error:
    print(error)
"""


@pytest.fixture
def addresses(cluster: Stack) -> Iterator[dict[str, str]]:
    """Return each host's address, with a listener on every port of the test."""
    with listening(cluster, cluster.host_names, _PORTS[1:]):
        yield cluster.addresses


def test_who_reaches_whom_is_what_the_table_says(cluster: Stack, addresses: dict[str, str]) -> None:
    assert mistakes(cluster, addresses, _PORTS) == []


def test_no_host_reaches_the_machine_or_borrows_an_address(cluster: Stack, addresses: dict[str, str]) -> None:
    gateway = next(iter(addresses.values())).rpartition(".")[0] + ".1"
    with socket.create_server((gateway, 0)) as listener:
        asked = json.dumps([[gateway, listener.getsockname()[1]]])
        answer = cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{asked}'")
    assert json.loads(answer.out) == [False]
    # If the hosts' own firewalls are off, the one around them lets the evaluator reach a ps by its own address only.
    cluster.stop("worker-1")
    borrowed = addresses["worker-1"]
    try:
        for host in ("evaluator-0", "ps-0"):
            cluster.must_ssh(host, "sudo nft flush ruleset")
        own = f"python3 -c '{_CONNECT_FROM}' {addresses['evaluator-0']} {addresses['ps-0']}"
        assert cluster.ssh("evaluator-0", own).out.strip() == "connected"
        cluster.must_ssh("evaluator-0", f"sudo ip addr add {borrowed}/32 dev lo")
        connect = f"python3 -c '{_CONNECT_FROM}' {borrowed} {addresses['ps-0']}"
        answer = cluster.ssh("evaluator-0", connect)
        assert answer.out.strip() == "timed out", answer.text
    finally:
        cluster.ssh("evaluator-0", f"sudo ip addr del {borrowed}/32 dev lo")
        for host in ("evaluator-0", "ps-0"):
            cluster.ssh(host, "sudo systemctl restart scaletier-firewall")
        cluster.start_again("worker-1")


def test_a_job_has_its_own_hosts_ports_and_nobody_elses(cluster: Stack) -> None:
    hosts = cluster.addresses
    script = ("--script", "tests/trainers/peers/ports.py")
    cluster.must("train", "held", "--replicas", "worker=1", *script, "--no-follow", "--", "hold")
    reached = "all hosts of the job reached on 7 ports"
    wait_for(
        lambda: cluster.fab("logs", "all", "--job", "held", "--lines", "all").out.count(reached) == 2, reached, 120, poll=0.5
    )
    own, other = ("master-0", "worker-0"), "worker-1"
    assert {name: cluster.describe("held")["hosts"].count(name) for name in own} == dict.fromkeys(own, 1)
    assert [_peers(cluster, name) for name in own] == [{hosts["worker-0"]}, {hosts["master-0"]}]
    # The program of another job; then root there, past all that its own host refuses.
    scan = ["scan", *(hosts[name] for name in own)]
    scanned = cluster.must("train", "scans", "--scale-tier", "BASIC", *script, "--", *scan)
    nothing = [f"open at {hosts[name]}: []" for name in own]
    assert all(line in scanned.out for line in nothing), scanned.out
    program = (ROOT / "tests/trainers/peers/ports.py").read_text()
    try:
        cluster.must_ssh(other, f"sudo nft flush ruleset; cat >/tmp/ports.py <<'END'\n{program}\nEND")
        answer = cluster.ssh(other, f"sudo python3 /tmp/ports.py {' '.join(scan)}", timeout=600)
        assert answer.out.splitlines() == nothing, answer.text
    finally:
        cluster.ssh(other, "sudo systemctl restart scaletier-firewall")
    # A firewall that is loaded again keeps the peers; after the job it has none, however the job ended.
    cluster.must_ssh("worker-0", "sudo systemctl restart scaletier-firewall")
    assert _peers(cluster, "worker-0") == {hosts["master-0"]}
    cluster.ssh("worker-0", "sudo systemctl kill --signal KILL scaletier.service 'scaletier-launch@*'")
    cluster.must("cancel", "held")
    cluster.wait("held", "CANCELLED")
    for name in own:
        wait_for(lambda name=name: _peers(cluster, name) == set(), f"nobody is a peer of {name}")


def _peers(cluster: Stack, host: str) -> set[str]:
    """Return the addresses that a host lets through by its firewall and by its routing, which must match."""
    shown = cluster.must_ssh(host, "sudo nft list set inet scaletier peers; echo; ip -4 rule show pref 12")
    by_firewall, by_routing = (set(_ADDRESS.findall(part)) for part in shown.out.split("\n\n"))
    assert by_firewall == by_routing
    return by_firewall


def test_a_rule_that_somebody_changed_is_mended_by_up(cluster: Stack) -> None:
    table = cluster.names.table
    before = nft.listed(table)
    assert before
    assert "Firewall" not in cluster.pulumi("preview", "--diff")
    nft.load(f"insert rule bridge {table} between accept\nflush chain bridge {table} to_operator\n")
    assert nft.listed(table) != before
    assert "Firewall" in cluster.pulumi("preview", "--diff")
    cluster.up()
    assert nft.listed(table) == before


def test_without_the_firewall_the_hosts_refuse_the_same(cluster: Stack, addresses: dict[str, str], empty_stack: Stack) -> None:
    empty_stack.up()
    (stranger,) = empty_stack.addresses.values()
    gateways = [address.rpartition(".")[0] + ".1" for address in (addresses["ps-0"], stranger)]
    asked = json.dumps([[address, port] for address in addresses.values() for port in _PORTS])
    try:
        for stack in (cluster, empty_stack):
            nft.remove(stack.names.table)
        # A stranger without a firewall of its own.
        empty_stack.must_ssh("master-0", "sudo nft flush ruleset")
        assert mistakes(cluster, addresses, _PORTS) == []
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            outside = json.dumps([[stranger, SSH_PORT], *([gateway, port] for gateway in gateways)])
            assert True not in json.loads(cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{outside}'").out)
        assert True not in json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{asked}'").out)
        # Only the firewall keeps the stranger out.
        cluster.must_ssh("ps-0", "sudo nft flush ruleset")
        open_ = json.dumps([[addresses["ps-0"], TENSORFLOW_PORT, limit(60)]])
        assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{open_}'").out) == [True]
    finally:
        cluster.ssh("ps-0", "sudo systemctl restart scaletier-firewall")
        cluster.up()
    assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{asked}'").out) == [False] * len(json.loads(asked))
