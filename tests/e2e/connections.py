"""Compare connections between real hosts with the firewall's table."""

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
"""Prints for each endpoint whether it accepts a connection: an address, a port and optionally a timeout (default 2 s)."""
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
    """Listen on those ports of these hosts that are free, within the context."""

    def run_on_all(command: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: cluster.ssh(host, command), hosts))

    stop = "sudo systemctl stop listen"
    bound = "".join(f"until ss -Hltn 'sport = {port}' | grep -q .; do sleep 0.1; done; " for port in ports)
    try:
        run_on_all(f"{stop}; sudo systemd-run --quiet --unit listen python3 -c '{_LISTEN % list(ports)}'; {bound}")
        yield
    finally:
        run_on_all(stop)


def list_mismatches(
    cluster: Stack, addresses: Mapping[str, str], ports: Sequence[int], peers: Collection[str] = ()
) -> list[str]:
    """List the pairs of hosts, and the operator with each host, whose connections differ from the table.

    Args:
        addresses: by host, each with a listener on all of the ports.
        peers: the hosts of one running job.
    """

    def is_open(source: str, name: str, port: int) -> bool:
        role = None if source == _OPERATOR else _role(source)
        rows = [row for row in FIREWALL if (row.source, row.destination) == (role, _role(name)) and row.has(port)]
        return any(not row.peers or {source, name} <= {*peers} for row in rows)

    def list_of_source(source: str) -> list[str]:
        ends = [(name, port) for name in addresses for port in ports if name != source]
        expected = [is_open(source, name, port) for name, port in ends]
        # An open port may answer late; a port that is open by mistake answers at once.
        targets = [
            (addresses[name], port, limit(60) if open_ else 3) for (name, port), open_ in zip(ends, expected, strict=True)
        ]
        return [
            f"{source} {'reaches' if connected else 'does not reach'} {name}:{port}"
            for (name, port), open_, connected in zip(ends, expected, connect_all(source, targets), strict=True)
            if connected != open_
        ]

    def connect_all(source: str, targets: Sequence[tuple[str, int, float]]) -> list[bool]:
        if source == _OPERATOR:
            with ThreadPoolExecutor(32) as pool:
                return list(pool.map(_connects, targets))
        results: list[bool] = json.loads(cluster.ssh(source, f"python3 -c '{CONNECT}' '{json.dumps(targets)}'", 300).out)
        return results

    with ThreadPoolExecutor(8) as pool:
        return [line for lines in pool.map(list_of_source, [*addresses, _OPERATOR]) for line in lines]


def _role(name: str) -> Role:
    return Role(name.rpartition("-")[0])


def _connects(end: tuple[str, int, float]) -> bool:
    address, port, seconds = end
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError:
        return False
    return True
