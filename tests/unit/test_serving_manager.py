"""A server's reactions to the bucket: loads, swaps and unloads, without a failed request between."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import limit, wait_for

from hosts.serving.batcher import Batcher
from hosts.serving.catalog import Catalog
from hosts.serving.manager import ModelManager
from hosts.serving.records import LoadState, Model, Version, folder_of
from hosts.serving.rest import Arrays, RestError
from hosts.serving.signatures import Signature, Tensor
from jobs.bucket import BucketError
from jobs.folder import FolderBucket

ROWS = {"serving_default": Signature({"x": Tensor("float32", (None,))}, {"y": Tensor("float32", (None,))})}


class FakeModel:
    """A model that adds what its file says."""

    def __init__(self, folder: Path) -> None:
        self.more = float((folder / "saved_model.pb").read_text())
        self.signatures = ROWS

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] + self.more}

    def examples(self, signature: str, examples: Any) -> Arrays:
        raise AssertionError


class World:
    """A bucket, and a server that follows it."""

    def __init__(self, root: Path) -> None:
        self.bucket = root / "bucket"
        self.bucket.mkdir()
        self.catalog = Catalog(FolderBucket(self.bucket))
        self.manager = ModelManager(self.catalog, FolderBucket(self.bucket), root / "cache", FakeModel, lambda *_: None)
        self.cache = root / "cache"

    def change(self, change: Callable[[Model], Model]) -> None:
        self.catalog.change("m", change, create=True)

    def bring(self, name: str, content: str) -> None:
        """Add a version's files, which servers may load."""
        file = self.bucket / folder_of("m", name) / "saved_model.pb"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.change(
            lambda model: model.add_version(Version(name, token=name)).set_files(name, name, {"saved_model.pb": digest}, 1)
        )

    def deploy(self, name: str, content: str) -> None:
        self.bring(name, content)
        self.change(lambda model: model.mark_ready(name, name))
        self.manager.follow()

    def ask(self, version: str | None = None) -> float:
        here = self.manager.find("m", version)
        assert here.batcher is not None
        return float(here.batcher.put("serving_default", {"x": np.zeros(1)}).result(limit())["y"][0])

    def refused(self, version: str | None = None) -> tuple[int, str]:
        with pytest.raises(RestError) as caught:
            self.ask(version)
        return caught.value.status, str(caught.value)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_who_asks_early_is_told_to_come_again(world: World) -> None:
    assert world.refused() == (503, "the models are not loaded yet")
    world.manager.follow()
    assert world.refused() == (404, "there is no model 'm' here; there are none")
    assert world.manager.idle


def test_versions_come_swap_and_go(world: World) -> None:
    world.deploy("v1", "1")
    assert (world.ask(), world.ask("v1")) == (1, 1)
    assert not world.manager.idle
    world.deploy("v2", "2")
    assert (world.ask(), world.ask("v2")) == (1, 2), "the first is the default"
    world.change(lambda model: model.with_default("v2"))
    world.manager.follow()
    assert world.ask() == 2
    assert world.refused("v3") == (404, "model m has no version 'v3' here; there are v1, v2")
    world.change(lambda model: model.undeploy("v1"))
    world.manager.follow()
    assert world.refused("v1")[0] == 404
    assert [folder.name for folder in (world.cache / "m").iterdir()] == ["v2-v2"], "what is not served takes no room"
    world.change(lambda model: model.delete("v2"))
    world.manager.follow()
    assert (world.refused()[0], world.manager.idle) == (404, True)
    assert not (world.cache / "m").exists()


def test_one_that_is_tried_answers_by_its_name_only(world: World) -> None:
    world.bring("v1", "1")
    world.manager.follow()
    assert world.ask("v1") == 1
    assert world.refused() == (503, "model m is not loaded yet")
    world.change(lambda model: model.mark_ready("v1", "v1"))
    world.manager.follow()
    assert world.ask() == 1


def test_a_broken_version_never_takes_the_place_of_one_that_answers(world: World) -> None:
    world.deploy("v1", "1")
    world.deploy("v2", "broken")
    assert world.manager.models["m"].versions["v2"].state is LoadState.END
    assert "could not be loaded: ValueError: could not convert string to float: 'broken'" in world.refused("v2")[1]
    world.change(lambda model: model.with_default("v2"))  # whoever made it so
    world.manager.follow()
    assert world.ask() == 1, "it goes on with what answers"


