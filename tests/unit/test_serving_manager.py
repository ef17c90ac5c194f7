"""A server's reactions to the bucket: loads, swaps and unloads without a failed request."""

from __future__ import annotations

import errno
import hashlib
import math
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import limit, wait_for

from hosts.serving.batcher import Batcher
from hosts.serving.manager import ModelManager
from hosts.serving.rest import Arrays, RestError
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.model_catalog import Catalog
from jobs.model_records import LoadState, Model, Version, folder_of
from jobs.model_signatures import Signature, Tensor

ROWS = {"serving_default": Signature({"x": Tensor("float32", (None,))}, {"y": Tensor("float32", (None,))})}


FIXED = Signature({"x": Tensor("float32", (2,))}, ROWS["serving_default"].outputs)
PAIR = Signature({"x": Tensor("float32", (None,)), "z": Tensor("float32", (None,))}, ROWS["serving_default"].outputs)


class FakeModel:
    """A model that adds the number in its file."""

    def __init__(self, folder: Path) -> None:
        self.more = float((folder / "saved_model.pb").read_text())
        self.signatures = ROWS

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] + self.more}

    def examples(self, signature: str, examples: Any) -> Arrays:
        raise AssertionError


class ServedBucket:
    """A bucket with a server that polls it."""

    def __init__(self, root: Path) -> None:
        self.bucket = root / "bucket"
        self.bucket.mkdir()
        self.catalog = Catalog(FolderBucket(self.bucket))
        self.cache = root / "var/cache"
        self.batches: list[tuple[str, int]] = []
        self.manager = ModelManager(
            self.catalog, FolderBucket(self.bucket), self.cache, FakeModel, lambda *batch: self.batches.append(batch)
        )

    def change(self, change: Callable[[Model], Model]) -> None:
        self.catalog.change("m", change, create=True)

    def add_files(self, name: str, content: str) -> None:
        """Add a version's files, which servers may load."""
        file = self.bucket / folder_of("m", name) / "saved_model.pb"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.change(
            lambda model: model.add_version(Version(name, token=name)).set_files(name, name, {"saved_model.pb": digest}, 1)
        )

    def deploy(self, name: str, content: str) -> None:
        self.add_files(name, content)
        self.change(lambda model: model.mark_ready(name, name))
        self.manager.reconcile()

    def ask(self, version: str | None = None) -> float:
        served = self.manager.find("m", version)
        return float(served.batcher.put("serving_default", {"x": np.zeros(1)}).result(limit())["y"][0])

    def refused(self, version: str | None = None) -> tuple[int, str]:
        with pytest.raises(RestError) as caught:
            self.ask(version)
        return caught.value.status, str(caught.value)


def fail(*_: object) -> bool:
    raise BucketError("away")


@pytest.fixture
def world(tmp_path: Path) -> ServedBucket:
    return ServedBucket(tmp_path)


def test_early_requests_are_told_to_retry(world: ServedBucket) -> None:
    assert world.refused() == (503, "the models are not loaded yet")
    world.manager.reconcile()
    assert world.refused() == (404, "there is no model 'm' here; there are none")
    assert world.manager.idle


