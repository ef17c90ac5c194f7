"""The contract of every kind of store."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import logging
import math
import os
import re
import socket
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from google.auth.credentials import Credentials
from stores import FaultProxy, Kind, ask
from waiting import limit

from jobs import folder_bucket as folder_module
from jobs import gcs_bucket as gcs_module
from jobs.background import Background
from jobs.bucket import Bucket, BucketError, Conflict
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.gcs_bucket import GcsBucket, _Timed
from ops.cluster import ssh_bucket as ssh_module

JOB = "jobs/job01/job.json"
NOT_TEXT = bytes(range(256)) + b"\r\n--==0==--\n\xff" + "ß 模型".encode()


def count(store: Bucket, times: int, name: str = "counter") -> None:
    for _ in range(times):
        while True:
            item = store.read(name)
            mark = f"{int(item.content.split()[0]) + 1} {uuid.uuid4().hex}"  # the content identifies the writer
            try:
                store.replace(name, mark.encode(), item.version)
            except Conflict:
                time.sleep(0.001)
            else:
                break


def test_a_created_object_is_read(store: Bucket) -> None:
    assert store.read(JOB) is None
    version = store.create(JOB, b"one")
    assert store.read(JOB) == (b"one", version)


def test_no_object_is_created_twice(store: Bucket) -> None:
    version = store.create(JOB, b"one")
    with pytest.raises(Conflict, match="job01"):
        store.create(JOB, b"two")
    assert store.read(JOB) == (b"one", version)


def test_a_read_version_is_replaced(store: Bucket) -> None:
    first = store.create(JOB, b"one")
    second = store.replace(JOB, b"two", first)
    assert second != first
    assert store.read(JOB) == (b"two", second)
    third = store.replace(JOB, b"three", second)
    assert store.read(JOB) == (b"three", third)


def test_replacing_an_old_version_changes_nothing(store: Bucket) -> None:
    first = store.create(JOB, b"one")
    second = store.replace(JOB, b"two", first)
    with pytest.raises(Conflict):
        store.replace(JOB, b"three", first)
    assert store.read(JOB) == (b"two", second)


def test_a_missing_object_is_not_replaced(store: Bucket) -> None:
    version = store.create("jobs/other", b"one")
    with pytest.raises(Conflict):
        store.replace(JOB, b"two", version)
    assert store.read(JOB) is None
    with pytest.raises(Conflict):
        store.replace("jobs/nothing", b"two", version)
    assert store.read("jobs/nothing") is None


def test_a_retried_write_with_a_lost_answer_succeeds(store: Bucket) -> None:
    first = store.create(JOB, b"mine")
    assert store.create(JOB, b"mine") == first
    second = store.replace(JOB, b"mine too", first)
    assert store.replace(JOB, b"mine too", first) == second
    assert store.read(JOB) == (b"mine too", second)


@pytest.mark.parametrize("exists", [False, True])
def test_one_of_several_concurrent_writers_wins(store: Bucket, exists: bool) -> None:
    version = store.create(JOB, b"first") if exists else ""

    def attempt(number: int) -> str | None:
        try:
            return store.replace(JOB, b"%d" % number, version) if exists else store.create(JOB, b"%d" % number)
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(attempt, range(8)))
    winner = [number for number, version in enumerate(versions) if version is not None]
    assert len(winner) == 1
    assert store.read(JOB) == (b"%d" % winner[0], versions[winner[0]])


def test_no_increment_is_lost(store: Bucket) -> None:
    store.create("counter", b"0")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: count(store, 4), range(8)))
    item = store.read("counter")
    assert item.content.split()[0] == b"32"


def test_names_are_paths(store: Bucket) -> None:
    names = ["a", "b/c", "b/d/e", "b/d/f g.json", "b/ü/1"]
    for name in names:
        store.create(name, name.encode())
    items = store.read_all([*names, "b/none"])
    assert {name: item.content for name, item in items.items()} == {name: name.encode() for name in names}
    for name, item in items.items():
        store.replace(name, b"new", item.version)
    assert store.read_all([]) == {}


@pytest.mark.parametrize(
    "content", [b"", NOT_TEXT, os.urandom(40_000), b"{}" * 100_000], ids=["none", "bytes", "large", "long"]
)
def test_content_is_stored_unchanged(store: Bucket, content: bytes) -> None:
    version = store.create(JOB, content)
    assert store.read(JOB) == (content, version)
    assert store.scan("jobs/*/job.json") == {JOB: content}


def test_a_scan_returns_only_matching_objects(store: Bucket) -> None:
    assert store.scan("jobs/*/job.json") == {}
    fits = {f"jobs/job{number:02}/job.json": b"%d" % number for number in range(5)} | {"jobs/large/job.json": os.urandom(9000)}
    for name, content in fits.items():
        store.create(name, content)
    for name in (
        "jobs/job.json",
        "jobs/a/b/job.json",
        "jobs/a/job.json.old",
        "jobs/a/xjob.json",
        "jobs/a/jobxjson",
        "other/a/job.json",
    ):
        store.create(name, b"not this")
    assert store.scan("jobs/*/job.json") == fits
    assert store.scan("jobs/*/job.js*n") == fits
    assert store.scan("jobs/job01/job.json") == {"jobs/job01/job.json": b"1"}
    version = store.read_all(fits)["jobs/job01/job.json"].version
    store.replace("jobs/job01/job.json", b"new", version)
    assert store.scan("jobs/job01/*") == {"jobs/job01/job.json": b"new"}


def test_files_are_uploaded_and_downloaded(store: Bucket, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.write_bytes(b"before")
    assert not store.download("packages/one.tar", target)
    assert target.read_bytes() == b"before"
    for content in (NOT_TEXT, b"", os.urandom(6 << 20)):
        source.write_bytes(content)
        store.upload("packages/one.tar", source)
        assert store.download("packages/one.tar", target)
        assert target.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source", "target"]
    with pytest.raises(BucketError):
        store.upload("packages/two.tar", tmp_path / "none")


def test_no_object_of_a_deleted_job_is_created_in_a_folder(tmp_path: Path) -> None:
    store, root = FolderBucket(tmp_path / "bucket"), tmp_path / "bucket" / "jobs"
    (tmp_path / "bucket").mkdir()
    (tmp_path / "source").write_bytes(b"late")
    for name in ("logs/ps-0/1", "diagnosis/ps-0.json", "package.tar.gz"):
        with pytest.raises(Conflict):
            store.upload(f"jobs/job01/{name}", tmp_path / "source")
        assert not root.exists()
    store.create(JOB, b"one")
    (root / Path(JOB).parts[1] / "logs").mkdir()
    store.upload(f"{Path(JOB).parent}/logs/ps-0/1", tmp_path / "source")
    assert store.sizes(f"{Path(JOB).parent}/logs/ps-0") == {"1": 4}


def test_no_object_of_a_deleted_job_is_created_in_cloud_storage(bucket: str) -> None:
    store = GcsBucket(f"gs://{bucket}/some/prefix", limit())
    with pytest.raises(Conflict):
        store.upload("jobs/job01/logs/ps-0/1", b"late")
    assert store.walk("jobs") == {}
    store.upload(JOB, b"one")
    store.upload("jobs/job01/logs/ps-0/1", b"late")
    assert store.sizes("jobs/job01/logs/ps-0") == {"1": 4}


def test_the_children_of_a_folder_are_listed(store: Bucket, tmp_path: Path) -> None:
    assert store.sizes("logs/ps-0") == {}
    (tmp_path / "source").write_bytes(b"three")
    for name in ("logs/ps-0/1", "logs/ps-0/2", "logs/ps-0/deep/er", "logs/ps-01"):
        store.upload(name, tmp_path / "source")
    assert store.sizes("logs/ps-0") == {"1": 5, "2": 5}
    store.delete("logs/ps-0/1")
    store.delete("logs/ps-0/1")
    store.delete("elsewhere/1")
    assert store.sizes("logs/ps-0") == {"2": 5}


def test_all_objects_below_a_folder_are_listed(store: Bucket) -> None:
    assert store.walk("output") == {}
    for name in ("output/a", "output/b/c", "outputs/d"):
        store.upload(name, b"12345")
    assert store.walk("output") == {"a": 5, "b/c": 5}
    assert store.walk_following_links("output") == ({"a": 5, "b/c": 5}, [])
    assert store.walk("output/a") == {"": 5}
    assert store.walk("") == {"output/a": 5, "output/b/c": 5, "outputs/d": 5}


def test_part_of_an_object_is_read(store: Bucket) -> None:
    assert store.read_part("logs/1", 0, 10) == b""
    store.upload("logs/1", b"0123456789")
    assert [store.read_part("logs/1", *part) for part in ((2, 5), (8, 20), (10, 20), (3, 3))] == [b"234", b"89", b"", b""]


def test_a_removal_deletes_one_object_last(store: Bucket) -> None:
    store.remove("jobs/job01")
    names = [f"jobs/job01/{name}" for name in ("job.json", "z.json", "output/deep/a", "output/b")]
    for name in names:
        store.create(name, b"1")
    store.create("jobs/job011/job.json", b"2")
    store.remove("jobs/job01", last=JOB)
    assert store.walk("jobs") == {"job011/job.json": 1}
    store.remove("jobs/job011/job.json")
    assert store.walk("jobs") == {}


def test_sizes_are_returned(store: Bucket, tmp_path: Path) -> None:
    sizes: list[int] = []
    (tmp_path / "source").write_bytes(os.urandom(9 << 20))
    store.upload("large", tmp_path / "source", sizes.append)
    assert sum(sizes) == 9 << 20
    sizes.clear()
    assert store.download("large", tmp_path / "target", sizes.append)
    assert sum(sizes) == 9 << 20
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()


def test_a_folder_shows_no_partial_write(tmp_path: Path) -> None:
    store = FolderBucket(tmp_path)
    store.upload("a/whole", b"before")
    observed: list[object] = []
    (tmp_path / "source").write_bytes(b"x" * 3_000_000)
    store.upload(
        "a/whole", tmp_path / "source", lambda _: observed.append((store.sizes("a"), store.read_part("a/whole", 0, 99)))
    )
    assert observed == [({"whole": 6}, b"before")] * 3


def test_foreign_links_and_pipes_in_a_folder_do_no_harm(tmp_path: Path) -> None:
    outside, output = tmp_path / "outside", tmp_path / "bucket/output"
    outside.mkdir()
    output.mkdir(parents=True)
    (outside / "file").write_bytes(b"1")
    for name, target in (("folder", outside), ("file", outside / "file"), ("nothing", "none"), ("loop", "loop")):
        (output / name).symlink_to(target)
    os.mkfifo(output / "pipe")
    store = FolderBucket(tmp_path / "bucket")
    assert (store.walk("output"), store.sizes("output")) == ({}, {"file": 1})
    assert store.walk_following_links("output") == ({}, ["file", "folder", "loop", "nothing", "pipe"])
    store.remove("output/folder")
    store.remove("output")
    assert list((tmp_path / "bucket").iterdir()) == []
    assert (outside / "file").exists()


def test_a_folder_placeholder_object_is_not_a_file(bucket: str) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    for name in ("output/", "output/export/", "output/export/model"):
        store.upload(name, b"")
    assert store.walk("output") == {"export/model": 0}
    store.remove("output")
    assert store.scan("output/*") == store.walk("") == {}


def test_a_timed_out_removal_leaves_the_last_object(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    for name in (JOB, "jobs/job01/z.json"):
        store.create(name, b"1")
    each, join = store._each, Background.join

    def raise_late(call: Any, *arguments: Any) -> dict[str, Any]:
        call.deadline = time.monotonic() - 1
        return each(call, *arguments)

    with monkeypatch.context() as patch, pytest.raises(BucketError, match="did not answer"):
        patch.setattr(store, "_each", raise_late)
        patch.setattr(Background, "join", lambda self, seconds: join(self, limit()))
        store.remove("jobs/job01", last=JOB)
    assert store.read(JOB)


def test_listing_a_folder_has_a_longer_timeout_than_a_record(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GcsBucket(f"gs://{bucket}", 0.5)
    monkeypatch.setattr(store, "_values", lambda *_, **__: time.sleep(0.7) or {"a": 1})
    assert store.walk("output") == {"a": 1}


def test_a_failed_download_leaves_no_file(store: Bucket, tmp_path: Path) -> None:
    store.create(JOB, b"one")
    (tmp_path / "there/target").mkdir(parents=True)
    with pytest.raises(BucketError):
        store.download(JOB, tmp_path / "there/target")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["target"]


def test_a_full_disk_is_an_error_of_the_file(store: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller can tell it from a bucket that does not answer."""
    store.create(JOB, b"one")

    @contextmanager
    def replacing_on_full_disk(target: Path) -> Iterator[BinaryIO]:
        with Path("/dev/full").open("wb", buffering=0) as file:
            yield file

    for module in (folder_module, gcs_module, ssh_module):
        monkeypatch.setattr(module, "replacing", replacing_on_full_disk)
    with pytest.raises(BucketError) as caught:
        store.download(JOB, tmp_path / "target")
    assert (caught.value.errno, caught.value.strerror) == (errno.ENOSPC, f"{tmp_path}/target: No space left on device")


