"""Check the store on another machine: its own source is sent there, and a subprocess is the connection."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import threading
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
    """A channel to a process of this machine, which breaks as `breaks` says."""

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

    def read_line(self, seconds: float) -> bytes:
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


class RemoteHost:
    """Open channels, and record them."""

    def __init__(self, root: Path) -> None:
        self.root, self.pipes = root, list[Pipe]()
        self.open_pipe: Callable[[Path], Pipe] = Pipe

    def __call__(self) -> Pipe:
        self.pipes.append(self.open_pipe(self.root))
        return self.pipes[-1]


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteHost]:
    remote_host = RemoteHost(tmp_path)
    yield remote_host
    for pipe in remote_host.pipes:
        pipe.close()


@pytest.fixture
def store(remote: RemoteHost) -> SshBucket:
    return SshBucket(remote, PATIENCE)


def test_every_method_uses_one_channel(store: SshBucket, remote: RemoteHost) -> None:
    content = bytes(range(256)) + b"\n\xff"
    assert store.read("jobs/a/job.json") is None
    version = store.create("jobs/a/job.json", content)
    assert store.read("jobs/a/job.json") == (content, version)
    second = store.replace("jobs/a/job.json", b"two\n", version)
    assert store.read_all(iter(["jobs/a/job.json", "none"])) == {"jobs/a/job.json": (b"two\n", second)}
    assert store.scan("jobs/*/job.json") == {"jobs/a/job.json": b"two\n"}
    assert (remote.root / "jobs/a/job.json").read_bytes() == b"two\n"
    assert (remote.root / "jobs/a").stat().st_mode & 0o777 == 0o775  # the group may write to the bucket
    assert len(remote.pipes) == 1


def test_a_large_download_continues_on_a_new_channel(store: SshBucket, remote: RemoteHost, tmp_path: Path) -> None:
    source, target, sizes = tmp_path / "source", tmp_path / "target", list[int]()
    source.write_bytes(os.urandom(3_000_000))
    store.upload("a/b", source, sizes.append)
    assert sum(sizes) == 3_000_000
    remote.pipes[0].breaks = "in the middle"
    sizes.clear()
    assert store.download("a/b", target, sizes.append)
    assert sum(sizes) == 3_000_000
    assert target.read_bytes() == source.read_bytes()
    assert len(remote.pipes) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "source", "target"]


def test_a_repeated_upload_counts_each_byte_once(store: SshBucket, remote: RemoteHost) -> None:
    store.create("a", b"one")
    remote.pipes[0].breaks = "after"
    sizes = list[int]()
    store.upload("b", b"x" * 3_000_000, sizes.append)
    assert (sum(sizes), len(remote.pipes)) == (3_000_000, 2)


def test_a_source_that_becomes_shorter_is_not_stored(
    store: SshBucket, remote: RemoteHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    monkeypatch.setattr(ssh_bucket, "pieces", lambda _: [b"123"])
    with pytest.raises(BucketError, match="became shorter while it was read"):
        store.upload("a/b", tmp_path / "source")
    assert remote.pipes[0].closed
    assert store.walk("a") == {}


def test_each_thread_has_its_own_channel(store: SshBucket, remote: RemoteHost) -> None:
    barrier = threading.Barrier(3)

    def open_pipe(root: Path) -> Pipe:
        barrier.wait(PATIENCE)
        return Pipe(root)

    remote.open_pipe = open_pipe
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(store.create, "abc", [b"1", b"2", b"3"]))
    assert store.scan("*") == {"a": b"1", "b": b"2", "c": b"3"}
    assert len(remote.pipes) == 3


def test_a_remote_conflict_is_raised(store: SshBucket, remote: RemoteHost) -> None:
    first = store.create("a", b"one")
    with pytest.raises(Conflict) as caught:
        store.create("a", b"two")
    assert caught.value.name == "a"
    store.replace("a", b"two", first)
    with pytest.raises(Conflict):
        store.replace("a", b"three", first)
    assert store.scan("*") == {"a": b"two"}
    assert len(remote.pipes) == 1


def test_a_remote_error_is_raised(remote: RemoteHost) -> None:
    remote.root /= "none"
    with pytest.raises(BucketError, match="none is not there"):
        SshBucket(remote).read("a")


@pytest.mark.parametrize("breaks", ["before", "after", "half"])
def test_a_broken_channel_is_opened_again_and_a_write_happens_once(store: SshBucket, remote: RemoteHost, breaks: str) -> None:
    first = store.create("a", b"one")
    remote.pipes[-1].breaks = breaks
    second = store.replace("a", b"two", first)
    assert store.read("a") == (b"two", second)
    assert len(remote.pipes) == 2
    assert remote.pipes[0].closed
    remote.pipes[-1].breaks = breaks
    store.create("b", b"one")
    assert store.scan("*") == {"a": b"two", "b": b"one"}


def test_a_killed_remote_process_is_started_again(store: SshBucket, remote: RemoteHost) -> None:
    store.create("a", b"one")
    remote.pipes[0].process.kill()
    remote.pipes[0].process.wait(PATIENCE)
    assert store.scan("*") == {"a": b"one"}


def test_a_call_is_repeated_on_a_channel_of_its_own(store: SshBucket, remote: RemoteHost) -> None:
    """The channel of another thread, given back meanwhile, is of the same connection, which broke off."""

    class BreaksForAll(Pipe):
        def close(self) -> None:
            store._idle.append(others)
            super().close()

    store.create("a", b"one")
    others, broken = Pipe(remote.root), BreaksForAll(remote.root)
    others.breaks = broken.breaks = "before"
    remote.pipes += [others, broken]
    store._idle[:] = [broken]
    assert store.read("a") is not None


def test_a_channel_that_keeps_breaking_is_an_error(store: SshBucket, remote: RemoteHost) -> None:
    def open_broken_pipe(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "before"
        return pipe

    remote.open_pipe = open_broken_pipe
    with pytest.raises(BucketError, match="the connection to the bucket broke off: EOFError"):
        store.read("a")
    assert len(remote.pipes) == 2
    remote.open_pipe = Pipe
    assert store.read("a") is None


def test_a_first_channel_that_breaks_is_opened_again(store: SshBucket, remote: RemoteHost) -> None:
    def open_pipe(root: Path) -> Pipe:
        pipe = Pipe(root)
        pipe.breaks = "after" if not remote.pipes else ""
        return pipe

    remote.open_pipe = open_pipe
    version = store.create("a", b"one")
    assert store.read("a") == (b"one", version)
    assert len(remote.pipes) == 2


def test_a_missing_answer_times_out(remote: RemoteHost) -> None:
    store = SshBucket(remote, PATIENCE)
    store.create("a", b"one")
    remote.pipes[0].breaks = "silent"
    with pytest.raises(BucketError, match=f"the bucket does not answer within {PATIENCE:g} s"):
        store.read("a")
    assert remote.pipes[0].closed
    assert store.read("a") is not None
    assert len(remote.pipes) == 2


def test_an_answer_to_an_interrupted_call_is_discarded(remote: RemoteHost, store: SshBucket) -> None:
    version = store.create("a", b"1")
    remote.pipes[0].breaks = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        store.replace("a", b"2", version)
    missing = store.read("b/none")
    assert missing is None
    item = store.read("a")
    assert item is not None
    assert item.content == b"2"
    assert remote.pipes[0].closed


class Recorder:
    """A channel that records what is sent, and answers each call with the same line."""

    def __init__(self, answer: bytes | Exception = b'{"result": null}', content: bytes | Exception = b"") -> None:
        self.answer, self.content = answer, content
        self.sent, self.limits, self.sizes = list[bytes](), list[float](), list[int]()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def read_line(self, seconds: float) -> bytes:
        self.limits.append(seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def read(self, size: int, seconds: float) -> bytes:
        self.limits.append(seconds)
        self.sizes.append(size)
        if isinstance(self.content, Exception):
            raise self.content
        return self.content[:size]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        (lambda store: store.sizes("a"), 30.0),
        (lambda store: store.delete("a"), 30.0),
        (lambda store: store.walk("a"), 600.0),
        (lambda store: store.remove("a"), 600.0),
        (lambda store: store.upload("a", b"x" * 3_000_000), 33.0),
    ],
)
def test_the_time_limit_follows_the_work(call: Callable[[SshBucket], object], limit: float) -> None:
    channel = Recorder()
    call(SshBucket(lambda: channel))
    assert channel.limits == [limit]
    with pytest.raises(BucketError, match=f"^the bucket does not answer within {limit:g} s$"):
        call(SshBucket(lambda: Recorder(TimeoutError())))


def test_a_source_that_becomes_longer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    monkeypatch.setattr(ssh_bucket, "pieces", lambda _: [b"123", b"4567", b"8"])
    channel, progress = Recorder(), list[int]()
    SshBucket(lambda: channel).upload("a/b", tmp_path / "source", progress.append)
    request = f'["upload", ["a/b", {(tmp_path / "source").stat().st_mtime_ns}], 5]\n'.encode()
    assert channel.sent == [ssh_bucket.sources(), request, b"123", b"45", b""]
    assert progress == [3, 2, 0]


def test_content_is_read_in_pieces() -> None:
    size = 2 * ssh_bucket.PIECE + 5
    channel = Recorder(b'{"result": %d}' % size, b"x" * ssh_bucket.PIECE)
    assert SshBucket(lambda: channel, 7).read_part("a", 0, size) == b"x" * size
    assert (channel.sizes, channel.limits) == ([ssh_bucket.PIECE, ssh_bucket.PIECE, 5], [7] * 4)
    channel.content = TimeoutError()
    with pytest.raises(BucketError, match=r"^the bucket does not answer within 7 s$"):
        SshBucket(lambda: channel, 7).read_part("a", 0, size)
    channel.content = OSError("reset")
    with pytest.raises(BucketError, match=r"^the connection to the bucket broke off: reset$"):
        SshBucket(lambda: channel, 7).read_part("a", 0, size)
