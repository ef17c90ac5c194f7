"""Fixtures: every kind of store, and a bucket of Google's storage on loopback."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import FaultProxy, Kind, RemoteFolder, ask, serve_storage
from waiting import limit

from jobs.bucket import Bucket
from jobs.folder_bucket import FolderBucket
from jobs.gcs_bucket import GcsBucket


@pytest.fixture(scope="session")
def gcs() -> Iterator[int]:
    """Start a storage with Google's API and return its port."""
    with serve_storage() as server:
        yield server.port


@pytest.fixture
def bucket(gcs: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create this test's own bucket, which needs no sign-in."""
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
    store, impatient = (GcsBucket(f"gs://{bucket}/some/prefix", seconds) for seconds in (limit(), 0.5))
    with serve_storage() as other:

        def disconnect() -> None:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{other.port}")
            ask(other.port, "POST", "/storage/v1/b?project=test", {"name": bucket})
            assert store.scan("*") == {}
            other.stop()

        yield Kind(store, disconnect, impatient, r"did not answer within 0\.5\d* s")


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Kind]:
    root = tmp_path / "bucket"
    root.mkdir()
    store = RemoteFolder(root)
    yield Kind(store, lambda: shutil.rmtree(root), store, "is not there", root)
    for channel in store.channels:
        channel.close()


# The kinds of store: each is the name of a fixture above that returns a Kind.
KINDS = ("folder", "remote", "objects")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind_ = request.getfixturevalue(request.param)
    assert isinstance(kind_, Kind)
    return kind_


@pytest.fixture
def store(kind: Kind) -> Iterator[Bucket]:
    """Return a store of each kind; afterwards it must contain no unfinished write."""
    yield kind.store
    if kind.root is not None and kind.root.exists():
        assert [path for path in kind.root.rglob("*") if path.name.startswith(".")] == []


@pytest.fixture
def proxy(bucket: str, gcs: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(gcs)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
