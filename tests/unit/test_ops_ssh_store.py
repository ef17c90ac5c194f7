"""The store on another machine: its own source is sent there, and a subprocess is the connection."""

from __future__ import annotations

import select
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replicahosts import PATIENCE

from jobs.store import Conflict, StoreError
from ops.cluster import ssh_store
from ops.cluster.ssh_store import SshStore


class Pipe:
    """A channel to a process of this machine, which breaks as it is told."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            shlex.split(ssh_store.command(str(root))), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", bufsize=0
        )
        self.breaks = ""
        self.closed = False

    def send(self, data: bytes) -> None:
        if self.breaks == "before":
            raise EOFError
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        if self.breaks == "silent" or not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        if self.breaks == "interrupted":
            raise KeyboardInterrupt
        line = self.process.stdout.readline()
        if self.breaks == "after":
            raise ConnectionResetError("reset by peer")
        return line[:9] if self.breaks == "half" else line

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
def store(far: Far) -> SshStore:
    return SshStore(far, PATIENCE)


def test_every_method_over_one_channel(store: SshStore, far: Far) -> None:
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


def test_a_conflict_is_one_here(store: SshStore, far: Far) -> None:
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
    with pytest.raises(StoreError, match="none is not there"):
        SshStore(far).read("a")


@pytest.mark.parametrize("breaks", ["before", "after", "half"])
def test_a_channel_that_breaks_is_opened_again_and_a_write_is_made_once(store: SshStore, far: Far, breaks: str) -> None:
    first = store.create("a", b"one")
    far.pipes[-1].breaks = breaks
    second = store.replace("a", b"two", first)
    assert store.read("a") == (b"two", second)
    assert len(far.pipes) == 2
    assert far.pipes[0].closed
    far.pipes[-1].breaks = breaks
    store.create("b", b"one")
    assert store.scan("*") == {"a": b"two", "b": b"one"}


def test_a_process_that_was_killed_there(store: SshStore, far: Far) -> None:
    store.create("a", b"one")
    far.pipes[0].process.kill()
    far.pipes[0].process.wait(PATIENCE)
    assert store.scan("*") == {"a": b"one"}


def test_a_channel_that_breaks_at_once_is_not_opened_for_ever(store: SshStore, far: Far) -> None:
    def broken(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "before"
        return pipe

    far.opens = broken
    with pytest.raises(StoreError, match="the connection to the bucket broke off: EOFError"):
        store.read("a")
    assert len(far.pipes) == 2
    far.opens = Pipe
    assert store.read("a") is None


def test_a_first_channel_that_breaks_is_opened_again(store: SshStore, far: Far) -> None:
    def opened(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "after" if not far.pipes else ""
        return pipe

    far.opens = opened
    version = store.create("a", b"one")
    assert store.read("a") == (b"one", version)
    assert len(far.pipes) == 2


def test_an_answer_that_does_not_come_is_waited_for_so_long(far: Far) -> None:
    store = SshStore(far, PATIENCE)
    store.create("a", b"one")
    far.pipes[0].breaks = "silent"
    began = time.monotonic()
    with pytest.raises(StoreError, match=f"the bucket does not answer within {PATIENCE:g} s"):
        store.read("a")
    assert time.monotonic() - began < PATIENCE
    assert far.pipes[0].closed
    assert store.read("a") is not None
    assert len(far.pipes) == 2


def test_the_answer_to_an_interrupted_call_is_not_taken_for_that_to_the_next(far: Far, store: SshStore) -> None:
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
