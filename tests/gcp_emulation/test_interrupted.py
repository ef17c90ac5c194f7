"""Updates that were interrupted, or that Google never finished: remains and recovery; hosts are records."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from cloud import BIN, Cloud, PulumiError, Stack
from waiting import limit
from world import ApiError

from infra import backend

BASIC = {"scaleTier": "BASIC"}


@pytest.fixture
def stack(records: Cloud) -> Iterator[Stack]:
    """Return a stack without resources."""
    stack, on_created = records.stack(**BASIC), records.world.on_created
    try:
        yield stack
    finally:
        records.world.on_created = on_created
        records.destroy(stack)


def find_orphans(stack: Stack, *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "infra.gcp.orphans", *arguments],
        cwd=stack.folder,
        env={**stack.env, "PATH": f"{BIN}:{os.environ['PATH']}", "PULUMI_STACK": stack.name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def kill_during_create(records: Cloud, stack: Stack) -> None:
    """Send SIGKILL to `pulumi up` while its first host is created; the host exists afterwards."""
    is_created, resume, on_created = threading.Event(), threading.Event(), records.world.on_created

    def hold_instance(kind: str, name: str) -> None:
        on_created(kind, name)
        if kind == "Instance":
            is_created.set()
            resume.wait(limit(600))

    records.world.on_created = hold_instance
    command = stack.command("up", "--yes", "--skip-preview")
    with subprocess.Popen(
        command, cwd=stack.folder, env=stack.env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as up:
        assert is_created.wait(limit(600)), "no host was created"
        plugins = psutil.Process(up.pid).children(recursive=True)  # in groups of their own; they outlive the engine
        os.killpg(up.pid, signal.SIGKILL)
    for plugin in plugins:
        with contextlib.suppress(psutil.NoSuchProcess):
            plugin.kill()
    resume.set()
    records.world.on_created = on_created
    for _, command in backend.damaged_files(stack.env["PULUMI_BACKEND_URL"]):  # it may have been writing its state
        subprocess.run(shlex.split(command), check=True)
    stack.pulumi("cancel", "--yes")


def fail_after_create(records: Cloud, stack: Stack) -> None:
    """Create a host, and report an error."""
    on_created = records.world.on_created

    def refuse_instance(kind: str, name: str) -> None:
        on_created(kind, name)
        if kind == "Instance":
            raise ApiError(503, "The service is currently unavailable.", "backendError")

    records.world.on_created = refuse_instance
    with pytest.raises(PulumiError, match="Error 503"):
        stack.up()
    records.world.on_created = on_created


@pytest.mark.parametrize("interrupt", [kill_during_create, fail_after_create])
def test_remains_of_a_cut_off_update_are_found_and_deleted(records: Cloud, stack: Stack, interrupt: object) -> None:
    assert callable(interrupt)
    interrupt(records, stack)
    (host,) = [each["name"] for each in records.world.resources_of("Instance")]
    with pytest.raises(PulumiError, match="already exists"):
        stack.up()
    assert find_orphans(stack) == [f"left: instance {host}"]
    assert [each["name"] for each in records.world.resources_of("Instance")] == [host], "listing changes nothing"
    assert find_orphans(stack, "--delete") == [f"deleted: instance {host}"]
    stack.up()
    assert find_orphans(stack) == []
    assert stack.plan() == []


def test_hosts_of_a_killed_update_are_found_after_the_configuration_shrank(records: Cloud, stack: Stack) -> None:
    stack.up()
    stack.configure(scaleTier="CUSTOM", masterType="n1-standard-4", workerType="n1-standard-4", workerCount="1")
    kill_during_create(records, stack)
    stack.configure(workerCount="0")
    stack.up()
    (worker,) = [each["name"] for each in records.world.resources_of("Instance") if "worker" in each["name"]]
    assert find_orphans(stack) == [f"left: instance {worker}"]
    assert find_orphans(stack, "--delete") == [f"deleted: instance {worker}"]
    stack.up()


def test_a_bucket_with_data_is_not_destroyed_and_a_retained_one_adopted(records: Cloud, stack: Stack) -> None:
    stack.up()
    bucket, resources = stack.inventory["bucket"].removeprefix("gs://"), len(records.world.resources)
    records.put(bucket, "jobs/job01/output/model", b"dear")
    with pytest.raises(PulumiError, match="the bucket contains jobs/"):
        stack.pulumi("destroy", "--yes", "--skip-preview")
    assert len(records.world.resources) == resources, "nothing was destroyed"
    stack.up(retainBucket="true")
    stack.pulumi("destroy", "--yes", "--skip-preview")
    assert [each["name"] for each in records.world.resources_of("Bucket")] == [bucket]
    stack.up(retainBucket="false", labels='{"team": "vision"}')
    assert records.objects("jobs/") == ["jobs/job01/output/model"]
    stack.up()
    assert [each["labels"]["team"] for each in records.world.resources_of("Bucket")] == ["vision"]
    assert stack.plan() == []


def test_a_stack_uses_its_earlier_retained_bucket_again(records: Cloud, stack: Stack) -> None:
    stack.up(retainBucket="true")
    bucket = stack.inventory["bucket"].removeprefix("gs://")
    records.put(bucket, "jobs/job01/output/model", b"dear")
    stack.up(bucket="another-bucket")
    stack.up(bucket=bucket, retainBucket="true")
    assert stack.inventory["bucket"] == f"gs://{bucket}"
    buckets = {each["name"]: each for each in records.world.resources_of("Bucket")}
    assert buckets.keys() == {bucket, "another-bucket"}
    buckets["another-bucket"]["forceDestroy"] = True
    records.world.delete("Bucket", "another-bucket")
    stack.up(retainBucket="false")
    assert records.objects("jobs/") == ["jobs/job01/output/model"]
    assert stack.plan() == []