@pytest.mark.parametrize("damage", ["another", None])
def test_a_version_is_what_was_deployed_or_nothing(world: World, damage: str | None) -> None:
    world.bring("v1", "1")
    file = world.bucket / folder_of("m", "v1") / "saved_model.pb"
    file.unlink() if damage is None else file.write_text(damage)
    world.manager.follow()
    why = "is not in the bucket" if damage is None else "is damaged: it is not what was deployed"
    assert why in world.manager.models["m"].versions["v1"].why


def test_a_file_may_not_leave_its_folder(world: World) -> None:
    world.change(lambda model: model.add_version(Version("v1", token="a")).set_files("v1", "a", {"../../../x": "00"}, 1))
    world.manager.follow()
    assert "would leave its folder" in world.manager.models["m"].versions["v1"].why


def test_a_bucket_that_is_away_for_a_while(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.deploy("v1", "1")
    away = world.bucket.with_name("away")
    world.bucket.rename(away)
    world.manager.follow()
    assert world.ask() == 1
    assert "the bucket does not answer" in capsys.readouterr().err
    away.rename(world.bucket)
    world.bring("v2", "2")

    class Away(FolderBucket):
        def download(self, name: str, target: Path) -> bool:
            raise BucketError("away")

    world.manager._files = Away(world.bucket)
    for _ in range(20):
        world.manager.follow()
    assert world.manager.models["m"].versions["v2"].state is LoadState.LOADING
    world.manager._files = FolderBucket(world.bucket)
    world.manager.follow()
    assert world.ask("v2") == 2


def test_a_record_that_cannot_be_read_takes_nothing_down(world: World) -> None:
    world.deploy("v1", "1")
    record = world.bucket / "models/m/model.json"
    whole = record.read_bytes()
    record.write_bytes(b"{")
    world.manager.follow()
    assert world.ask() == 1
    record.write_bytes(whole)
    world.manager.follow()
    assert world.ask() == 1


def test_a_version_whose_loading_ended_the_process_is_not_loaded_again(world: World) -> None:
    world.deploy("v1", "1")
    world.bring("v2", "2")
    (world.cache / ".loading-m-v2-v2").touch()
    world.manager.follow()
    assert world.ask() == 1
    assert "v2 of model m could not be loaded: the server ended while it loaded this" in world.refused("v2")[1]
    world.change(lambda model: model.mark_failed("v2", "v2", "died").redeploy("v2", "another"))
    world.manager.follow()
    assert world.ask("v2") == 2, "fab deploy tries it once more"
    assert [mark.name for mark in world.cache.glob(".loading-*")] == [".loading-m-v2-v2"]


def test_what_is_ready_is_loaded_before_what_is_tried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.catalog.change(
        "a", lambda model: model.add_version(Version("v1", token="a")).set_files("v1", "a", {"x": "00"}, 1), create=True
    )
    world.deploy("v1", "1")
    order: list[str] = []
    fetched = ModelManager._fetch
    monkeypatch.setattr(
        ModelManager, "_fetch", lambda self, model, version: order.append(model) or fetched(self, model, version)
    )
    ModelManager(world.catalog, FolderBucket(world.bucket), world.cache, FakeModel, lambda *_: None).follow()
    assert order == ["m", "a"]


def test_a_ready_version_that_did_not_load_is_tried_again_later(world: World) -> None:
    now = [0.0]
    world.manager._clock = lambda: now[0]
    world.bring("v1", "broken")
    world.change(lambda model: model.mark_ready("v1", "v1"))
    loads: list[Path] = []
    world.manager._load = lambda folder: loads.append(folder) or FakeModel(folder)  # type: ignore[func-returns-value]
    for seconds in (0.0, 59.0, 60.0, 61.0, 179.0, 180.0):
        now[0] = seconds
        world.manager.follow()
    assert len(loads) == 3, "after 60 s, and after twice as long"


def test_a_suddenly_empty_bucket_counts_as_unmounted(world: World) -> None:
    world.deploy("v1", "1")
    (world.bucket / "models").rename(world.bucket / "elsewhere")
    world.manager.follow()
    assert world.ask() == 1
    (world.bucket / "cluster").mkdir()
    (world.bucket / "cluster/queue.json").write_text("{}")
    world.manager.follow()
    assert world.refused()[0] == 404


def test_no_request_fails_while_versions_swap(world: World) -> None:
    world.deploy("v1", "1")
    world.deploy("v2", "2")
    ended, failed, seen = threading.Event(), list[Exception](), set[float]()

    def ask() -> None:
        while not ended.is_set():
            try:
                seen.add(world.ask())
            except Exception as error:  # noqa: BLE001  it is counted
                failed.append(error)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for number in range(3, 11):
        world.deploy(f"v{number}", str(number))
        world.change(lambda model, name=f"v{number}": model.with_default(name))  # type: ignore[misc]
        world.manager.follow()
        world.change(lambda model, name=f"v{number - 1}": model.delete(name))  # type: ignore[misc]
        world.manager.follow()
    wait_for(lambda: 10 in seen or failed, "an answer of the last version")
    ended.set()
    for asker in askers:
        asker.join()
    assert failed == []


class Blocked:
    """A batcher at its first request; its model doubles x, refuses -1, and computes nothing before `free` is set."""

    def __init__(self, **limits: Any) -> None:
        self.calls, self.sizes, self.free = list[list[float]](), list[int](), threading.Event()
        self.batcher = Batcher(self.run, ROWS, on_batch=self.sizes.append, **limits)
        self.first = put(self.batcher, 0)
        wait_for(lambda: len(self.calls) == 1, "the first call", poll=0.001)

    def run(self, _: str, inputs: Arrays) -> Arrays:
        self.calls.append(inputs["x"].tolist())
        self.free.wait()
        if -1 in inputs["x"]:
            raise RestError(400, "no")
        return {"y": inputs["x"] * 2}

    def results(self, *futures: Future[Arrays]) -> list[list[float]]:
        self.free.set()
        return [future.result(limit())["y"].tolist() for future in (self.first, *futures)]


def put(batcher: Batcher, *values: float) -> Future[Arrays]:
    return batcher.put("serving_default", {"x": np.array(values)})


def test_what_comes_while_one_is_computed_is_computed_together() -> None:
    blocked = Blocked(most_rows=4)
    others = [put(blocked.batcher, 2, 3), put(blocked.batcher, 4), put(blocked.batcher, 5, 6)]
    assert blocked.results(*others) == [[0], [4, 6], [8], [10, 12]]
    assert blocked.calls == [[0], [2, 3, 4], [5, 6]], "as many as may go together, in the order in which they came"
    assert blocked.sizes == [1, 3, 2]


def test_one_bad_request_spoils_no_other() -> None:
    blocked = Blocked()
    good, bad = put(blocked.batcher, 1), put(blocked.batcher, -1)
    assert blocked.results(good) == [[0], [2]]
    with pytest.raises(RestError, match="no"):
        bad.result(limit())


def test_too_many_at_once_and_after_the_end() -> None:
    blocked = Blocked(most_waiting=2)
    waiting = [put(blocked.batcher, 1), put(blocked.batcher, 2)]
    with pytest.raises(RestError, match="too many requests wait") as caught:
        put(blocked.batcher, 3)
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    blocked.batcher.close()
    assert blocked.results(*waiting) == [[0], [2], [4]]
    assert put(blocked.batcher, 5).result(limit())["y"].tolist() == [10], "who found it in time gets an answer"


def test_no_request_gets_another_s_rows() -> None:
    """Of a model that gives other rows than it got, whatever its shapes say."""
    goes_on, sizes = threading.Event(), list[int]()

    def positive(_: str, inputs: Arrays) -> Arrays:
        goes_on.wait()
        return {"y": inputs["x"][inputs["x"] > 0]}

    batcher = Batcher(positive, ROWS, on_batch=sizes.append)
    asked = [put(batcher, 1, -1), put(batcher, 2, -2), put(batcher, -3, 3)]
    goes_on.set()
    assert [future.result(limit())["y"].tolist() for future in asked] == [[1], [2], [3]]
    again = [put(batcher, 4, -4), put(batcher, 5, 5)]
    assert [future.result(limit())["y"].tolist() for future in again] == [[4], [5, 5]]
    assert max(sizes) == 2, "nobody goes together any more"
