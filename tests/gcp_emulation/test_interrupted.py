"""Updates that were cut off or never finished by Google: remains and recovery; hosts are records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from cloud import BIN, Cloud, PulumiError, Stack
from waiting import limit
from world import Refused

BASIC = {"scaleTier": "BASIC"}


@pytest.fixture
def stack(records: Cloud) -> Iterator[Stack]:
    """Return a stack of which nothing is up yet."""
    stack, fill = records.stack(**BASIC), records.world.after
    try:
        yield stack
    finally:
        records.world.after = fill
        records.destroy(stack)


def leftovers(stack: Stack, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "infra.gcp.orphans", *arguments],
        cwd=stack.folder,
        env={**stack.env, "PATH": f"{BIN}:{os.environ['PATH']}", "PULUMI_STACK": stack.name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def kill_in_mid_create(records: Cloud, stack: Stack) -> None:
    """Send SIGKILL to `pulumi up` while its first host is made, which is made all the same."""
    made, go_on, fill = threading.Event(), threading.Event(), records.world.after

    def hold(kind: str, name: str) -> None:
        fill(kind, name)
        if kind == "Instance":
            made.set()
            go_on.wait(limit(600))

    records.world.after = hold
    command = stack.command("up", "--yes", "--skip-preview")
    with subprocess.Popen(
        command, cwd=stack.folder, env=stack.env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as up:
        assert made.wait(limit(600)), "no host was made"
        os.killpg(up.pid, signal.SIGKILL)
    go_on.set()
    records.world.after = fill
    stack.pulumi("cancel", "--yes")


def answer_too_late(records: Cloud, stack: Stack) -> None:
    """Make a host, and answer that it was not made."""
    fill = records.world.after

    def refuse(kind: str, name: str) -> None:
        fill(kind, name)
        if kind == "Instance":
            raise Refused(503, "The service is currently unavailable.", "backendError")

    records.world.after = refuse
    with pytest.raises(PulumiError, match="Error 503"):
        stack.up()
    records.world.after = fill


@pytest.mark.parametrize("cut", [kill_in_mid_create, answer_too_late])
def test_what_an_update_left_is_found_and_goes(records: Cloud, stack: Stack, cut: object) -> None:
    assert callable(cut)
    cut(records, stack)
    (host,) = [each["name"] for each in records.world.of("Instance")]
    with pytest.raises(PulumiError, match="already exists"):
        stack.up()
    assert leftovers(stack) == [f"left: instance {host}"]
    assert [each["name"] for each in records.world.of("Instance")] == [host], "to look is to change nothing"
    assert leftovers(stack, "--delete") == [f"deleted: instance {host}"]
    stack.up()
    assert leftovers(stack) == []
    assert stack.plan() == []


def test_hosts_that_a_killed_update_left_are_named_also_if_the_configuration_shrank(records: Cloud, stack: Stack) -> None:
    stack.up()
    stack.configure(scaleTier="CUSTOM", masterType="n1-standard-4", workerType="n1-standard-4", workerCount="1")
    kill_in_mid_create(records, stack)
    stack.configure(workerCount="0")
    stack.up()
    (worker,) = [each["name"] for each in records.world.of("Instance") if "worker" in each["name"]]
    assert leftovers(stack) == [f"left: instance {worker}"]
    assert leftovers(stack, "--delete") == [f"deleted: instance {worker}"]
    stack.up()


def test_a_bucket_that_a_destroyed_stack_has_left_is_taken_up_again(records: Cloud, stack: Stack) -> None:
    stack.up(retainBucket="true")
    bucket = stack.inventory["bucket"].removeprefix("gs://")
    records.put(bucket, "jobs/job01/output/model", b"dear")
    stack.pulumi("destroy", "--yes", "--skip-preview")
    assert [each["name"] for each in records.world.of("Bucket")] == [bucket]
    stack.up(retainBucket="false", labels='{"team": "vision"}')
    assert records.objects("jobs/") == ["jobs/job01/output/model"]
    stack.up()
    assert [each["labels"]["team"] for each in records.world.of("Bucket")] == ["vision"]
    assert stack.plan() == []
