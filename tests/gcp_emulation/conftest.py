"""Fixtures: the fakes and the hosts' network, once for all tests here."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from cloud import PROJECT, Cloud, Stack
from fakes import Buckets, Compute, Front, Google, Metadata, fake_gcs, serve_fake
from hosts_report import FAILED
from image import write_server_certificate
from machines import METADATA_PORT, exclusive_lock, start_network
from provider import serve_provider
from records import Records, upload
from world import Hosts, World

from infra.runtime.recipe import runtime_spec
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
    """Start a cloud whose instances are containers."""
    with ExitStack() as contexts:
        google = Google(contexts.enter_context(fake_gcs()))
        place = contexts.enter_context(start_network(RANGE))
        google.serial, google.power, google.boot = place.serial, place.state, place.boot
        contexts.enter_context(serve_fake(google, Metadata, place.gateway, METADATA_PORT))
        certificate = write_server_certificate(tmp_path_factory.mktemp("certificate"))
        contexts.enter_context(serve_fake(google, Front, place.gateway, 443, certificate))
        world, ports = _serve_apis(contexts, google, place)
        yield Cloud("emulation", google, world, *ports, tmp_path_factory.mktemp("stack"), machines=place)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first the tests with their own stack of containers, then those that compare unused hosts.

    Only one such stack can exist at a time, and `cluster` exists until the end.
    """
    first = ("test_faults", "test_host")
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for another checkout's emulation before the first test, since the time of a test is limited."""
    if not session.config.option.collectonly and any("cloud" in getattr(item, "fixturenames", ()) for item in session.items):
        lock = ExitStack()
        lock.enter_context(exclusive_lock(session.config.get_terminal_writer().line))
        session.config.add_cleanup(lock.close)


@pytest.fixture(scope="session")
def cluster(cloud: Cloud) -> Iterator[Stack]:
    """Bring up a cluster of spot containers, which no test destroys."""
    start = time.monotonic()
    with cloud.up(**SPOT) as stack:
        print(f"up, from nothing to ready, for {len(cloud.google.machines)} hosts: {time.monotonic() - start:.0f} s")
        yield stack


@pytest.fixture(autouse=True)
def _restore_after_a_failed_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs of a failed test, and start all hosts, so that the next test need not wait."""
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
    """Start a cloud whose instances are records."""
    with ExitStack() as contexts:
        google = Google(contexts.enter_context(fake_gcs()))
        world, ports = _serve_apis(contexts, google, Records(google))

        def upload_runtimes(kind: str, name: str) -> None:
            if kind == "Bucket":
                for version in ("2.21.0", "2.20.0"):
                    for python, accelerator in ((PYTHON, None), (PYTHON_WITH_GPUS, None), (PYTHON_WITH_GPUS, GPU)):
                        upload(google, name, runtime_spec(version, accelerator, python))

        world.on_created = upload_runtimes
        yield Cloud("records", google, world, *ports, tmp_path_factory.mktemp("stack"))


def _serve_apis(contexts: ExitStack, google: Google, hosts: Hosts) -> tuple[World, tuple[int, int, int]]:
    world = World(PROJECT, google, hosts)
    google.list_resources, google.kind_of, google.delete = world.resources_of, world.kind_of, world.delete
    compute = contexts.enter_context(serve_fake(google, Compute, "127.0.0.1"))
    buckets = contexts.enter_context(serve_fake(google, Buckets, "127.0.0.1"))
    return world, (compute, buckets, contexts.enter_context(serve_provider(world)))
