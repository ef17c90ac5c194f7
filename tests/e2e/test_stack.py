"""The hosts of a stack: creation, changes, destruction, and failures in between."""

from __future__ import annotations

import json

import pytest
from stacks import Stack, interrupt
from waiting import limit, wait_for

from infra.lxd.removal import remove


def test_plain_ssh_works_and_checks_the_host_key(cluster: Stack) -> None:
    result = cluster.ssh("worker-1", "hostname; systemctl is-system-running --wait")
    assert result.out.split() == ["worker-1", "running"], result.text
    assert cluster.ssh("master-replica-0", "hostname").out.strip() == "master-0"
    known_hosts = cluster.folder / "known_hosts"
    known_keys = known_hosts.read_text()
    try:
        known_hosts.write_text(known_keys.replace("AAAAC3", "AAAAC3NzaC1lZDI1NTE5AAAAI", 1).splitlines()[0] + "\n")
        assert cluster.ssh("worker-1", "true").code != 0
        refused = cluster.fab("shell", "worker-1", "--", "true")
        assert refused.code != 0
        assert "Traceback" not in refused.text
    finally:
        known_hosts.write_text(known_keys)


def test_up_recreates_a_host_deleted_outside_pulumi(cluster: Stack) -> None:
    remove(cluster.names.project, "worker-1")
    try:
        refused = cluster.fab("train", "--job", "host_is_gone")
        assert refused.code == 2
        assert "worker-1" in refused.err
        assert "pulumi" in refused.err
        assert cluster.fab("describe", "host_is_gone").code == 2, "nothing was changed"
        assert cluster.changes() == {"create": 1}
    finally:
        cluster.up()
    assert cluster.ssh("worker-1", "hostname").out.strip() == "worker-1"


def wait_until_answering(stack: Stack, count: int) -> None:
    """Wait until `count` hosts answer ssh in parallel."""
    wait_for(lambda: len(stack.hosts()) == count, f"{count} hosts answer ssh", 300)


def interrupt_after(stack: Stack, hosts: int) -> int:
    """Send Ctrl-C to `pulumi up` once it has created `hosts` new hosts; return its exit code."""
    process = stack.start("pulumi", "up", "--yes", "--skip-preview")
    wait_for(lambda: len(stack.instances()) >= hosts or process.poll() is not None, f"{hosts} hosts are made", 300)
    assert process.poll() is None, "it has not ended before"
    return interrupt(process)


@pytest.mark.timeout(limit(3600))
def test_an_interrupted_update_resumes_tiers_change_and_destroy_removes_all(cluster: Stack, empty_stack: Stack) -> None:
    """Use a second stack. An update takes minutes, so each step starts from the state of the one before.

    tests/stack proves the resources of larger tiers, and the benchmark push-31 has their hosts.
    """
    stack = empty_stack
    stack.configure(scaleTier="STANDARD_1")
    assert interrupt_after(stack, hosts=1) != 0
    stack.up()
    assert stack.changes() == {}
    wait_until_answering(stack, 8)
    assert json.loads((stack.folder / "inventory.json").read_text())["scaleTier"] == "STANDARD_1"
    types = {"masterType": "n1-highcpu-16", "workerType": "n1-highcpu-16", "parameterServerType": "n1-highmem-8"}
    stack.configure(scaleTier="CUSTOM", **types, workerCount="5", parameterServerCount="4")
    assert stack.up_changes() == {"created": 2, "updated": 8}
    wait_until_answering(stack, 10)
    stack.configure(workerCount="0", parameterServerCount="0")  # their types may stay
    assert stack.up_changes() == {"deleted": 9}
    assert stack.changes() == {}
    stack.pulumi("destroy", "--yes", "--skip-preview")
    stack.wait_for_leftovers()
    assert not stack.folder.exists()
    stack.configure(workerCount="5", parameterServerCount="4")
    interrupt_after(stack, hosts=5)
    stack.pulumi("destroy", "--yes", "--skip-preview")
    stack.wait_for_leftovers()
    assert cluster.ssh("master-0", "hostname").out.strip() == "master-0", "the other stack is unchanged"
