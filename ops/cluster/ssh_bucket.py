"""The bucket in a folder of another machine: `jobs.folder_bucket` runs there, over channels of SSH.

SFTP can neither compare and replace atomically nor fsync a directory. So the host's Python runs this module and those that it
imports, from sources that fab sends: the host need not have them, and they are always of the operator's version.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from jobs import background, bucket, folder_bucket
from jobs.bucket import PIECE, BucketError, Conflict, Item, Progress, file_errors, no_progress, pieces, replacing, time_of

if TYPE_CHECKING:
    from ops.cluster.bucket import SshChannel

T = TypeVar("T")

_PYTHON = "python3"
_WALK_SECONDS = 600.0  # the time limit of a call that reads or removes a whole folder
_MIN_BYTES_PER_SECOND = 1_000_000  # the slowest rate of a host's disk
# Loads the modules from the first line of stdin, then serves the bucket.
_BOOT = """
import json, sys, types
sources = json.loads(sys.stdin.buffer.readline())
for name, source in sources:
    module = types.ModuleType(name)
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["ops.cluster.ssh_bucket"].serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
"""


def command(root: str) -> str:
    """Return the command line that serves a folder after it has read `sources`."""
    return shlex.join([_PYTHON, "-I", "-c", _BOOT, root])


def sources() -> bytes:
    """Return the source of the modules that the command loads first, in the order of their imports."""
    import inspect

    modules = (background, bucket, folder_bucket, sys.modules[__name__])
    return json.dumps([("jobs", ""), *((each.__name__, inspect.getsource(each)) for each in modules)]).encode() + b"\n"


class SshBucket:
    """A bucket whose calls go through channels, which are reused; one is opened if none is idle.

    A call is a line of JSON, [method, arguments, size], followed by `size` bytes of content. An answer is a line of JSON and
    the content whose sizes that line gives. If the channel of a call breaks, the call is repeated once on a new one: the bucket
    recognizes a write that had taken effect.
    """

    def __init__(self, open_channel: Callable[[], SshChannel], seconds: float = 30.0) -> None:
        """Use `open_channel`, which runs `command` on a host, and a time limit for each call."""
        self._open_channel, self._seconds = open_channel, seconds
        self._idle: list[SshChannel] = []

    def read(self, name: str) -> Item | None:
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        def read_result(items: dict[str, tuple[str, int]], reader: _Reader) -> dict[str, Item]:
            return {name: Item(reader.whole(size), version) for name, (version, size) in items.items()}

        return self._call(read_result, "read_all", list(names))

    def scan(self, pattern: str) -> dict[str, bytes]:
        def read_result(sizes: dict[str, int], reader: _Reader) -> dict[str, bytes]:
            return {name: reader.whole(size) for name, size in sizes.items()}

        return self._call(read_result, "scan", pattern)

    def create(self, name: str, content: bytes) -> str:
        return str(self._call(_unchanged, "create", name, content=content))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return str(self._call(_unchanged, "replace", name, version, content=content))

    def read_part(self, name: str, start: int, end: int) -> bytes:
        return self._call(lambda size, reader: reader.whole(size), "read_part", name, start, end)

    def upload(self, name: str, content: bytes | Path, progress: Progress = no_progress) -> None:
        self._call(_unchanged, "upload", name, time_of(content), content=content, report=_report_once(progress))

    def download(self, name: str, target: Path, progress: Progress = no_progress) -> bool:
        report = _report_once(progress)

        def read_result(size: int | None, reader: _Reader) -> bool:
            if size is None:
                return False
            with file_errors(target), replacing(target) as copy:
                for piece in reader.pieces(size):
                    copy.write(piece)
                    report(copy.tell())
            return True

        return self._call(read_result, "download", name)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._call(_unchanged, "sizes", folder)

    def walk(self, folder: str) -> dict[str, int]:
        return self._call(_unchanged, "walk", folder, seconds=_WALK_SECONDS)

    def times(self, folder: str) -> dict[str, int]:
        return self._call(_unchanged, "times", folder, seconds=_WALK_SECONDS)

    def walk_following_links(self, folder: str) -> tuple[dict[str, int], list[str]]:
        sizes, skipped = self._call(_unchanged, "walk_following_links", folder, seconds=_WALK_SECONDS)
        return sizes, skipped

    def delete(self, name: str) -> None:
        self._call(_unchanged, "delete", name)

    def remove(self, folder: str, last: str = "") -> None:
        self._call(_unchanged, "remove", folder, last, seconds=_WALK_SECONDS)

    def _call(
        self,
        read_result: Callable[[Any, _Reader], T],
        method: str,
        *arguments: object,
        content: bytes | Path = b"",
        report: Callable[[int], None] = no_progress,
        seconds: float | None = None,
    ) -> T:
        """Call a method on the host.

        Args:
            read_result: converts the answer's result, with the content that it reads after it, to the return value.
            content: the bytes or file to send with the call.
            report: is called with the number of bytes that the call has sent so far.
            seconds: the time limit of the answer, by default the bucket's.
        """
        with file_errors(content):
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
        request = json.dumps([method, arguments, size]).encode() + b"\n"
        limit = (seconds or self._seconds) + size / _MIN_BYTES_PER_SECOND
        for is_retry in (False, True):
            channel: SshChannel | None = None
            if not is_retry:  # an idle channel may be of a broken connection
                with suppress(IndexError):
                    channel = self._idle.pop()
            try:
                if channel is None:
                    channel = self._open_channel()
                    channel.send(sources())
                channel.send(request)
                _send(channel, content, size, report)
                answer = json.loads(channel.read_line(limit))
                result = read_result(answer["result"], _Reader(channel, self._seconds)) if "result" in answer else None
            except TimeoutError:
                _close(channel)
                raise BucketError(f"the bucket does not answer within {limit:g} s") from None
            except BucketError:
                _close(channel)  # in the middle of an answer, or of a call
                raise
            except (OSError, EOFError, ValueError) as error:
                _close(channel)
                with suppress(IndexError):
                    while True:
                        _close(self._idle.pop())
                if is_retry or channel is None:
                    reason = str(error) or type(error).__name__
                    raise BucketError(f"the connection to the bucket broke off: {reason}") from error
            except BaseException:
                _close(channel)  # the next call must not read the answer to an interrupted one
                raise
            else:
                self._idle.append(channel)
                break
        if "conflict" in answer:
            raise Conflict(answer["conflict"])
        if "error" in answer:
            raise BucketError(answer["error"])
        return result  # type: ignore[return-value]  # an answer without a result was an error


class _Reader:
    """Reads the content that follows an answer."""

    def __init__(self, channel: SshChannel, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            try:
                piece = self._channel.read(min(size, PIECE), self._seconds)
            except TimeoutError:
                raise BucketError(f"the bucket does not answer within {self._seconds:g} s") from None
            except OSError as error:
                raise EOFError(str(error)) from error  # an OSError would be read as one of the file being written
            size -= len(piece)
            yield piece

    def whole(self, size: int) -> bytes:
        return b"".join(self.pieces(size))


def _unchanged(result: Any, _: _Reader) -> Any:
    return result


def _report_once(progress: Progress) -> Callable[[int], None]:
    """Return a function of the bytes sent so far, which reports each byte once although a call may be repeated."""
    reported = 0

    def report(done: int) -> None:
        nonlocal reported
        progress(max(done - reported, 0))
        reported = max(done, reported)

    return report


def _send(channel: SshChannel, content: bytes | Path, size: int, report: Callable[[int], None]) -> None:
    """Send exactly `size` bytes of content."""
    sent = 0
    for whole in pieces(content):
        piece = whole[: size - sent]
        channel.send(piece)
        sent += len(piece)
        report(sent)
    if sent < size:
        raise BucketError(f"{content!s} became shorter while it was read")


def _close(*channels: SshChannel | None) -> None:
    for channel in channels:
        if channel is not None:
            channel.close()


def serve(root: str, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until there are no more."""
    os.umask(0o002)  # other members of the bucket's group may write too
    bucket_here = folder_bucket.FolderBucket(Path(root))
    for line in requests:
        method, arguments, size = json.loads(line)
        sent = _read_pieces(requests, size)
        content: Iterable[bytes] = ()
        try:
            result, content = _answer(bucket_here, method, arguments, sent)
            answer = {"result": result}
        except Conflict as conflict:
            answer = {"conflict": conflict.name}
        except BucketError as error:
            answer = {"error": str(error.strerror or error)}
        for _ in sent:
            """Discard what the call did not read."""
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.writelines(content)
        answers.flush()