def test_versions_are_loaded_swapped_and_unloaded(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    assert (world.ask(), world.ask("v1")) == (1, 1)
    assert world.batches == [("m", 1)] * 2
    assert not world.manager.idle
    world.deploy("v2", "2")
    assert (world.ask(), world.ask("v2")) == (1, 2), "the first is the default"
    first, second = (world.manager.models["m"].versions[name].batcher for name in ("v1", "v2"))
    assert first is not None
    assert second is not None
    world.change(lambda model: model.with_default("v2"))
    world.manager.reconcile()
    assert world.ask() == 2
    assert world.refused("v3") == (404, "model m has no version 'v3' here; there are v1, v2")
    world.change(lambda model: model.undeploy("v1"))
    world.manager.reconcile()
    assert world.refused("v1")[0] == 404
    assert (first._closed, second._closed) == (True, False)
    (world.cache / "m/stray").touch()
    world.manager.reconcile()  # what cannot be deleted stays
    (world.cache / "m/stray").unlink()
    assert [folder.name for folder in (world.cache / "m").iterdir()] == ["v2-v2"], "an unloaded version uses no disk space"
    world.change(lambda model: model.delete("v2"))
    world.manager.reconcile()
    assert (world.refused()[0], world.manager.idle) == (404, True)
    assert second._closed
    assert not (world.cache / "m").exists()


@pytest.mark.parametrize(("record", "kept"), [(None, ["gone", "undeployed"]), ("valid", ["m"]), ("unreadable", ["undeployed"])])
def test_files_of_models_deleted_meanwhile_are_removed(world: ServedBucket, record: str | None, kept: list[str]) -> None:
    """An empty bucket is probably not mounted."""
    if record == "valid":
        world.add_files("v1", "1")
    elif record:
        (world.bucket / "models/undeployed").mkdir(parents=True)
        (world.bucket / "models/undeployed/model.json").write_text("{")
    for name in ("gone", "undeployed"):
        (world.cache / name / "v1-a").mkdir(parents=True)
    world.manager.reconcile()
    assert sorted(folder.name for folder in world.cache.iterdir()) == kept
    (world.cache / "later").mkdir()
    world.manager.reconcile()
    assert (world.cache / "later").exists(), "only at the first poll"


def test_a_model_without_files_is_unloaded(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    shutil.rmtree(world.cache / "m")
    world.change(lambda model: model.delete("v1"))
    world.manager.reconcile()
    assert world.manager.idle


def test_a_version_that_is_being_loaded(world: ServedBucket) -> None:
    """A mark says so while it is loaded, but not if the process ends as it should."""
    marks: list[list[str]] = []

    def load(folder: Path) -> FakeModel:
        assert world.refused("v1") == (503, "model m is not loaded yet")
        assert world.manager.versions_of("m", None)[0].state is LoadState.LOADING
        assert [file.name for file in folder.iterdir()] == ["saved_model.pb"], "nothing of an earlier download"
        for _ in range(2):
            marks.append([mark.name for mark in world.cache.glob(".loading-*")])
            world.manager.close()
        return FakeModel(folder)

    (world.cache / "m/v1-v1/variables").mkdir(parents=True)
    world.manager._load = load
    world.deploy("v1", "1")
    assert marks == [[".loading-m-v1-v1"], []]
    assert world.ask() == 1
    world.manager.close()


def test_a_server_that_ends_begins_no_further_load(world: ServedBucket) -> None:
    loads = list[Path]()

    def load(folder: Path) -> FakeModel:
        loads.append(folder)
        world.manager.close()
        return FakeModel(folder)

    world.manager._load = load
    world.add_files("v1", "1")
    world.add_files("v2", "2")
    world.manager.reconcile()
    assert sorted(str(version.state) for version in world.manager.versions_of("m", None)) == ["AVAILABLE", "LOADING"]
    assert len(loads) == 1


def test_a_reloaded_version_replaces_its_former_self(world: ServedBucket) -> None:
    """It is the default while the recorded default cannot be loaded."""
    world.deploy("v1", "1")
    world.deploy("v2", "broken")
    world.change(lambda model: model.with_default("v2").undeploy("v1").redeploy("v1", "b"))
    content = "5"
    (world.bucket / folder_of("m", "v1") / "saved_model.pb").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    world.change(lambda model: model.set_files("v1", "b", {"saved_model.pb": digest}, 1).mark_ready("v1", "b"))
    world.manager.reconcile()
    assert (world.ask(), world.ask("v1")) == (5, 5)


def test_a_model_without_a_default_answers_by_names_only(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    world.add_files("v2", "2")
    world.manager.reconcile()
    world.change(lambda model: model.delete("v1"))
    world.manager.reconcile()
    assert world.refused() == (503, "model m is not loaded yet")
    assert world.ask("v2") == 2


def test_a_version_in_creation_answers_by_its_name_only(world: ServedBucket) -> None:
    world.add_files("v1", "1")
    world.manager.reconcile()
    assert world.ask("v1") == 1
    assert world.refused() == (503, "model m is not loaded yet")
    world.change(lambda model: model.mark_ready("v1", "v1"))
    world.manager.reconcile()
    assert world.ask() == 1


def test_a_broken_version_never_replaces_a_loaded_one(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    world.deploy("v2", "broken")
    assert world.manager.models["m"].versions["v2"].state is LoadState.END
    assert "could not be loaded: ValueError: could not convert string to float: 'broken'" in world.refused("v2")[1]
    world.change(lambda model: model.with_default("v2"))  # by any client
    world.manager.reconcile()
    assert world.ask() == 1, "the loaded version still answers"


def test_a_failed_load_has_the_model_s_reason(world: ServedBucket) -> None:
    def load(_: Path) -> FakeModel:
        raise RuntimeError("Graph execution error:\n\nTable already initialized.\nand more")

    world.manager._load = load
    world.deploy("v1", "1")
    assert world.manager.models["m"].versions["v1"].why == "RuntimeError: Table already initialized."


@pytest.mark.parametrize("damage", ["another", None])
def test_a_damaged_version_is_not_loaded(world: ServedBucket, damage: str | None) -> None:
    world.add_files("v1", "1")
    file = world.bucket / folder_of("m", "v1") / "saved_model.pb"
    file.unlink() if damage is None else file.write_text(damage)
    world.manager.reconcile()
    reason = "is not in the bucket" if damage is None else "is damaged: it is not what was deployed"
    assert reason in world.manager.models["m"].versions["v1"].why


def test_a_file_outside_its_folder_is_refused(world: ServedBucket) -> None:
    world.change(lambda model: model.add_version(Version("v1", token="a")).set_files("v1", "a", {"../../../x": "00"}, 1))
    world.manager.reconcile()
    assert "would leave its folder" in world.manager.models["m"].versions["v1"].why


def test_a_temporarily_missing_bucket_keeps_loaded_versions(world: ServedBucket, capsys: pytest.CaptureFixture[str]) -> None:
    world.deploy("v1", "1")
    unmounted = world.bucket.with_name("away")
    world.bucket.rename(unmounted)
    world.manager.reconcile()
    assert world.ask() == 1
    assert capsys.readouterr().err.startswith("<4>serving: the bucket does not answer: ")
    unmounted.rename(world.bucket)
    world.add_files("v2", "2")

    class FailingStore(FolderBucket):
        def download(self, name: str, target: Path) -> bool:
            raise BucketError("away")

    world.manager._files = FailingStore(world.bucket)
    for _ in range(20):
        world.manager.reconcile()
    assert capsys.readouterr().err == "<4>serving: version v2 of model m: the bucket does not answer: away\n" * 20
    assert world.manager.models["m"].versions["v2"].state is LoadState.LOADING
    world.manager._files = FolderBucket(world.bucket)
    world.manager.reconcile()
    assert world.ask("v2") == 2


def test_an_unreadable_record_unloads_nothing(world: ServedBucket, capsys: pytest.CaptureFixture[str]) -> None:
    world.deploy("v1", "1")
    record = world.bucket / "models/m/model.json"
    content = record.read_bytes()
    record.write_bytes(b"{")
    world.manager.reconcile()
    assert world.ask() == 1
    assert capsys.readouterr().err.startswith("<4>serving: m: model.json is ")
    record.write_bytes(content)
    world.manager.reconcile()
    assert world.ask() == 1


def test_a_version_that_crashed_the_server_is_not_loaded_again(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    world.add_files("v2", "2")
    (world.cache / ".loading-m-v2-v2").touch()
    world.manager.reconcile()
    assert world.ask() == 1
    assert "v2 of model m could not be loaded: the server ended while it loaded this" in world.refused("v2")[1]
    world.manager._clock = lambda: math.inf
    world.manager.reconcile()
    assert world.refused("v2")[0] == 500, "a new version is not tried again"
    world.change(lambda model: model.mark_failed("v2", "v2", "died").redeploy("v2", "another"))
    world.manager.reconcile()
    assert world.ask("v2") == 2, "fab deploy retries it"
    assert [mark.name for mark in world.cache.glob(".loading-*")] == [".loading-m-v2-v2"]


def test_a_ready_version_that_crashed_the_server_is_retried_later_only(world: ServedBucket) -> None:
    now = [1e6]
    world.manager._clock = lambda: now[0]
    world.cache.mkdir(parents=True)
    (world.cache / ".loading-m-v1-v1").touch()
    world.deploy("v1", "1")
    assert "could not be loaded: the server ended while it loaded this" in world.refused("v1")[1]
    (world.cache / ".loading-m-v1-v1").unlink()
    world.manager.reconcile()
    assert world.refused("v1")[0] == 500
    (world.cache / ".loading-m-v1-v1").touch()
    now[0] += 60
    world.manager.reconcile()
    assert world.ask() == 1
    assert not list(world.cache.glob(".loading-*"))


@pytest.mark.parametrize(
    ("before", "pause", "after"), [(b"", 60.0, b"2"), (b"1", 60.0, b"2"), (b"2", 120.0, b"3"), (b"3", 240.0, b"4")]
)
def test_a_ready_version_that_ends_the_server_again_waits_longer(
    world: ServedBucket, before: bytes, pause: float, after: bytes
) -> None:
    """The file counts the tries; it is empty if the host lost power before the count reached the disk."""
    marker, now, loads = world.cache / ".loading-m-v1-v1", [5.0], list[tuple[float, bytes]]()

    def end_server(_: Path) -> FakeModel:
        loads.append((now[0], marker.read_bytes()))
        raise SystemExit

    world.cache.mkdir(parents=True)
    marker.write_bytes(before)
    world.manager._clock, world.manager._load = lambda: now[0], end_server
    world.deploy("v1", "1")
    now[0] += pause - 1
    world.manager.reconcile()
    assert marker.read_bytes() == before
    now[0] += 1
    with pytest.raises(SystemExit):
        world.manager.reconcile()
    assert loads == [(5.0 + pause, after)]


def test_ready_versions_are_loaded_before_those_in_creation(world: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    world.catalog.change(
        "a", lambda model: model.add_version(Version("v1", token="a")).set_files("v1", "a", {"x": "00"}, 1), create=True
    )
    world.deploy("v1", "1")
    order: list[str] = []
    fetched = ModelManager._fetch
    monkeypatch.setattr(
        ModelManager, "_fetch", lambda self, model, version: order.append(model) or fetched(self, model, version)
    )
    ModelManager(world.catalog, FolderBucket(world.bucket), world.cache, FakeModel, lambda *_: None).reconcile()
    assert order == ["m", "a"]


@pytest.mark.parametrize(("ready", "count"), [(True, 3), (False, 1)])
def test_a_ready_version_that_failed_to_load_is_retried_later(
    world: ServedBucket, capsys: pytest.CaptureFixture[str], ready: bool, count: int
) -> None:
    now = [0.0]
    world.manager._clock = lambda: now[0]
    world.add_files("v1", "broken")
    if ready:
        world.change(lambda model: model.mark_ready("v1", "v1"))
    loads: list[Path] = []
    world.manager._load = lambda folder: loads.append(folder) or FakeModel(folder)  # type: ignore[func-returns-value]
    for seconds in (0.0, 59.0, 60.0, 61.0, 179.0, 180.0):
        now[0] = seconds
        world.manager.reconcile()
    assert len(loads) == count, "after 60 s, and after twice as long"
    line = "version v1 of model m cannot be loaded: ValueError: could not convert string to float: 'broken'"
    assert capsys.readouterr().err == f"<4>serving: {line}\n" * count


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_failed_load_and_no_outage(
    world: ServedBucket, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    now, downloads = [0.0], list[float]()
    world.manager._clock = lambda: now[0]

    def download(_: str, target: Path) -> bool:
        downloads.append(now[0])
        target.write_text("a part")
        raise BucketError(number, f"{target}: full")

    world.manager._files.download = download  # type: ignore[method-assign]
    world.deploy("v1", "1")
    assert list((world.cache / "m").iterdir()) == [], "what was downloaded uses no disk space"
    for seconds in (59.0, 60.0, 61.0, 179.0, 180.0):
        now[0] = seconds
        world.manager.reconcile()
    assert downloads == [0.0, 60.0, 180.0], "after 60 s, and after twice as long"
    assert world.refused("v1") == (500, f"version v1 of model m could not be loaded: {_full(world, number)}")
    assert capsys.readouterr().err == f"<4>serving: version v1 of model m cannot be loaded: {_full(world, number)}\n" * 3


def _full(world: ServedBucket, number: int) -> str:
    return f"BucketError: [Errno {number}] {world.cache}/m/v1-v1/saved_model.pb: full"


@pytest.mark.parametrize("used_by", ["cluster/queue.json", "jobs/job01/job.json"])
def test_a_suddenly_empty_bucket_counts_as_unmounted(
    world: ServedBucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], used_by: str
) -> None:
    world.deploy("v1", "1")
    (world.bucket / "models").rename(world.bucket / "elsewhere")
    world.manager.reconcile()
    assert world.ask() == 1
    line = "the bucket is empty, so it is probably not mounted: loaded models are kept"
    assert capsys.readouterr().err == f"<4>serving: {line}\n"
    (world.bucket / used_by).parent.mkdir(parents=True)
    (world.bucket / used_by).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "in_use", fail)
        world.manager.reconcile()
    assert world.ask() == 1
    world.manager.reconcile()
    assert world.refused()[0] == 404


def test_no_request_fails_while_versions_swap(world: ServedBucket) -> None:
    world.deploy("v1", "1")
    world.deploy("v2", "2")
    stop, errors, results = threading.Event(), list[Exception](), set[float]()

    def ask() -> None:
        while not stop.is_set():
            try:
                results.add(world.ask())
            except Exception as error:  # noqa: BLE001  errors are counted
                errors.append(error)

    client_threads = [threading.Thread(target=ask) for _ in range(4)]
    for client_thread in client_threads:
        client_thread.start()
    for number in range(3, 11):
        world.deploy(f"v{number}", str(number))
        world.change(lambda model, name=f"v{number}": model.with_default(name))  # type: ignore[misc]
        world.manager.reconcile()
        world.change(lambda model, name=f"v{number - 1}": model.delete(name))  # type: ignore[misc]
        world.manager.reconcile()
    wait_for(lambda: 10 in results or errors, "an answer of the last version")
    stop.set()
    for client_thread in client_threads:
        client_thread.join()
    assert errors == []


class BlockedBatcher:
    """A batcher with a first request; its model doubles x, refuses -1, and waits for `free`."""

    def __init__(self, **limits: Any) -> None:
        self.calls, self.sizes, self.free = list[list[float]](), list[int](), threading.Event()
        self.threads = set[threading.Thread]()
        self.batcher = Batcher(self.run, {**ROWS, "fixed": FIXED, "pair": PAIR}, on_batch=self.sizes.append, **limits)
        self.first = put(self.batcher, 0)
        wait_for(lambda: len(self.calls) == 1, "the first call", poll=0.001)

    def run(self, _: str, inputs: Arrays) -> Arrays:
        self.calls.append(inputs["x"].tolist())
        self.threads.add(threading.current_thread())
        self.free.wait()
        if -1 in inputs["x"]:
            raise RestError(400, "no")
        return {"y": inputs["x"] * 2}

    def results(self, *futures: Future[Arrays]) -> list[list[float]]:
        self.free.set()
        return [future.result(limit())["y"].tolist() for future in (self.first, *futures)]


def put(batcher: Batcher, *values: float) -> Future[Arrays]:
    return batcher.put("serving_default", {"x": np.array(values)})


def test_requests_during_a_computation_are_batched() -> None:
    blocked = BlockedBatcher(max_rows=4)
    waiting = [put(blocked.batcher, 2, 3), put(blocked.batcher, 4), put(blocked.batcher, 5, 6)]
    assert blocked.results(*waiting) == [[0], [4, 6], [8], [10, 12]]
    assert blocked.calls == [[0], [2, 3, 4], [5, 6]], "batches of the maximum size, in order of arrival"
    assert blocked.sizes == [1, 3, 2]


def test_only_requests_of_one_shape_are_batched() -> None:
    blocked = BlockedBatcher()
    put_other = blocked.batcher.put
    waiting = [
        put(blocked.batcher, 1),
        put_other("serving_default", {"x": np.array([2], np.float32)}),
        put_other("serving_default", {"x": np.array([[3, 4]])}),
        *(put_other("fixed", {"x": np.array([5, 6])}) for _ in range(2)),
        *(put_other("pair", {"x": np.array([7, 8]), "z": np.zeros(rows)}) for rows in (1, 1)),
    ]
    assert blocked.results(*waiting)[1:] == [[2], [4], [[6, 8]], [10, 12], [10, 12], [14, 16], [14, 16]]
    assert blocked.calls[1:] == [[1], [2], [[3, 4]], [5, 6], [5, 6], [7, 8], [7, 8]]
    assert blocked.sizes == [1] * 8


def test_a_cancelled_request_is_not_computed() -> None:
    blocked = BlockedBatcher(max_rows=1)
    cancelled, other = put(blocked.batcher, 1), put(blocked.batcher, 2)
    assert cancelled.cancel()
    assert blocked.results(other) == [[0], [4]]
    assert blocked.calls == [[0], [2]]


def test_an_invalid_request_fails_no_other() -> None:
    blocked = BlockedBatcher()
    valid, invalid = put(blocked.batcher, 1), put(blocked.batcher, -1)
    assert blocked.results(valid) == [[0], [2]]
    with pytest.raises(RestError, match="no"):
        invalid.result(limit())


def test_too_many_and_late_requests_are_refused() -> None:
    blocked = BlockedBatcher(max_waiting=2)
    waiting = [put(blocked.batcher, 1), put(blocked.batcher, 2)]
    with pytest.raises(RestError, match="too many requests wait") as caught:
        put(blocked.batcher, 3)
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    blocked.batcher.close()
    assert blocked.results(*waiting) == [[0], [2], [4]]
    assert put(blocked.batcher, 5).result(limit())["y"].tolist() == [10], "requests before the end get an answer"
    assert len(blocked.threads) == 2
    assert all(thread.daemon for thread in blocked.threads), "they do not delay the end of the process"
    for thread in blocked.threads:
        thread.join(limit())
        assert not thread.is_alive()


def test_no_request_gets_rows_of_another() -> None:
    """Use a model that returns other rows than it got, despite its declared shapes."""
    goes_on, sizes = threading.Event(), list[int]()

    def positive(_: str, inputs: Arrays) -> Arrays:
        goes_on.wait()
        return {"y": inputs["x"][inputs["x"] > 0]}

    batcher = Batcher(positive, ROWS, on_batch=sizes.append)
    futures = [put(batcher, 1, -1), put(batcher, 2, -2), put(batcher, -3, 3)]
    goes_on.set()
    assert [future.result(limit())["y"].tolist() for future in futures] == [[1], [2], [3]]
    later_futures = [put(batcher, 4, -4), put(batcher, 5, 5)]
    assert [future.result(limit())["y"].tolist() for future in later_futures] == [[4], [5, 5]]
    assert max(sizes) == 2, "requests are no longer batched"


def test_a_batch_with_a_single_value_is_computed_one_by_one() -> None:
    goes_on = threading.Event()

    def total(_: str, inputs: Arrays) -> Arrays:
        goes_on.wait()
        return {"y": np.asarray(inputs["x"].sum())}

    batcher = Batcher(total, ROWS)
    futures = [put(batcher, 1, 2), put(batcher, 3), put(batcher, 4)]
    goes_on.set()
    assert [future.result(limit())["y"].tolist() for future in futures] == [3, 3, 4]
