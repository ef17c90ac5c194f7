"""The interface that libraries are told of."""

from __future__ import annotations

from hosts.agent import interface


def test_an_interface_is_found_by_its_address_and_by_no_other() -> None:
    assert interface.find("127.0.0.1") == "lo"
    assert interface.variables("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }
    for address in ("192.0.2.1", "", "all"):
        assert interface.variables(address) == {}
