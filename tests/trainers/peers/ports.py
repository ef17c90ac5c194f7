"""Ports of a job's hosts: `hold` listens on some until the job has had enough, `scan ADDRESS…` prints which of all are open."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import selectors
import socket
import sys
import time

HELD = (1024, 2222, 8500, 8502, 29500, 32768, 65535)
_LOOKS = 2000


def scan(address, ports, seconds=3.0):
    """Return which of these ports take a connection: all are tried at once, as far as descriptors go."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 64, most + 64))
    there, most = [], min(most, _LOOKS)
    for first in range(0, len(ports), most):
        waiting = selectors.DefaultSelector()
        for port in ports[first : first + most]:
            peer = socket.socket()
            peer.setblocking(False)
            code = peer.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                waiting.register(peer, selectors.EVENT_WRITE, port)
                continue
            peer.close()
            there += [port] if code == 0 else []
        until = time.monotonic() + seconds
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(until - time.monotonic()):
                there += [key.data] if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 else []
                waiting.unregister(key.fileobj)
                key.fileobj.close()
        for key in [*waiting.get_map().values()]:
            key.fileobj.close()
    return sorted(there)


def hold():
    """Listen, see that all peers are reached on all of the ports, and wait for a file in JOB_DIR."""
    held = [socket.create_server(("", port), backlog=64) for port in HELD]
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    for address in sorted({peer.rpartition(":")[0] for peers in cluster.values() for peer in peers}):
        while scan(address, HELD) != [*HELD]:
            time.sleep(0.2)
    print(f"all hosts of the job reached on {len(held)} ports", flush=True)
    while not pathlib.Path(os.environ["JOB_DIR"], "enough").exists():
        for server in held:
            server.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()
        time.sleep(0.1)


if sys.argv[1] == "hold":
    hold()
else:
    for address in sys.argv[2:]:
        print(f"open at {address}: {scan(address, range(1024, 65536))}", flush=True)
