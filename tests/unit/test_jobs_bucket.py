"""The time limit of a store's calls: a hanging store delays no caller for longer."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from replicahosts import PATIENCE
from shared_fakes import Flaky
from waiting import until

from jobs import bucket, folder_bucket
from jobs.background import Background
from jobs.bucket import BucketError, Conflict, TimeLimited, file_errors, replacing
from jobs.folder_bucket import FolderBucket


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


def test_a_call_without_a_thread_fails_and_later_ones_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimeLimited(FolderBucket(tmp_path), PATIENCE)

    def refuse(work: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    with (
        monkeypatch.context() as patch,
        pytest.raises(BucketError, match=r"^no thread can be started: can't start new thread$"),
    ):
        patch.setattr(bucket, "Background", refuse)
        store.read("a")
    assert not store._turn.locked()
    assert store.read("a") is None


def test_work_in_the_background_returns_its_result_or_error() -> None:
    released = threading.Event()
    work = Background(lambda: (released.wait(PATIENCE), threading.current_thread().daemon)[1])
    assert work.running
    with pytest.raises(TimeoutError, match=r"^it takes longer than -1 s$"):
        work.join(-1)
    released.set()
    assert work.join(PATIENCE) is True, "it must not keep a process from its end"
    until(lambda: not work.running)
    failing = Background(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.join(PATIENCE)


def test_a_join_never_waits_for_a_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    work, waits = Background(lambda: None), list[float]()

    def get(timeout: float) -> None:
        waits.append(timeout)
        raise Empty

    monkeypatch.setattr(work, "_outcome", SimpleNamespace(get=get))
    for seconds in (-2.5, 0.0, 2.5):
        with pytest.raises(TimeoutError):
            work.join(seconds)
    assert waits == [0.0, 0.0, 2.5]


def test_an_error_of_a_file_is_one_of_the_bucket() -> None:
    with pytest.raises(BucketError) as caught, file_errors("/disk/x"):
        raise OSError(28, "No space left on device")
    assert (caught.value.errno, caught.value.strerror) == (28, "/disk/x: No space left on device")
    with pytest.raises(BucketError, match=r"/disk/x: odd$"), file_errors("/disk/x"):
        raise OSError("odd")
    with pytest.raises(BucketError, match=r"^as it is$"), file_errors("/disk/x"):
        raise BucketError("as it is")


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), replacing(target) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (target.read_bytes(), list(tmp_path.iterdir())) == (b"before", [target])
    with replacing(target) as file:
        file.write(b"after")
        assert target.read_bytes() == b"before"
    assert (target.read_bytes(), list(tmp_path.iterdir())) == (b"after", [target])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def test_a_write_is_on_the_disk_before_it_is_acknowledged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, opened, closed = list[int](), list[int](), list[int]()
    os_open, os_close = os.open, os.close

    def open_(*args: Any, **named: Any) -> int:
        opened.append(os_open(*args, **named))
        return opened[-1]

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        os_close(descriptor)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "close", close)
    store = FolderBucket(root)
    version = store.create("new/a/b", b"one")
    file, folder = root / "new/a/b", (root / "new/a").stat().st_ino
    assert synced == [(root / "new").stat().st_ino, root.stat().st_ino, file.stat().st_ino, folder]
    store.replace("new/a/b", b"two", version)
    assert synced[4:] == [file.stat().st_ino, folder]
    store.upload("new/a/b", b"three")
    assert synced[6:] == [file.stat().st_ino, folder]
    assert (len(opened), sorted(closed)) == (6, sorted(opened))


def test_a_locked_folder_is_an_error_after_a_time(root: Path) -> None:
    store = FolderBucket(root, 0.01)
    version = store.create("a/b", b"one")
    holder = os.open(root / "a", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(BucketError, match=r"/a is locked by another for 0\.01 s$"):
        store.replace("a/b", b"two", version)
    os.close(holder)
    assert store.replace("a/b", b"two", version) != version


def test_another_writer_may_create_the_folder_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def mkdir_second(path: Path, mode: int) -> None:
        mkdir(path)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir_second)
    FolderBucket(root).create("a/b/c", b"one")
    assert (root / "a/b/c").read_bytes() == b"one"


def test_a_removal_completes_one_that_another_process_began(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderBucket(root)
    for name in ("jobs/job01/a", "jobs/job01/b"):
        store.create(name, b"1")
    walk = os.walk

    def walk_late(*arguments: Any, **options: Any) -> Iterator[Any]:
        for parent, folders, names in walk(*arguments, **options):
            (root / "jobs/job01/a").unlink()
            yield parent, folders, names

    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", walk_late)
        store.remove("jobs/job01", last="jobs/job01/job.json")
    assert list((root / "jobs").iterdir()) == []
    store.remove("jobs/job01", last="jobs/job01/job.json")


def test_links_in_an_output_are_followed_once(root: Path) -> None:
    store, output = FolderBucket(root), root / "jobs/j/output"
    for name in ("ckpt-1/m", "ckpt-2/m", "ckpt-2/deep/n"):
        store.create(f"jobs/j/output/{name}", b"1")
    store.create("data/x.csv", b"12")
    links = {
        "latest": "ckpt-2",
        "best": output / "ckpt-1",
        "link": "latest",
        "file": "ckpt-1/m",
        "x.csv": root / "data/x.csv",
        "ckpt-2/up": "..",
        "ckpt-2/other": "../ckpt-1",
        "all": ".",
        "nowhere": "gone",
        "long": "n" * 300,
        "outside": "/",
        "data": root / "data",
        "passwd": "/etc/passwd",
    }
    for name, target in links.items():
        (output / name).symlink_to(target)
    os.mkfifo(output / "pipe")
    real = {"ckpt-1/m": 1, "ckpt-2/m": 1, "ckpt-2/deep/n": 1, "file": 1, "x.csv": 2}
    assert store.walk("jobs/j/output") == real
    linked = {f"{link}/{name}": 1 for link in ("latest", "link") for name in ("m", "deep/n")}
    sizes, skipped = store.walk_following_links("jobs/j/output")
    assert sizes == {**real, **linked, "ckpt-2/other/m": 1, "best/m": 1}
    assert skipped == ["all", "ckpt-2/up", "data", "long", "nowhere", "outside", "passwd", "pipe"]
    assert store.walk_following_links("jobs/j/output/latest") == ({"m": 1, "deep/n": 1}, ["other", "up"])
    assert store.walk_following_links("jobs/none") == ({}, [])


def test_many_links_to_many_files_are_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_bucket, "_MOST_LINKED", 5)
    store = FolderBucket(root)
    for name in ("a", "b"):
        store.create(f"files/{name}", b"1")
    for number in range(4):
        (root / f"link-{number}").symlink_to("files")
    sizes, skipped = store.walk_following_links("")
    assert sorted(sizes) == ["files/a", "files/b", "link-0/a", "link-0/b", "link-1/a", "link-1/b"]
    assert skipped == ["link-2", "link-3"]


def test_a_name_may_be_as_long_as_the_disk_allows(root: Path, tmp_path: Path) -> None:
    store, name = FolderBucket(root), "n" * 255
    version = store.create(name, b"one")
    store.replace(name, b"two", version)
    assert store.download(name, tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"two"


def test_an_unreadable_file_or_folder_is_not_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderBucket(root)
    store.create("a/b/c", b"1")
    stat = Path.stat

    def fail(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "c" and follow_symlinks:
            raise OSError(5, "Input/output error")
        return stat(path, follow_symlinks=follow_symlinks)

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        for call in (store.sizes, store.walk):
            with pytest.raises(BucketError, match="Input/output error"):
                call("a/b")
    monkeypatch.setattr(os, "scandir", refuse)
    for call in (store.walk, store.remove):
        with pytest.raises(BucketError, match="Permission denied"):
            call("a")
    assert (root / "a/b/c").exists()


def test_a_listing_leaves_out_what_a_job_has_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderBucket(root)
    for name in ("a/closed/c", "a/listed/c", "a/file", "a/open/c"):
        store.create(name, b"1")
    scandir, stat, access = os.scandir, Path.stat, os.access

    def list_unless_closed(path: str | int) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)  # type: ignore[arg-type,return-value]  # a descriptor, by those who remove folders

    def stat_unless_closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.parent.name == "listed":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat_unless_closed)
    monkeypatch.setattr(os, "access", lambda path, mode: not path.endswith("file") and access(path, mode))
    with pytest.raises(BucketError, match="Permission denied"):
        store.walk("a")
    monkeypatch.setattr(os, "scandir", list_unless_closed)
    assert store.walk_following_links("a") == ({"open/c": 1}, ["closed", "file", "listed/c"])
    with pytest.raises(BucketError, match="Permission denied"):
        store.walk_following_links("a/closed")


def test_a_listing_leaves_out_paths_that_are_too_long(root: Path) -> None:
    store, name = FolderBucket(root), "n" * 255
    store.create("a/b", b"1")
    here = os.open(root / "a", os.O_RDONLY)
    for _ in range(17):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        sizes, skipped = store.walk_following_links("a")
        assert (sizes, [path.strip("n/") for path in skipped]) == ({"b": 1}, [""])
        with pytest.raises(BucketError, match="File name too long"):
            store.walk("a")
    finally:
        shutil.rmtree(root / "a" / name)


GONE_CALLS: dict[str, Callable[[FolderBucket, Path], object]] = {
    "open": lambda store, path: store.open("a"),
    "read_part": lambda store, path: store.read_part("a", 0, 1),
    "walk": lambda store, path: store.walk("a"),
    "remove": lambda store, path: store.remove("a"),
    "upload of a job": lambda store, path: store.upload("jobs/job01/a", b""),
}


@pytest.mark.parametrize("call", GONE_CALLS)
def test_an_unmounted_folder_is_not_an_empty_one(tmp_path: Path, call: str) -> None:
    with pytest.raises(BucketError, match=r"/none is not there$"):
        GONE_CALLS[call](FolderBucket(tmp_path / "none"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_objects_that_do_not_exist(root: Path) -> None:
    store = FolderBucket(root)
    store.create("file", b"1")
    for name in ("none", "file/below", "none/below"):
        assert (store.read(name), store.open(name), store.read_part(name, 0, 9)) == (None, None, b"")
        assert (store.sizes(name), store.walk(name), store.scan(f"{name}/*")) == ({}, {}, {})
        store.delete(name)
        with pytest.raises(Conflict):
            store.replace(name, b"2", "1")
    assert store.read("") is None
    assert store.walk("file") == {"": 1}


def _works(store: TimeLimited) -> bool:
    try:
        store.read("a")
    except BucketError:
        return False
    return True
