"""A host's sockets, as the kernel lists them, and the network interface for communication libraries."""

from __future__ import annotations

import socket
from pathlib import Path

from hosts.agent.network import MAX_LINES, connections, interface_of, interface_variables

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, peer: str, state: str) -> str:
    return f"   0: {local} {peer} {state} 00000000:00000000 00:00000000 00000000  1000        0 1234 1\n"


def test_sockets_are_listed_with_the_names_of_replicas(tmp_path: Path) -> None:
    wildcard, local, worker, other = "00000000", "0100000A", "0200000A", "0901000A"
    mapped = "0000000000000000FFFF0000"
    (tmp_path / "tcp").write_text(
        HEAD
        + line(f"{wildcard}:0016", f"{wildcard}:0000", "0A")
        + line(f"{wildcard}:08AE", f"{wildcard}:0000", "0A")
        + line(f"{local}:C001", f"{worker}:08AE", "02")
        + line(f"{local}:0016", f"{worker}:C005", "01")
        + "garbage\n"
    )
    (tmp_path / "tcp6").write_text(
        HEAD
        + line(f"{mapped}{local}:C002", f"{mapped}{other}:1F90", "02")
        + line(f"{mapped}{local}:C003", f"{mapped}0300000A:08AE", "01")
        + line(f"{mapped}{local}:C003", "00000000000000000000000001000000:08AE", "01")
    )
    peers = {"10.0.0.2": "worker-0", "10.0.0.3": "ps-0"}
    assert connections(peers, tmp_path) == [
        "connecting to 10.0.1.9:8080",
        "connecting to worker-0:2222",
        "listening on 2222",
        "connected to ps-0",
    ]
    assert connections({}, tmp_path / "none") == []
    (tmp_path / "tcp").write_text(
        HEAD + "".join(line(f"{wildcard}:{port:04X}", f"{wildcard}:0000", "0A") for port in range(2000, 2100))
    )
    assert len(connections(peers, tmp_path)) == MAX_LINES


def test_a_real_listening_socket_is_in_the_kernel_s_list() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        rows = Path("/proc/self/net/tcp").read_text().splitlines()
        assert any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows[1:])


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_variables("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }
    for address in ("192.0.2.1", "", "all"):
        assert interface_variables(address) == {}
