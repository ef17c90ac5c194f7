"""Connections between real hosts, compared with the firewall's table."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stacks import Stack
from waiting import limit

from infra.ports import FIREWALL
from infra.scale_tiers import Role

CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(end):
    address, port, *seconds = end
    try:
        socket.create_connection((address, port), timeout=(seconds or [2])[0]).close()
        return True
    except OSError:
        return False
with ThreadPoolExecutor(32) as pool:
    print(json.dumps(list(pool.map(reach, json.loads(sys.argv[1])))))
"""
"""Prints whether each end, an address, a port and perhaps a timeout (by default 2 s), can be connected to."""
_LISTEN = """
import signal, socket
held = []
for port in %s:
    try:
        held.append(socket.create_server(("0.0.0.0", port), backlog=64))
    except OSError:
        pass
signal.pause()
"""
_OPERATOR = "the operator"


@contextlib.contextmanager
def listening(cluster: Stack, hosts: Sequence[str], ports: Sequence[int]) -> Iterator[None]:
    """Listen on the free ones of the ports of these hosts, while in the context."""

    def on_all(command: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: cluster.ssh(host, command), hosts))

    stop = "sudo systemctl stop listen"
    bound = "".join(f"until ss -Hltn 'sport = {port}' | grep -q .; do sleep 0.1; done; " for port in ports)
    try:
        on_all(f"{stop}; sudo systemd-run --quiet --unit listen python3 -c '{_LISTEN % list(ports)}'; {bound}")
        yield
    finally:
        on_all(stop)


def mistakes(cluster: Stack, addresses: Mapping[str, str], ports: Sequence[int], peers: Collection[str] = ()) -> list[str]:
    """List the pairs of hosts, and the operator with each host, whose connections differ from the table.

    `addresses` by host; something listens on all of the ports there. The hosts `peers` have one job, which runs.
    """

    def is_open(source: str, name: str, port: int) -> bool:
        role = None if source == _OPERATOR else _role(source)
        rows = [row for row in FIREWALL if (row.source, row.destination) == (role, _role(name)) and row.has(port)]
        return any(not row.peers or {source, name} <= {*peers} for row in rows)

    def of(source: str) -> list[str]:
        ends = [(name, port) for name in addresses for port in ports if name != source]
        wanted = [is_open(source, name, port) for name, port in ends]
        # An open port may answer late; a closed one that answers by mistake answers at once.
        there = [(addresses[name], port, limit(60) if open_ else 3) for (name, port), open_ in zip(ends, wanted, strict=True)]
        return [
            f"{source} {'reaches' if reached else 'does not reach'} {name}:{port}"
            for (name, port), open_, reached in zip(ends, wanted, asked(source, there), strict=True)
            if reached != open_
        ]

    def asked(source: str, there: Sequence[tuple[str, int, float]]) -> list[bool]:
        if source == _OPERATOR:
            with ThreadPoolExecutor(32) as pool:
                return list(pool.map(_reach, there))
        answer: list[bool] = json.loads(cluster.ssh(source, f"python3 -c '{CONNECT}' '{json.dumps(there)}'", 300).out)
        return answer

    with ThreadPoolExecutor(8) as pool:
        return [line for lines in pool.map(of, [*addresses, _OPERATOR]) for line in lines]


def _role(name: str) -> Role:
    return Role(name.rpartition("-")[0])


def _reach(end: tuple[str, int, float]) -> bool:
    address, port, seconds = end
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError:
        return False
    return True
