"""Check time limits of calls to hosts: a slow host is not reported as unreachable."""

from __future__ import annotations

from ops.cluster import remote
from ops.models import client, server_status
from ops.show import doctor


def test_host_checks_outlast_the_slowest_connection() -> None:
    slowest = remote.CONNECT_SECONDS + 2 * remote.SSHD_SECONDS  # the address, the banner, the login
    assert slowest < remote.COMMAND_SECONDS < doctor.SECONDS


def test_a_starting_server_has_time_to_listen() -> None:
    assert client._LISTEN_SECONDS < server_status._DOWN_SECONDS
