"""Who can open a connection to whom, on real hosts, against the one table of the firewall."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stacks import Stack

from infra.spec import FIREWALL, Role

CONNECT = """
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
_LISTEN = """
import socket, time
held = []
for port in %s:
    try:
        held.append(socket.create_server(("0.0.0.0", port), backlog=64))
    except OSError:
        pass
time.sleep(90)
"""
_OPERATOR = "the operator"


@contextlib.contextmanager
def listening(cluster: Stack, hosts: Sequence[str], ports: Sequence[int]) -> Iterator[None]:
    """Something that listens on those of the ports of these hosts that are free, while in the context."""

    def on_all(command: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: cluster.ssh(host, command), hosts))

    on_all(f"sudo systemd-run --quiet --unit listen python3 -c '{_LISTEN % list(ports)}'")
    try:
        yield
    finally:
        on_all("sudo systemctl stop listen")


def mistakes(cluster: Stack, addresses: Mapping[str, str], ports: Sequence[int]) -> list[str]:
    """Every pair of hosts, and the operator and each host, where what connects is not what the table says.

    `addresses` by host; something listens on all of the ports there.
    """
    table = {(row.source, row.destination, row.port) for row in FIREWALL}

    def of(source: str) -> list[str]:
        ends = [(name, port) for name in addresses for port in ports if name != source]
        role = None if source == _OPERATOR else _role(source)
        return [
            f"{source} {'reaches' if reached else 'does not reach'} {name}:{port}"
            for (name, port), reached in zip(ends, asked(source, ends), strict=True)
            if reached != ((role, _role(name), port) in table)
        ]

    def asked(source: str, ends: Sequence[tuple[str, int]]) -> list[bool]:
        there = [(addresses[name], port) for name, port in ends]
        if source == _OPERATOR:
            with ThreadPoolExecutor(32) as pool:
                return list(pool.map(_reach, there))
        answer: list[bool] = json.loads(cluster.ssh(source, f"python3 -c '{CONNECT}' '{json.dumps(there)}'").out)
        return answer

    with ThreadPoolExecutor(8) as pool:
        return [line for lines in pool.map(of, [*addresses, _OPERATOR]) for line in lines]


def _role(name: str) -> Role:
    return Role(name.rpartition("-")[0])


def _reach(end: tuple[str, int]) -> bool:
    try:
        socket.create_connection(end, timeout=2).close()
    except OSError:
        return False
    return True
