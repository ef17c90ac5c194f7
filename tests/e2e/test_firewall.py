"""The firewall on real hosts: every pair of them, TensorFlow's port, ssh's and another, against the one table."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from reaching import CONNECT, listening, mistakes
from stacks import Stack
from waiting import limit

from infra.lxd import nft
from infra.spec import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT

_OTHER_PORT = 8080
_MACHINES_PORT = 8099
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
    """Host to address, with something that listens on every port of the test."""
    hosts = json.loads((cluster.folder / "inventory.json").read_text())["hosts"]
    found = {host["name"]: host["address"] for host in hosts}
    with listening(cluster, [*found], _PORTS[1:]):
        yield found


def test_who_reaches_whom_is_what_the_table_says(cluster: Stack, addresses: dict[str, str]) -> None:
    assert mistakes(cluster, addresses, _PORTS) == []


def test_no_host_reaches_the_machine_or_borrows_an_address(cluster: Stack, addresses: dict[str, str]) -> None:
    gateway = next(iter(addresses.values())).rpartition(".")[0] + ".1"
    with socket.create_server((gateway, 0)) as listener:
        asked = json.dumps([[gateway, listener.getsockname()[1]]])
        answer = cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{asked}'")
    assert json.loads(answer.out) == [False]
    # The evaluator may not reach a ps. As the worker that it pretends to be, and that is away, it could.
    cluster.stop("worker-1")
    borrowed = addresses["worker-1"]
    try:
        assert cluster.ssh("evaluator-0", f"sudo ip addr add {borrowed}/32 dev lo").code == 0
        connect = f"python3 -c '{_CONNECT_FROM}' {borrowed} {addresses['ps-0']}"
        answer = cluster.ssh("evaluator-0", connect)
        assert answer.out.strip() == "timed out", answer.text
    finally:
        cluster.ssh("evaluator-0", f"sudo ip addr del {borrowed}/32 dev lo")
        cluster.start_again("worker-1")


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
    (stranger,) = json.loads((empty_stack.folder / "inventory.json").read_text())["hosts"]
    gateways = [address.rpartition(".")[0] + ".1" for address in (addresses["ps-0"], stranger["address"])]
    outside = json.dumps([[stranger["address"], SSH_PORT], *([gateway, _MACHINES_PORT] for gateway in gateways)])
    asked = json.dumps([[address, port] for address in addresses.values() for port in _PORTS])
    try:
        for stack in (cluster, empty_stack):
            nft.remove(stack.names.table)
        # A stranger that has no wall of its own, or has taken it down.
        assert empty_stack.ssh("master-0", "sudo nft flush ruleset").code == 0
        assert mistakes(cluster, addresses, _PORTS) == []
        with socket.create_server(("", _MACHINES_PORT)):
            assert True not in json.loads(cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{outside}'").out)
        assert True not in json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{asked}'").out)
        # It is the wall that keeps the stranger out, and nothing else.
        assert cluster.ssh("ps-0", "sudo nft flush ruleset").code == 0
        open_ = json.dumps([[addresses["ps-0"], TENSORFLOW_PORT, limit(60)]])
        assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{open_}'").out) == [True]
    finally:
        cluster.ssh("ps-0", "sudo systemctl restart scaletier-wall")
        cluster.up()
    assert json.loads(empty_stack.ssh("master-0", f"python3 -c '{CONNECT}' '{asked}'").out) == [False] * len(json.loads(asked))
