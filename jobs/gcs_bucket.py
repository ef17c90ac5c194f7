"""The bucket in Google Cloud Storage, which checks preconditions itself. A version is an object's generation."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from google.api_core import exceptions
from google.api_core.exceptions import NotFound
from google.auth import default
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import Request
from google.cloud.storage import Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from jobs import paths
from jobs.background import Background
from jobs.bucket import BucketError, Conflict, Item, Progress, file_errors, no_progress, replacing, time_of

_T = TypeVar("_T")

_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[^/*?{}\[\]\x00-\x1f]+)*)/?")
_ABSENT = 0  # the generation of an object that is not there
_RECORD, _MODIFIED = "record", "modified"  # the keys of an object's metadata
_RECORD_LIMIT = 8000  # Google takes 8 KiB of custom metadata an object, keys and values together
_WHOLE_FOLDER = 30  # factor on the time limit of a call that lists a whole folder
_AT_ONCE = 8  # the HTTP library `requests` pools ten connections
_SMALL = 2**20
_PART = 2**23  # a larger file is sent in parts of this size
_SLOWEST = 1_000_000  # bytes a second; a slower transfer counts as stuck

# Answers that are no JSON, or lack what Google's have, are failures too: a proxy's page, for one.
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    exceptions.GoogleAPIError,
    GoogleAuthError,
    DataCorruption,
    InvalidResponse,
)


class _Call:
    """One call on the bucket: its time limit, and Google's objects for it."""

    def __init__(self, client: Any, bucket: Any, deadline: float, options: dict[str, Any]) -> None:
        self.client, self.bucket, self.deadline, self.options = client, bucket, deadline, options

    def list(self, prefix: str, fields: str, **more: Any) -> Iterator[Any]:
        """Yield the objects whose names begin with a prefix, with these fields."""
        fields = f"items({fields}),nextPageToken"
        return iter(self.client.list_blobs(self.bucket, prefix=prefix, fields=fields, **more, **self.options))