def test_an_uploaded_file_keeps_its_time(store: Bucket, tmp_path: Path) -> None:
    source, modified = tmp_path / "source", 1_700_000_000_123_456_000
    for name, size in (("a", 0), ("b/c", 3), ("large", 2_000_000)):
        source.write_bytes(b"x" * size)
        os.utime(source, ns=(modified, modified))
        store.upload(f"data/{name}", source)
    assert store.times("data") == dict.fromkeys(("a", "b/c", "large"), modified)
    assert store.times("data/a") == {"": modified}
    assert store.times("none") == {}
    store.upload("data/a", b"bytes")
    assert store.times("data").get("a") != modified


def test_a_file_that_vanishes_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").touch()
    monkeypatch.setattr(FolderBucket, "walk", lambda *_: {"gone": 1, "kept/gone": 1, "kept": 0})
    assert FolderBucket(tmp_path).times("") == {"kept": (tmp_path / "kept").stat().st_mtime_ns}


def test_a_scan_returns_uploaded_files(store: Bucket, tmp_path: Path) -> None:
    store.create(JOB, b"first")
    (tmp_path / "source").write_bytes(b"second")
    store.upload(JOB, tmp_path / "source")
    assert store.scan("jobs/*/job.json") == {JOB: b"second"}


CALLS: dict[str, Callable[[Bucket, Path], object]] = {
    "read": lambda store, path: store.read(JOB),
    "read_all": lambda store, path: store.read_all([JOB]),
    "scan": lambda store, path: store.scan("jobs/*"),
    "create": lambda store, path: store.create(JOB, b"one"),
    "replace": lambda store, path: store.replace(JOB, b"one", "1"),
    "upload": lambda store, path: store.upload(JOB, path / "source"),
    "download": lambda store, path: store.download(JOB, path / "target"),
    "sizes": lambda store, path: store.sizes("jobs"),
    "delete": lambda store, path: store.delete(JOB),
}


