"""Limits of what is asked of hosts: a host that answers slowly is not taken for one that is away."""

from __future__ import annotations

from ops.cluster import remote
from ops.models import client, server_status
from ops.show import doctor


def test_a_look_at_hosts_outlasts_the_slowest_connection() -> None:
    slowest = remote.CONNECT_SECONDS + 2 * remote.SSHD_SECONDS  # the address, the banner, the login
    assert slowest < remote.COMMAND_SECONDS < doctor.SECONDS


def test_a_server_that_starts_is_not_given_up_before_it_can_listen() -> None:
    assert client._LISTEN_SECONDS < server_status._DOWN_SECONDS