def _read_pieces(requests: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = requests.read(min(size, PIECE))
        if not piece:
            raise EOFError("the caller is gone")  # so an incomplete object is not stored
        size -= len(piece)
        yield piece


def _answer(
    local_bucket: folder_bucket.FolderBucket, method: str, arguments: list[Any], sent: Iterator[bytes]
) -> tuple[Any, Iterable[bytes]]:
    """Return a call's result, and the content that follows it."""
    if method == "upload":
        name, modified = arguments
        local_bucket.write(name, sent, modified)
        return None, ()
    if method in ("create", "replace"):
        name, *version = arguments
        return getattr(local_bucket, method)(name, b"".join(sent), *version), ()
    if method == "read_all":
        items = local_bucket.read_all(*arguments)
        result = {name: (item.version, len(item.content)) for name, item in items.items()}
        return result, [item.content for item in items.values()]
    if method == "scan":
        contents = local_bucket.scan(*arguments)
        return {name: len(content) for name, content in contents.items()}, contents.values()
    if method == "read_part":
        content = local_bucket.read_part(*arguments)
        return len(content), [content]
    if method == "download":
        file = local_bucket.open(*arguments)
        size = os.fstat(file.fileno()).st_size if file else None
        return size, _read_pieces(file, size) if file and size else ()
    return getattr(local_bucket, method)(*arguments), ()
