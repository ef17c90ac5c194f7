"""The firewall on real hosts: every pair of them, TensorFlow's port, ssh's and another, against the one table."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from stacks import Stack

from infra.lxd.api import client
from infra.spec import FIREWALL, SSH_PORT, TENSORFLOW_PORT, Role

_OTHER_PORT = 8080
_PORTS = (SSH_PORT, TENSORFLOW_PORT, _OTHER_PORT)
_LISTEN = """
import socket, time
held = []
for port in (2222, 8080):
    listener = socket.create_server(("0.0.0.0", port), backlog=64)
    held.append(listener)
time.sleep(90)
"""
_CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(end):
    try:
        socket.create_connection(end, timeout=2).close()
        return True
    except OSError:
        return False
ends = [tuple(end) for end in json.loads(sys.argv[1])]
with ThreadPoolExecutor(32) as pool:
    print(json.dumps(list(pool.map(reach, ends))))
"""
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
    for host in (inventory := json.loads((cluster.folder / "inventory.json").read_text()))["hosts"]:
        cluster.ssh(host["name"], f"sudo systemd-run --quiet --unit listen python3 -c '{_LISTEN}'")
    try:
        yield {host["name"]: host["address"] for host in inventory["hosts"]}
    finally:
        for host in inventory["hosts"]:
            cluster.ssh(host["name"], "sudo systemctl stop listen")


def _role(name: str) -> Role:
    return Role(name.rpartition("-")[0])


def test_who_reaches_whom_is_what_the_table_says(cluster: Stack, addresses: dict[str, str]) -> None:
    table = {(row.source, row.destination, row.port) for row in FIREWALL}
    wrong: list[str] = []
    for source in addresses:
        ends = [(name, port) for name in addresses for port in _PORTS if name != source]
        asked = json.dumps([[addresses[name], port] for name, port in ends])
        answer = cluster.ssh(source, f"python3 -c '{_CONNECT}' '{asked}'")
        wrong += [
            f"{source} {'reaches' if reached else 'does not reach'} {name}:{port}"
            for (name, port), reached in zip(ends, json.loads(answer.out), strict=True)
            if reached != ((_role(source), _role(name), port) in table)
        ]
    wrong += [
        f"the operator and {name}:{port}"
        for name, address in addresses.items()
        for port in _PORTS
        if _reach(address, port) != ((None, _role(name), port) in table)
    ]
    assert wrong == []


def test_no_host_reaches_the_machine_or_borrows_an_address(cluster: Stack, addresses: dict[str, str]) -> None:
    gateway = next(iter(addresses.values())).rpartition(".")[0] + ".1"
    with socket.create_server((gateway, 0)) as listener:
        asked = json.dumps([[gateway, listener.getsockname()[1]]])
        answer = cluster.ssh("worker-0", f"python3 -c '{_CONNECT}' '{asked}'")
    assert json.loads(answer.out) == [False]
    # The evaluator may not reach a ps. As the worker that it pretends to be, and that is away, it could.
    client(cluster.names.project).instances.get("worker-1").stop(force=True, wait=True)
    borrowed = addresses["worker-1"]
    try:
        assert cluster.ssh("evaluator-0", f"sudo ip addr add {borrowed}/32 dev lo").code == 0
        connect = f"python3 -c '{_CONNECT_FROM}' {borrowed} {addresses['ps-0']}"
        answer = cluster.ssh("evaluator-0", connect)
        assert answer.out.strip() == "timed out", answer.text
    finally:
        cluster.ssh("evaluator-0", f"sudo ip addr del {borrowed}/32 dev lo")
        cluster.up()
    assert cluster.ssh("worker-1", "hostname").out.strip() == "worker-1"


def _reach(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True
