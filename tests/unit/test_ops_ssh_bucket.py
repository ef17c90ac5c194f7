"""The store on another machine: its own source is sent there, and a subprocess is the connection."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest
from replicahosts import PATIENCE

from jobs.bucket import BucketError, Conflict
from ops.cluster import ssh_bucket
from ops.cluster.ssh_bucket import SshBucket


class Pipe:
    """A channel to a process of this machine, which breaks as it is told."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            shlex.split(ssh_bucket.command(str(root))), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0
        )
        self.breaks = ""
        self.closed = False

    def send(self, data: bytes) -> None:
        if self.breaks == "before":
            raise EOFError
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def line(self, seconds: float) -> bytes:
        line = self._output(seconds).readline()
        if self.breaks == "after":
            raise ConnectionResetError("reset by peer")
        return line[:9] if self.breaks == "half" else line

    def read(self, size: int, seconds: float) -> bytes:
        data = self._output(seconds).read(size)
        if self.breaks == "in the middle":
            raise EOFError
        return data

    def _output(self, seconds: float) -> IO[bytes]:
        assert self.process.stdout is not None
        if self.breaks == "silent" or not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        if self.breaks == "interrupted":
            raise KeyboardInterrupt
        return self.process.stdout

    def close(self) -> None:
        self.closed = True
        self.process.kill()
        self.process.communicate()


class Far:
    """Opens channels, and remembers them."""

    def __init__(self, root: Path) -> None:
        self.root, self.pipes = root, list[Pipe]()
        self.opens: Callable[[Path], Pipe] = Pipe

    def __call__(self) -> Pipe:
        self.pipes.append(self.opens(self.root))
        return self.pipes[-1]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    found = Far(tmp_path)
    yield found
    for pipe in found.pipes:
        pipe.close()


@pytest.fixture
def store(far: Far) -> SshBucket:
    return SshBucket(far, PATIENCE)


def test_every_method_over_one_channel(store: SshBucket, far: Far) -> None:
    content = bytes(range(256)) + b"\n\xff"
    assert store.read("jobs/a/job.json") is None
    version = store.create("jobs/a/job.json", content)
    assert store.read("jobs/a/job.json") == (content, version)
    second = store.replace("jobs/a/job.json", b"two\n", version)
    assert store.read_all(iter(["jobs/a/job.json", "none"])) == {"jobs/a/job.json": (b"two\n", second)}
    assert store.scan("jobs/*/job.json") == {"jobs/a/job.json": b"two\n"}
    assert (far.root / "jobs/a/job.json").read_bytes() == b"two\n"
    assert (far.root / "jobs/a").stat().st_mode & 0o777 == 0o775  # the bucket is the group's
    assert len(far.pipes) == 1


def test_large_files_are_counted_and_a_channel_that_breaks_in_the_middle_is_opened_again(
    store: SshBucket, far: Far, tmp_path: Path
) -> None:
    source, target, sizes = tmp_path / "source", tmp_path / "target", list[int]()
    source.write_bytes(os.urandom(3_000_000))
    store.upload("a/b", source, sizes.append)
    assert sum(sizes) == 3_000_000
    far.pipes[0].breaks = "in the middle"
    assert store.download("a/b", target)
    assert target.read_bytes() == source.read_bytes()
    assert len(far.pipes) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "source", "target"]


def test_a_source_that_becomes_shorter_is_no_object(
    store: SshBucket, far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    monkeypatch.setattr(ssh_bucket, "pieces", lambda _: [b"123"])
    with pytest.raises(BucketError, match="became shorter while it was read"):
        store.upload("a/b", tmp_path / "source")
    assert far.pipes[0].closed
    assert store.walk("a") == {}


def test_threads_have_channels_of_their_own(store: SshBucket, far: Far) -> None:
    barrier = threading.Barrier(3)

    def opened(root: Path) -> Pipe:
        barrier.wait(PATIENCE)
        return Pipe(root)

    far.opens = opened
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(store.create, "abc", [b"1", b"2", b"3"]))
    assert store.scan("*") == {"a": b"1", "b": b"2", "c": b"3"}
    assert len(far.pipes) == 3


def test_a_conflict_is_one_here(store: SshBucket, far: Far) -> None:
    first = store.create("a", b"one")
    with pytest.raises(Conflict) as caught:
        store.create("a", b"two")
    assert caught.value.name == "a"
    store.replace("a", b"two", first)
    with pytest.raises(Conflict):
        store.replace("a", b"three", first)
    assert store.scan("*") == {"a": b"two"}
    assert len(far.pipes) == 1


def test_an_error_there_is_one_here(far: Far) -> None:
    far.root /= "none"
    with pytest.raises(BucketError, match="none is not there"):
        SshBucket(far).read("a")


@pytest.mark.parametrize("breaks", ["before", "after", "half"])
def test_a_channel_that_breaks_is_opened_again_and_a_write_is_made_once(store: SshBucket, far: Far, breaks: str) -> None:
    first = store.create("a", b"one")
    far.pipes[-1].breaks = breaks
    second = store.replace("a", b"two", first)
    assert store.read("a") == (b"two", second)
    assert len(far.pipes) == 2
    assert far.pipes[0].closed
    far.pipes[-1].breaks = breaks
    store.create("b", b"one")
    assert store.scan("*") == {"a": b"two", "b": b"one"}


def test_a_process_that_was_killed_there(store: SshBucket, far: Far) -> None:
    store.create("a", b"one")
    far.pipes[0].process.kill()
    far.pipes[0].process.wait(PATIENCE)
    assert store.scan("*") == {"a": b"one"}


def test_a_channel_that_breaks_at_once_is_not_opened_for_ever(store: SshBucket, far: Far) -> None:
    def broken(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "before"
        return pipe

    far.opens = broken
    with pytest.raises(BucketError, match="the connection to the bucket broke off: EOFError"):
        store.read("a")
    assert len(far.pipes) == 2
    far.opens = Pipe
    assert store.read("a") is None


def test_a_first_channel_that_breaks_is_opened_again(store: SshBucket, far: Far) -> None:
    def opened(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "after" if not far.pipes else ""
        return pipe

    far.opens = opened
    version = store.create("a", b"one")
    assert store.read("a") == (b"one", version)
    assert len(far.pipes) == 2


def test_an_answer_that_does_not_come_is_waited_for_so_long(far: Far) -> None:
    store = SshBucket(far, PATIENCE)
    store.create("a", b"one")
    far.pipes[0].breaks = "silent"
    began = time.monotonic()
    with pytest.raises(BucketError, match=f"the bucket does not answer within {PATIENCE:g} s"):
        store.read("a")
    assert time.monotonic() - began < PATIENCE
    assert far.pipes[0].closed
    assert store.read("a") is not None
    assert len(far.pipes) == 2


def test_the_answer_to_an_interrupted_call_is_not_taken_for_that_to_the_next(far: Far, store: SshBucket) -> None:
    version = store.create("a", b"1")
    far.pipes[0].breaks = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        store.replace("a", b"2", version)
    there = store.read("b/none")
    assert there is None
    found = store.read("a")
    assert found is not None
    assert found.content == b"2"
    assert far.pipes[0].closed
