"""Fakes and a place for hosts, once for all tests here; everything goes again in the end."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from cloud import PROJECT, Cloud, Stack
from fakes import Buckets, Compute, Front, Google, Metadata, fake_gcs, serving
from hosts_report import FAILED
from image import server_certificate
from machines import METADATA_PORT, machines
from provider import provider
from records import Records, upload
from world import Hosts, World

from infra.runtime.recipe import recipe
from infra.scale_tiers import PYTHON, PYTHON_WITH_GPUS, Accelerator

GPU = Accelerator("nvidia-tesla-t4")
SPOT = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "2",
    "parameterServerType": "n1-standard-4",
    "parameterServerCount": "1",
    "provisioningModel": '{"master": "SPOT", "worker": "SPOT", "ps": "SPOT"}',
}
RANGE = ipaddress.IPv4Network("10.64.0.0/20")  # the program's own default


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Return a cloud whose instances are containers."""
    with ExitStack() as all_of_it:
        google = Google(all_of_it.enter_context(fake_gcs()))
        place = all_of_it.enter_context(machines(RANGE))
        google.serial, google.power, google.boot = place.serial, place.state, place.boot
        all_of_it.enter_context(serving(google, Metadata, place.gateway, METADATA_PORT))
        certificate = server_certificate(tmp_path_factory.mktemp("certificate"))
        all_of_it.enter_context(serving(google, Front, place.gateway, 443, certificate))
        world, ports = _behind(all_of_it, google, place)
        yield Cloud("emulation", google, world, *ports, tmp_path_factory.mktemp("stack"), machines=place)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what has a stack of containers of its own, and second what compares hosts on which nothing ran yet.

    There is one such stack at a time, and `cluster` stays until the end.
    """
    first = ("test_faults", "test_host")
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


@pytest.fixture(scope="session")
def cluster(cloud: Cloud) -> Iterator[Stack]:
    """Bring up a cluster on containers, all of them spot, which no test destroys."""
    began = time.monotonic()
    with cloud.up(**SPOT) as stack:
        print(f"up, from nothing to ready, for {len(cloud.google.machines)} hosts: {time.monotonic() - began:.0f} s")
        yield stack


@pytest.fixture(autouse=True)
def _leave_no_job_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs of a failed test, and start all hosts, so that the next test waits for neither."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cloud, stack = (request.getfixturevalue(name) for name in ("cloud", "cluster"))
    yield
    if request.node.stash.get(FAILED, False):
        for job in json.loads(cloud.run("jobs", "--json").stdout or "[]"):
            if job["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED"):
                cloud.run("cancel", job["jobId"])
        for name in [machine.name for machine in cloud.google.machines.values()]:
            cloud.machines.boot(name)
        stack.up()


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Return a cloud whose instances are records."""
    with ExitStack() as all_of_it:
        google = Google(all_of_it.enter_context(fake_gcs()))
        world, ports = _behind(all_of_it, google, Records(google))

        def fill(kind: str, name: str) -> None:
            if kind == "Bucket":
                for version in ("2.21.0", "2.20.0"):
                    for python, accelerator in ((PYTHON, None), (PYTHON_WITH_GPUS, None), (PYTHON_WITH_GPUS, GPU)):
                        upload(google, name, recipe(version, accelerator, python))

        world.after = fill
        yield Cloud("records", google, world, *ports, tmp_path_factory.mktemp("stack"))


def _behind(all_of_it: ExitStack, google: Google, hosts: Hosts) -> tuple[World, tuple[int, int, int]]:
    world = World(PROJECT, google, hosts)
    google.things, google.kind_of, google.delete = world.of, world.kind_of, world.delete
    compute = all_of_it.enter_context(serving(google, Compute, "127.0.0.1"))
    buckets = all_of_it.enter_context(serving(google, Buckets, "127.0.0.1"))
    return world, (compute, buckets, all_of_it.enter_context(provider(world)))
