"""Both kinds of bucket keep the same promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replica.bucket import Bucket, Directory, ObjectStore, open_bucket


@pytest.fixture(params=["directory", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "memory":
        return open_bucket(f"memory://{tmp_path.name}", "master-0")
    (tmp_path / "bucket").mkdir()
    return open_bucket(str(tmp_path / "bucket"), "master-0")


def test_write_and_read(bucket: Bucket) -> None:
    assert bucket.read("jobs/job01/job.json") is None
    bucket.write("jobs/job01/job.json", b"one")
    bucket.write("jobs/job01/job.json", b"two")
    bucket.write("jobs/job01/replicas/ps-0.json", b"")
    assert bucket.read("jobs/job01/job.json") == b"two"
    names = ["jobs/job01/job.json", "jobs/job01/replicas/ps-0.json", "jobs/job01/replicas/ps-1.json"]
    assert bucket.read_all(names) == {names[0]: b"two", names[1]: b""}
    assert bucket.read_all([]) == {}


def test_upload_and_download(bucket: Bucket, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"line\n" * 3)
    assert not bucket.download("jobs/job01/logs/ps-0.jsonl", target)
    bucket.upload("jobs/job01/logs/ps-0.jsonl", source)
    assert bucket.download("jobs/job01/logs/ps-0.jsonl", target)
    assert target.read_bytes() == source.read_bytes()


def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    bucket = Directory(tmp_path / "bucket", "ps-0")
    with pytest.raises(OSError, match="is not there"):
        bucket.write("jobs/job01/job.json", b"x")
    assert not (tmp_path / "bucket").exists()


def test_a_replacement_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Directory(tmp_path, "ps-0")
    bucket.write("job.json", b"old")

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        bucket.write("job.json", b"new")
    monkeypatch.undo()
    assert bucket.read("job.json") == b"old"
    bucket.write("job.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


class Broken:
    """A client whose errors are its own."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("503 from far away")

    cat = pipe_file = put_file = get_file = _fail


@pytest.mark.parametrize(
    "action",
    [
        lambda bucket, path: bucket.read("a"),
        lambda bucket, path: bucket.read_all(["a", "b"]),
        lambda bucket, path: bucket.write("a", b""),
        lambda bucket, path: bucket.upload("a", path),
        lambda bucket, path: bucket.download("a", path),
    ],
)
def test_every_error_of_a_client_is_an_oserror(action: Callable[[Bucket, Path], object], tmp_path: Path) -> None:
    bucket = ObjectStore("gs://bucket")
    bucket._opened = (Broken(), "bucket")
    with pytest.raises(OSError, match="503 from far away"):
        action(bucket, tmp_path / "file")


def test_an_unknown_scheme_is_an_oserror() -> None:
    with pytest.raises(OSError, match="nonsense"):
        open_bucket("nonsense://bucket", "ps-0").read("a")


def test_a_local_bucket_does_without_fsspec() -> None:
    code = (
        "import sys, replica.agent as a, replica.bucket as b; b.open_bucket('/bucket', 'ps-0'); print('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
