"""The time limit of a store's calls: a hanging store delays no caller for longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replicahosts import PATIENCE, Flaky, until

from jobs.bucket import BucketError, Conflict, TimeLimited
from jobs.folder import FolderBucket


class HangingStore(Flaky):
    """A store whose calls hang until they are released."""

    def __init__(self, root: Path) -> None:
        super().__init__(FolderBucket(root))
        self.released = threading.Event()
        self.before = lambda method, name: self.released.wait(PATIENCE)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingStore]:
    store = HangingStore(tmp_path)
    yield store
    store.released.set()


def test_every_call_is_passed_to_the_store(tmp_path: Path) -> None:
    store = TimeLimited(FolderBucket(tmp_path), PATIENCE)
    version = store.create("a/b", b"one")
    assert store.read("a/b") == (b"one", version)
    assert store.read("a/c") is None
    second = store.replace("a/b", b"two", version)
    assert store.read_all(iter(["a/b", "a/c"])) == {"a/b": (b"two", second)}
    assert store.scan("a/*") == {"a/b": b"two"}
    with pytest.raises(Conflict, match="a/b"):
        store.create("a/b", b"other")
    with pytest.raises(Conflict):
        store.replace("a/b", b"three", version)
    with pytest.raises(BucketError, match="is not there"):
        TimeLimited(FolderBucket(tmp_path / "none"), PATIENCE).read("a")


CALLS: list[Callable[[Any], object]] = [
    lambda store: store.read("a"),
    lambda store: store.read_all(["a"]),
    lambda store: store.scan("*"),
    lambda store: store.create("a", b""),
    lambda store: store.replace("a", b"", "1"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_hanging_call_times_out_and_later_ones_fail_at_once(hanging: HangingStore, call: Callable[[Any], object]) -> None:
    store = TimeLimited(hanging, 0.05)
    with pytest.raises(BucketError, match=r"no answer within 0\.05 s"):
        call(store)
    for _ in range(200):  # 10 s if each of them waited
        with pytest.raises(BucketError, match=r"an earlier call has been hanging for more than 0\.05 s"):
            call(store)
    assert hanging.calls == []


def test_a_timed_out_write_may_take_effect_and_later_calls_work(hanging: HangingStore) -> None:
    store = TimeLimited(hanging, 0.05)
    with pytest.raises(BucketError):
        store.create("a", b"one")
    hanging.released.set()
    store._seconds = PATIENCE  # a busy disk may need longer than 0.05 s
    until(lambda: _works(store))
    assert store.scan("*") == {"a": b"one"}
    version = store.create("a", b"one")  # a retry accepts the own write
    assert store.read("a") == (b"one", version)


def test_a_call_that_timed_out_in_the_queue_is_dropped(hanging: HangingStore) -> None:
    store = TimeLimited(hanging, 0.3)
    failed = list[str]()

    def write(name: str) -> None:
        try:
            store.create(name, b"")
        except BucketError as error:
            failed.append(str(error))

    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE)
    assert len(failed) == 3
    hanging.released.set()
    until(lambda: _works(store))
    assert len(store.scan("*")) == 1, "only the call in progress takes effect"


def _works(store: TimeLimited) -> bool:
    try:
        store.read("a")
    except BucketError:
        return False
    return True
