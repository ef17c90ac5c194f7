"""The firewall on real hosts: every pair of them, TensorFlow's port, ssh's and another, against the one table."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from reaching import CONNECT, hush, listen, mistakes
from stacks import Stack

from infra.lxd.api import client
from infra.spec import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT

_OTHER_PORT = 8080
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
    for host in (inventory := json.loads((cluster.folder / "inventory.json").read_text()))["hosts"]:
        listen(cluster, host["name"], _PORTS[1:])
    try:
        yield {host["name"]: host["address"] for host in inventory["hosts"]}
    finally:
        for host in inventory["hosts"]:
            hush(cluster, host["name"])


def test_who_reaches_whom_is_what_the_table_says(cluster: Stack, addresses: dict[str, str]) -> None:
    assert mistakes(cluster, addresses, _PORTS) == []


def test_no_host_reaches_the_machine_or_borrows_an_address(cluster: Stack, addresses: dict[str, str]) -> None:
    gateway = next(iter(addresses.values())).rpartition(".")[0] + ".1"
    with socket.create_server((gateway, 0)) as listener:
        asked = json.dumps([[gateway, listener.getsockname()[1]]])
        answer = cluster.ssh("worker-0", f"python3 -c '{CONNECT}' '{asked}'")
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
