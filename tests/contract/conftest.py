"""Fixtures: every kind of store, and a bucket of Google's storage on loopback."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import Far, FaultProxy, Kind, ask, serve_storage
from waiting import limit

from jobs.bucket import Bucket
from jobs.folder import FolderBucket
from jobs.gcs import GcsBucket


@pytest.fixture(scope="session")
def gcs() -> Iterator[int]:
    """The port of a storage with Google's API."""
    with serve_storage() as server:
        yield server.port


@pytest.fixture
def bucket(gcs: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test's own, which needs no sign-in."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{gcs}")
    name = f"bucket-{uuid.uuid4().hex}"
    ask(gcs, "POST", "/storage/v1/b?project=test", {"name": name})
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Kind:
    root = tmp_path / "bucket"
    root.mkdir()
    store = FolderBucket(root, limit())
    return Kind(store, lambda: shutil.rmtree(root), store, "is not there", root)


@pytest.fixture
def objects(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    store, hasty = (GcsBucket(f"gs://{bucket}/some/prefix", seconds) for seconds in (limit(), 0.5))
    with serve_storage() as other:

        def take_away() -> None:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{other.port}")
            ask(other.port, "POST", "/storage/v1/b?project=test", {"name": bucket})
            assert store.scan("*") == {}
            other.stop()

        yield Kind(store, take_away, hasty, r"did not answer within 0\.5\d* s")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Kind]:
    root = tmp_path / "bucket"
    root.mkdir()
    store = Far(root)
    yield Kind(store, lambda: shutil.rmtree(root), store, "is not there", root)
    for channel in store.channels:
        channel.close()


# The kinds of store: a name here is a fixture above that gives a Kind.
KINDS = ("folder", "far", "objects")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Kind)
    return found


@pytest.fixture
def store(kind: Kind) -> Iterator[Bucket]:
    """A store of every kind; afterwards no trace of an unfinished write may be left in it."""
    yield kind.store
    if kind.root is not None and kind.root.exists():
        assert [path for path in kind.root.rglob("*") if path.name.startswith(".")] == []


@pytest.fixture
def proxy(bucket: str, gcs: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(gcs)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
