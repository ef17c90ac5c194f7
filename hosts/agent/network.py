"""This host's network: its connections, shown for a job that does not start, and the interface to its peers."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

MAX_LINES = 8
_ESTABLISHED, _SYN_SENT, _LISTEN = "01", "02", "0A"
_MAPPED = "0000000000000000FFFF0000"
# Ports of the host's own services are of no interest.
_FIRST_PORT = 1024
_NET = Path("/proc/self/net")
# The ioctl(2) of <linux/sockios.h> for an interface's IPv4 address.
_SIOCGIFADDR = 0x8915
_LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def connections(peers: Mapping[str, str], net: Path = _NET) -> list[str]:
    """Return the state of this host's sockets, one line each.

    Lines are `connecting to worker-0:2222` (no answer), `listening on 2222`, `connected to ps-0`. `peers` names replicas by
    their addresses.
    """
    connecting, listening, connected = set(), set(), set()
    for state, port, address, peer_port in _sockets(net):
        name = peers.get(address)
        if state == _SYN_SENT:
            connecting.add(f"connecting to {name or address}:{peer_port}")
        elif state == _LISTEN and port >= _FIRST_PORT:
            listening.add(port)
        elif state == _ESTABLISHED and name and min(port, peer_port) >= _FIRST_PORT:
            connected.add(name)
    lines = [*sorted(connecting), *(f"listening on {port}" for port in sorted(listening))]
    return [*lines[: MAX_LINES - 1], *([f"connected to {', '.join(sorted(connected)[:MAX_LINES])}"] if connected else [])]


def _sockets(net: Path) -> Iterator[tuple[str, int, str, int]]:
    """Yield the state, own port, and peer's address and port of each TCP socket."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in (net / name).read_text().splitlines()[1:]:
                _, own, peer, state = line.split()[:4]
                address, _, peer_port = peer.partition(":")
                yield state, int(own.partition(":")[2], 16), _address(address), int(peer_port, 16)


def _address(text: str) -> str:
    """Convert the kernel's form of an address, words of four bytes in the machine's order."""
    if text.startswith(_MAPPED):
        text = text.removeprefix(_MAPPED)
    data = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables for gloo, NCCL and TensorPipe with the interface of this IPv4 address; empty if there is none."""
    name = interface_of(address)
    return dict.fromkeys(_LIBRARIES, name) if name else {}


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
