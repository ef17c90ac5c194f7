"""Meet at MASTER_ADDR and MASTER_PORT, where rank 0 listens as for PyTorch's store; all learn the sum of their ranks."""

import os
import socket
import time

rank, peers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        there = [server.accept()[0] for _ in range(peers - 1)]
        total = sum(int(peer.recv(100)) for peer in there)
        for peer in there:
            peer.sendall(str(total).encode())
        for peer in there:
            peer.recv(1)  # nothing comes: each closes once it has printed, and the job ends with rank 0
else:
    until = time.monotonic() + 1800
    while True:
        try:
            peer = socket.create_connection(place, timeout=1800)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    peer.sendall(str(rank).encode())
    total = int(peer.recv(100))
print(f"rank {rank} of {peers}: the sum is {total}", flush=True)
