"""The network interface by which a host reaches its peers: libraries may choose another by themselves."""

from __future__ import annotations

import fcntl
import socket
import struct

# Of Linux's <linux/sockios.h>: an interface's IPv4 address.
_SIOCGIFADDR = 0x8915
_LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def variables(address: str) -> dict[str, str]:
    """Return the variables for gloo, NCCL and TensorPipe with the interface of this IPv4 address.

    They are empty if no interface has it.
    """
    name = find(address)
    return dict.fromkeys(_LIBRARIES, name) if name else {}


def find(address: str) -> str | None:
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