def test_a_disconnected_store_is_not_an_empty_one(kind: Kind, tmp_path: Path) -> None:
    kind.disconnect()
    (tmp_path / "source").write_bytes(b"one")

    def call(name: str) -> None:
        with pytest.raises(BucketError, match=kind.gone) as caught:
            CALLS[name](kind.impatient, tmp_path)
        assert "\n" not in str(caught.value), name

    with ThreadPoolExecutor(len(CALLS)) as pool:
        list(pool.map(call, CALLS))
    assert not (tmp_path / "target").exists()


PROCESS = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_bucket import count
from waiting import limit
from jobs.folder_bucket import FolderBucket
count(FolderBucket(Path(sys.argv[1]), limit()), 60)
"""


def test_no_increment_of_two_processes_is_lost(folder: Kind) -> None:
    folder.store.create("counter", b"0")
    code = PROCESS.format(path=[str(Path(__file__).parents[up]) for up in (2, 1, 0)])
    processes = [subprocess.Popen([sys.executable, "-c", code, str(folder.root)]) for _ in range(2)]
    assert [process.wait(limit()) for process in processes] == [0, 0]
    item = folder.store.read("counter")
    assert item.content.split()[0] == b"120"


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_reported(bucket: str, tmp_path: Path, call: str) -> None:
    (tmp_path / "source").write_bytes(b"one")
    with pytest.raises(BucketError, match="no such bucket"):
        CALLS[call](GcsBucket(f"gs://{bucket}-gone", limit()), tmp_path)


def test_five_hundred_jobs_are_scanned_in_few_requests(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    records = {f"jobs/job{number:03}/job.json": b'{"state": "RUNNING", "number": %d}' % number * 40 for number in range(500)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.create, records, records.values()))
    proxy.requests.clear()
    assert store.scan("jobs/*/job.json") == records
    assert len(proxy.requests) == 1
    assert "matchGlob=jobs/*/job.json" in proxy.requests[0].replace("%2F", "/").replace("%2A", "*")


def test_a_listing_of_several_pages(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    for number in range(5):
        store.create(f"jobs/job{number}/job.json", b"%d" % number)
    proxy.page = 2
    proxy.requests.clear()
    assert list(store.scan("jobs/*/job.json").values()) == [b"0", b"1", b"2", b"3", b"4"]
    assert len(proxy.requests) == 3
    for number in range(5):
        store.create(f"logs/{number}", b"one")
    assert store.sizes("logs") == {str(number): 3 for number in range(5)}


def test_an_invalid_record_in_metadata_is_ignored(bucket: str, gcs: int) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    other = store.create("jobs/b/job.json", b"other")
    assert other
    for invalid_record in ("no base64!", "AAAA", stored_record(gcs, bucket, "jobs/b/job.json")):
        store.create("jobs/a/job.json", b"one")
        ask(gcs, "PATCH", f"/storage/v1/b/{bucket}/o/jobs%2Fa%2Fjob.json", {"metadata": {"record": invalid_record}})
        assert stored_record(gcs, bucket, "jobs/a/job.json") == invalid_record
        assert store.scan("jobs/a/*") == {"jobs/a/job.json": b"one"}


def stored_record(gcs: int, bucket: str, name: str) -> str:
    return str(ask(gcs, "GET", f"/storage/v1/b/{bucket}/o/{name.replace('/', '%2F')}")["metadata"]["record"])


def test_a_lost_answer_is_retried(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    before = store.create("jobs/replaced", b"one")
    proxy.requests.clear()
    proxy.faults[:] = ["lose"] * 2
    with ThreadPoolExecutor(2) as pool:
        created = pool.submit(store.create, "jobs/made", b"one")
        replaced = pool.submit(store.replace, "jobs/replaced", b"two", before)
    assert store.read("jobs/made") == (b"one", created.result())
    assert store.read("jobs/replaced") == (b"two", replaced.result())
    assert sum(request.startswith("POST") for request in proxy.requests) == 4


def test_a_missing_object_costs_two_requests(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}/folder", limit())
    store.create("a/there", b"one")
    for call in (lambda: store.read("a/none"), lambda: store.read_part("a/none", 0, 1)):
        proxy.requests.clear()
        assert not call()
        first, second = proxy.requests
        assert "/folder%2Fa%2Fnone" in first
        assert "maxResults=1&" in f"{second}&"
        assert "prefix=folder/&" in f"{second.replace('%2F', '/')}&"


def test_walking_an_object_that_has_objects_below(bucket: str) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    assert store.walk("") == {}
    for name in ("output", "output/a"):
        store.upload(name, b"12")
    assert store.walk("output") == {"a": 2}
    store.delete("output/a")
    assert store.walk("output") == {"": 2}


def test_a_large_transfer_has_more_time(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    limits, run = list[float | None](), store._run

    def record(work: Callable[[Any], Any], seconds: float | None = None) -> Any:
        limits.append(seconds)
        return run(work, seconds)

    monkeypatch.setattr(store, "_run", record)
    store.upload("large", b"x" * 2_500_000)
    assert store.download("large", tmp_path / "target")
    store.remove("large")
    assert limits == [limit() + 2.5, None, limit() + 2.5, 30 * limit()]


@pytest.mark.parametrize(("deadline", "transferred"), [(math.inf, b"onetwo"), (0.0, b"")])
def test_a_transfer_ends_at_its_deadline(deadline: float, transferred: bytes) -> None:
    sizes, target = list[int](), io.BytesIO()
    reader, writer = (_Timed(file, deadline, sizes.append) for file in (io.BytesIO(b"onetwo"), target))
    with nullcontext() if transferred else pytest.raises(TimeoutError):
        assert writer.write(reader.read(3)) == 3
        assert writer.write(reader.read(9)) == 3
    assert (target.getvalue(), sizes) == (transferred, [3, 3, 3, 3] if transferred else [])
    with nullcontext() if transferred else pytest.raises(TimeoutError):
        writer.write(b"")


def test_a_token_is_renewed_when_it_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    class Token(Credentials):  # type: ignore[misc]
        renewals = 0

        def refresh(self, request: object) -> None:
            self.renewals += 1
            self.token = f"token {self.renewals}"

    credentials = Token()
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", raising=False)
    monkeypatch.setattr(gcs_module, "default", lambda scopes: (credentials, "project"))
    store = GcsBucket("gs://bucket")
    client = store._signed_in()
    assert store._signed_in() is client
    assert (credentials.token, client._credentials.token) == ("token 1", "token 1")
    credentials.token = None
    assert store._signed_in() is client
    assert credentials.token == "token 2"
    assert os.environ["DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"] == "true"


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError("a\n b\n"), "a  b"), (TimeoutError(), "TimeoutError"), (ValueError(" "), "ValueError")]
)
def test_an_error_is_one_line(error: Exception, line: str) -> None:
    assert gcs_module._line(error) == line


def test_a_machine_without_md5_for_security_reads_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def md5(content: bytes, *, usedforsecurity: bool = True, of: Callable[..., Any] = hashlib.md5) -> Any:
        if usedforsecurity:
            raise ValueError("disabled for FIPS")
        return of(content, usedforsecurity=False)

    monkeypatch.setattr(hashlib, "md5", md5)
    sums = [base64.b64encode(md5(content, usedforsecurity=False).digest()).decode() for content in (b"one", b"two")]
    record = base64.b64encode(zlib.compress(b"one")).decode()
    blobs = [SimpleNamespace(metadata={"record": record}, md5_hash=each) for each in sums]
    assert [gcs_module._content_in_metadata(blob) for blob in blobs] == [b"one", None]


def test_a_busy_server_is_retried(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    version = store.create(JOB, b"one")
    store._wait = limit(1), limit(1)  # for one request
    proxy.faults[:] = ["503", "429", "hang"]
    with ThreadPoolExecutor(3) as pool:
        created = pool.submit(store.create, "made", b"two")
        scanned = pool.submit(store.scan, "jobs/*/job.json")
        read = pool.submit(store.read, JOB)
    assert store.read("made") == (b"two", created.result())
    assert scanned.result() == {JOB: b"one"}
    assert read.result() == (b"one", version)


def test_a_409_is_handled_like_a_412(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    version = store.create(JOB, b"one")
    proxy.faults[:] = ["409"]
    assert store.create(JOB, b"one") == version
    proxy.faults[:] = ["409"]
    with pytest.raises(Conflict):
        store.create("made", b"two")


@pytest.mark.parametrize("fault", ["400", "401", "403"])
def test_a_refusal_is_one_line(bucket: str, proxy: FaultProxy, fault: str) -> None:
    store = GcsBucket(f"gs://{bucket}", limit())
    for call in (lambda: store.read(JOB), lambda: store.create(JOB, b"one"), lambda: store.scan("*")):
        proxy.faults[:] = [fault]
        with pytest.raises(BucketError, match=re.escape(bucket)) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert logging.getLogger("google").handlers  # otherwise Python writes the library's message and a traceback to stderr


def test_an_unresponsive_server_times_out(bucket: str, proxy: FaultProxy) -> None:
    store = GcsBucket(f"gs://{bucket}", 1)
    proxy.faults[:] = ["hang"] * 5  # until this test has ended
    with pytest.raises(BucketError, match="did not answer within 1 s"):
        store.create(JOB, b"one")


def test_the_last_failure_of_an_unresponsive_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "join", lambda self, _, join=Background.join: join(self, limit()))
    with socket.socket() as closed:  # no other program gets its port
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(BucketError, match=r"^gs://bucket did not answer within 1 s: .*Connection refused"):
            GcsBucket("gs://bucket", 1).read(JOB)


SIGN_IN = """
import sys
sys.path.insert(0, {root!r})
from jobs.bucket import BucketError
from jobs.gcs_bucket import GcsBucket
try:
    GcsBucket("gs://bucket", 1).read("one")
except BucketError as error:
    print(error)
"""


def test_a_hanging_sign_in_times_out(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # it accepts connections and never answers
    host = f"127.0.0.1:{silent.getsockname()[1]}"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}
    env["GCE_METADATA_TIMEOUT"] = "100000"  # seconds that Google's library waits, far longer than this test
    with silent:
        code = SIGN_IN.format(root=str(Path(__file__).parents[2]))
        answer = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=limit())
    assert answer.stdout == "gs://bucket did not answer within 1 s\n", answer.stderr
    assert answer.stderr == ""


def test_a_store_by_its_url(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        store = open_bucket(url)
        assert isinstance(store, FolderBucket)
        store.create(url[:4].strip("/"), b"one")
    assert len(list(tmp_path.iterdir())) == 2
    for url in ("gs://bucket/a/b/", "gs://bucket/runs/lr=0.1, batch 64/ü@1"):
        assert isinstance(open_bucket(url), GcsBucket)
    for url in ("", "s3://bucket", "gs://", "gs://bucket/[a]", "gs://bucket//a", "file://host/bucket"):
        with pytest.raises(BucketError, match="is no") as caught:
            open_bucket(url)
        assert "\n" not in str(caught.value)
