"""What a service tells systemd: sd_notify(3) without a library."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*assignments: str) -> None:
    """Send assignments such as `READY=1` to systemd, if it is there and listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # systemd writes the zero byte of an abstract address as @.
        target = "\0" + address[1:] if address.startswith("@") else address
        with suppress(OSError):
            channel.sendto("\n".join(assignments).encode(), target)