class GcsBucket:
    """A bucket through Google's own client, which repeats requests until a time limit.

    Small objects are also stored in their metadata, which a listing returns: a scan of all jobs needs one request for every
    thousand of them.
    """

    def __init__(self, url: str, seconds: float = 20.0) -> None:
        parts = _URL.fullmatch(url)
        if parts is None:
            raise BucketError(f"{url} is no bucket: gs://name or gs://name/folder, without * ? [ ] {{ }}")
        self._url = url
        self._bucket = parts[1]
        self._prefix = f"{parts[2][1:]}/" if parts[2] else ""
        self._seconds = seconds
        self._wait = seconds / 4, seconds / 3  # for a connection, and for each piece of an answer
        self._client_lock = threading.Lock()
        self._credentials: Any = None
        self._client: Any = None

    def read(self, name: str) -> Item | None:
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        name_list = list(names)

        def work(call: _Call) -> dict[str, Item]:
            items = self._each(call, self._get, name_list)
            if None in items.values():
                self._check_there(call)
            return {name: item for name, item in items.items() if item is not None}

        return self._run(work)

    def scan(self, pattern: str) -> dict[str, bytes]:
        glob = self._prefix + pattern
        fits = re.compile("[^/]*".join(map(re.escape, glob.split("*")))).fullmatch  # for a server without `matchGlob`

        def work(call: _Call) -> dict[str, bytes]:
            blobs = call.list(glob.partition("*")[0], f"name,md5Hash,metadata/{_RECORD}", match_glob=glob)
            contents = {blob.name.removeprefix(self._prefix): _content_in_metadata(blob) for blob in blobs if fits(blob.name)}
            missing = self._each(call, self._get, [name for name, content in contents.items() if content is None])
            complete = contents | {name: item.content for name, item in missing.items() if item is not None}
            return {name: content for name, content in sorted(complete.items()) if content is not None}

        return self._run(work)

    def create(self, name: str, content: bytes) -> str:
        return self._run(lambda call: self._write(call, name, content, _ABSENT))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self._run(lambda call: self._write(call, name, content, int(version)))

    def read_part(self, name: str, start: int, end: int) -> bytes:
        def work(call: _Call) -> bytes:
            try:
                content: bytes = self._blob(call, name).download_as_bytes(start=start, end=end - 1, **call.options)
            except NotFound:
                self._check_there(call)
            except exceptions.RequestRangeNotSatisfiable:
                pass
            else:
                return content
            return b""

        return self._run(work) if end > start else b""

    def upload(self, name: str, content: bytes | Path, progress: Progress = no_progress) -> None:
        modified = time_of(content)
        with file_errors(content), io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)

            def work(call: _Call) -> None:
                self._check_job(call, name)
                self._send(call, name, source, size, None, progress, modified)

            self._run(work, self._seconds + size / _SLOWEST)

    def download(self, name: str, target: Path, progress: Progress = no_progress) -> bool:
        def find(call: _Call) -> int | None:
            if (blob := call.bucket.get_blob(self._prefix + name, **call.options)) is None:
                self._check_there(call)
                return None
            return int(blob.size)

        def fetch(call: _Call) -> None:
            self._blob(call, name).download_to_file(_Timed(file, call.deadline, progress, target), **call.options)

        if (size := self._run(find)) is None:
            return False
        with file_errors(target), replacing(target) as file:
            self._run(fetch, self._seconds + size / _SLOWEST)
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{self._prefix}{folder}/"
        return self._run(lambda call: self._values(call, prefix, "size", _size, delimiter="/"))

    def walk(self, folder: str) -> dict[str, int]:
        return self._walk(folder, "size", _size)

    def times(self, folder: str) -> dict[str, int]:
        times = self._walk(folder, f"metadata/{_MODIFIED}", lambda blob: (blob.metadata or {}).get(_MODIFIED))
        return {path: int(text) for path, text in times.items() if text and text.isdecimal()}

    def _walk(self, folder: str, field: str, value: Callable[[Any], _T]) -> dict[str, _T]:
        """Return the values of all objects below a folder by relative path, '' for the object `folder`."""

        def work(call: _Call) -> dict[str, _T]:
            values = self._values(call, f"{self._prefix}{folder}/" if folder else self._prefix, field, value)
            blob = call.bucket.get_blob(self._prefix + folder, **call.options) if folder and not values else None
            return {"": value(blob)} if blob else values

        return self._run(work, _WHOLE_FOLDER * self._seconds)

    def walk_following_links(self, folder: str) -> tuple[dict[str, int], list[str]]:
        return self.walk(folder), []  # there are no links and pipes

    def delete(self, name: str) -> None:
        def work(call: _Call) -> None:
            if not self._delete(call, name):
                self._check_there(call)

        self._run(work)

    def remove(self, folder: str, last: str = "") -> None:
        def work(call: _Call) -> None:
            names = [blob.name.removeprefix(self._prefix) for blob in call.list(f"{self._prefix}{folder}/", "name")]
            self._each(call, self._delete, [name for name in (*names, folder) if name != last])
            if last:
                self._delete(call, last)

        self._run(work, _WHOLE_FOLDER * self._seconds)

    def _blob(self, call: _Call, name: str) -> Any:
        return call.bucket.blob(self._prefix + name)

    def _check_there(self, call: _Call) -> None:
        """Raise an error if the bucket is gone: an object of a missing bucket is a 404, too."""
        next(call.list(self._prefix, "name", max_results=1), None)

    def _check_job(self, call: _Call, name: str) -> None:
        """Raise Conflict for an object of a job without a record: a later job of the same id would find it."""
        record = paths.job(paths.job_of(name)) if name.startswith(f"{paths.JOBS}/") else name
        if record != name and not self._blob(call, record).exists(**call.options):
            self._check_there(call)
            raise Conflict(name)

    def _get(self, call: _Call, name: str) -> Item | None:
        blob = self._blob(call, name)
        try:
            content = blob.download_as_bytes(**call.options)
        except NotFound:
            return None
        return Item(content, str(blob.generation))

    def _delete(self, call: _Call, name: str) -> bool:
        """Delete an object; False if there is none."""
        try:
            self._blob(call, name).delete(**call.options)
        except NotFound:
            return False
        return True

    def _values(self, call: _Call, prefix: str, field: str, value: Callable[[Any], _T], **more: Any) -> dict[str, _T]:
        """Return a value of each object below a prefix, by the rest of its name; TensorFlow marks a folder by a final /."""
        values = {blob.name.removeprefix(prefix): value(blob) for blob in call.list(prefix, f"name,{field}", **more)}
        return {name: each for name, each in values.items() if name and not name.endswith("/")}

    def _each(self, call: _Call, work: Callable[[_Call, str], _T], names: list[str]) -> dict[str, _T]:
        """Call `work` for each name, several at once; TimeoutError if there is no time for all of them."""

        def do(name: str) -> _T:
            if time.monotonic() > call.deadline:
                raise TimeoutError
            return work(call, name)

        def run(part: list[str]) -> list[tuple[str, _T]]:
            return [(name, do(name)) for name in part]

        parts = [names[start::_AT_ONCE] for start in range(min(_AT_ONCE, len(names)))]
        threads = [Background(lambda part=part: run(part)) for part in parts]  # type: ignore[misc]
        return dict(pair for thread in threads for pair in thread.join(call.deadline - time.monotonic()))

    def _write(self, call: _Call, name: str, content: bytes, generation: int) -> str:
        try:
            return self._send(call, name, io.BytesIO(content), len(content), generation)
        except (exceptions.PreconditionFailed, exceptions.Conflict):
            current = self._get(call, name)
            if current is None or current.content != content:
                raise Conflict(name) from None
            return current.version  # an earlier try has written it, and its answer was lost

    def _send(
        self,
        call: _Call,
        name: str,
        source: BinaryIO,
        size: int,
        generation: int | None,
        progress: Progress = no_progress,
        modified: int | None = None,
    ) -> str:
        """Write an object and return its generation."""
        blob = self._blob(call, name)
        blob.cache_control, blob.chunk_size = "no-store", _PART
        metadata = {} if modified is None else {_MODIFIED: str(modified)}
        if size < _SMALL:
            record = base64.b64encode(zlib.compress(source.read())).decode()
            if len(record) <= _RECORD_LIMIT:
                metadata[_RECORD] = record
            source.seek(0)
        if metadata:
            blob.metadata = metadata
        timed = _Timed(source, call.deadline, progress)
        options = {"content_type": "application/octet-stream", "checksum": "md5", "if_generation_match": generation}
        blob.upload_from_file(timed, size=size, **options, **call.options)
        return str(blob.generation)

    def _run(self, work: Callable[[_Call], _T], seconds: float | None = None) -> _T:
        """Return the result of work within this time limit; after it, no further request is sent."""
        limit = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + limit

        def run() -> _T:
            client = self._signed_in()
            if (left := deadline - time.monotonic()) < 0:
                raise TimeoutError
            retry = DEFAULT_RETRY.with_timeout(left).with_delay(initial=self._seconds / 50, maximum=self._seconds / 4)
            return work(_Call(client, client.bucket(self._bucket), deadline, {"timeout": self._wait, "retry": retry}))

        try:
            return Background(run).join(limit)
        except (TimeoutError, exceptions.RetryError) as error:
            cause = getattr(error, "cause", None)  # of the last try
            raise BucketError(f"{self._url} did not answer within {limit:g} s{f': {_line(cause)}' if cause else ''}") from error
        except NotFound as error:
            raise BucketError(f"{self._url}: there is no such bucket, or the object was deleted meanwhile") from error
        except BucketError:
            raise
        except _FAILURES as error:
            raise BucketError(f"{self._url}: {_line(error)}") from error

    def _signed_in(self) -> Any:
        """Return Google's client with a valid token: to renew one later, in a request, could exceed the deadline."""
        with self._client_lock:
            if self._client is None:
                logging.getLogger("google").addHandler(logging.NullHandler())  # errors are reported once, in one line
                # Else the client asks for the bucket's location, for traces that are not collected.
                os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
                emulated = os.environ.get("STORAGE_EMULATOR_HOST")
                self._credentials = AnonymousCredentials() if emulated else default(scopes=Client.SCOPE)[0]
                self._client = Client(project=None, credentials=self._credentials)
            if not self._credentials.valid:
                self._credentials.refresh(Request())
        return self._client


def _size(blob: Any) -> int:
    return int(blob.size)


def _line(error: BaseException) -> str:
    return " ".join((str(error).strip() or type(error).__name__).splitlines())


class _Timed:
    """A file for Google's client, which aborts a transfer at the deadline."""

    def __init__(self, file: BinaryIO, deadline: float, progress: Progress, target: Path | None = None) -> None:
        self._file, self._deadline, self._progress, self._target = file, deadline, progress, target
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self._check()
        piece = self._file.read(size)
        self._progress(len(piece))
        return piece

    def write(self, piece: bytes) -> int:
        self._check()
        self._progress(len(piece))
        with file_errors(self._target):
            return self._file.write(piece)

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError


def _content_in_metadata(blob: Any) -> bytes | None:
    """Return a listed object's content if its metadata holds all of it; None if it must be fetched."""
    try:
        content = zlib.decompress(base64.b64decode(blob.metadata[_RECORD]))
        md5 = base64.b64decode(blob.md5_hash)
    except (TypeError, KeyError, ValueError, zlib.error):
        return None
    return content if hashlib.md5(content, usedforsecurity=False).digest() == md5 else None
