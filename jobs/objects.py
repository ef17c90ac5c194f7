"""The store in a Google Cloud Storage bucket, which checks preconditions itself.

A version is an object's generation.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
import re
import threading
import uuid
import zlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from jobs.store import Conflict, Item, StoreError

_T = TypeVar("_T")

_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[A-Za-z0-9._-]+)*)/?")
_NONE_YET = "0"  # the generation of an object that is not there
_RECORD = "record"
_RECORD_LIMIT = 8000  # Google takes 8 KiB of custom metadata an object, keys and values together
_AT_ONCE = 32
_IN_PARTS = 5 << 20  # gcsfs sends a file in parts from this size on
_PART = 4 << 20  # aiohttp counts the sending of one as waiting for its answer
_SLOWEST = 1_000_000  # bytes a second; what is slower is taken to be stuck


PLAIN = ("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
"""A variable of the environment, and its value, for whatever imports gcsfs: its other file system asks by gRPC what kind of
bucket it is, for a minute and a half where only HTTPS passes."""


def plain() -> None:
    """Set the environment variable if it is unset; call it before gcsfs is imported."""
    os.environ.setdefault(*PLAIN)


class Objects:
    """A bucket behind Google's JSON API.

    Sign-in, session, repeated requests and the server's address are gcsfs's. Its own writing knows no generation, hence
    the requests here. What is small goes into the object's custom metadata as well, which a listing brings along: so a
    scan of all jobs is one request for every thousand of them.
    """

    def __init__(self, url: str, seconds: float = 20.0) -> None:
        parts = _URL.fullmatch(url)
        if parts is None:
            raise StoreError(f"{url} is no bucket: gs://name or gs://name/folder, of letters, digits and . _ -")
        self._url = url
        self._bucket = parts[1]
        self._prefix = f"{parts[2][1:]}/" if parts[2] else ""
        self._seconds = seconds
        self._opening = threading.Lock()
        self._fs: Any = None

    def read(self, name: str) -> Item | None:
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, Item]:
        async def work() -> dict[str, Item]:
            items = await self._get_all(list(names))
            if None in items.values():
                await self._check_there()
            return {name: item for name, item in items.items() if item is not None}

        return self._run(work)

    def scan(self, pattern: str) -> dict[str, bytes]:
        async def work() -> dict[str, bytes]:
            contents = {item["name"].removeprefix(self._prefix): _kept(item) for item in await self._list(pattern)}
            missing = await self._get_all([name for name, content in contents.items() if content is None])
            whole = contents | {name: item.content for name, item in missing.items() if item is not None}
            return {name: content for name, content in sorted(whole.items()) if content is not None}

        return self._run(work)

    def create(self, name: str, content: bytes) -> str:
        return self._run(lambda: self._write(name, content, _NONE_YET))

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self._run(lambda: self._write(name, content, version))

    def upload(self, name: str, source: Path) -> None:
        async def work() -> None:
            if size < _IN_PARTS:  # gcsfs has one separator for whatever it sends, and cuts a file where that is in it
                await self._write(name, source.read_bytes(), None)
            else:
                await self._fs._put_file(str(source), self._path(name), chunksize=_PART)

        try:
            size = source.stat().st_size
        except OSError as error:
            raise StoreError(error.errno, f"{source}: {error.strerror}") from error
        self._run(work, self._seconds + size / _SLOWEST)

    def download(self, name: str, target: Path) -> bool:
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

        async def size_there() -> int | None:
            try:
                return int((await self._object(name, json_out=True, fields="size"))["size"])
            except FileNotFoundError:
                await self._check_there()
                return None

        async def fetch() -> bool:
            # One request: several at once would mix what is there before a replacement with what is there after it.
            try:
                await self._fs._get_file(self._path(name), str(part), concurrency=1)
            except FileNotFoundError:
                return False
            return True

        size = self._run(size_there)
        if size is None:
            return False
        try:
            content = self._run(fetch, self._seconds + size / _SLOWEST)
            if content:
                part.replace(target)
        except OSError as error:
            raise error if isinstance(error, StoreError) else StoreError(error.errno, f"{target}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return content

    def sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{self._prefix}{folder}/"

        async def work() -> dict[str, int]:
            sizes: dict[str, int] = {}
            page: dict[str, Any] = {"nextPageToken": None}
            while "nextPageToken" in page:
                params = {"prefix": prefix, "delimiter": "/", "fields": "items(name,size),nextPageToken"}
                page = await self._objects(**params, pageToken=page["nextPageToken"])
                sizes |= {item["name"].removeprefix(prefix): int(item["size"]) for item in page.get("items", [])}
            return {name: size for name, size in sizes.items() if name}

        return self._run(work)

    def delete(self, name: str) -> None:
        async def work() -> None:
            try:
                await self._fs._call("DELETE", "b/{}/o/{}", self._bucket, self._prefix + name)
            except FileNotFoundError:
                await self._check_there()

        self._run(work)

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{self._prefix}{name}"

    def _object(self, name: str, **parameters: object) -> Awaitable[Any]:
        return self._fs._call("GET", "b/{}/o/{}", self._bucket, self._prefix + name, **parameters)  # type: ignore[no-any-return]

    def _objects(self, **parameters: object) -> Awaitable[Any]:
        return self._fs._call("GET", "b/{}/o", self._bucket, json_out=True, **parameters)  # type: ignore[no-any-return]

    async def _check_there(self) -> None:
        """Raise an error if the bucket is gone: an object of a missing bucket is a 404, too."""
        await self._objects(prefix=self._prefix, maxResults=1, fields="kind")

    async def _get(self, name: str) -> Item | None:
        try:
            headers, content = await self._object(name, alt="media")
        except FileNotFoundError:
            return None
        return Item(content, headers["x-goog-generation"])

    async def _get_all(self, names: list[str]) -> dict[str, Item | None]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def get(name: str) -> Item | None:
            async with turns:
                return await self._get(name)

        return dict(zip(names, await asyncio.gather(*map(get, names)), strict=True))

    async def _list(self, pattern: str) -> list[dict[str, Any]]:
        """Return the bucket's objects that fit a pattern; filter here if the server does not know `matchGlob`."""
        glob = self._prefix + pattern
        fits = re.compile("[^/]*".join(map(re.escape, glob.split("*")))).fullmatch
        fields = f"items(name,md5Hash,metadata/{_RECORD}),nextPageToken"
        items, page = [], {"nextPageToken": None}
        while "nextPageToken" in page:
            token = page["nextPageToken"]
            page = await self._objects(prefix=glob.partition("*")[0], matchGlob=glob, fields=fields, pageToken=token)
            items += [item for item in page.get("items", []) if fits(item["name"])]
        return items

    async def _write(self, name: str, content: bytes, generation: str | None) -> str:
        kind, body = _multipart(self._prefix + name, content)
        url = f"{self._fs._location}/upload/storage/v1/b/{self._bucket}/o"
        params = {"uploadType": "multipart", "ifGenerationMatch": generation, "fields": "generation"}
        try:
            answer = await self._fs._call("POST", url, headers={"Content-Type": kind}, data=body, json_out=True, **params)
        except Exception as error:
            if not isinstance(error, FileExistsError) and getattr(error, "code", None) != 409:  # gcsfs's word for 412
                raise
            there = await self._get(name)
            if there is None or there.content != content:
                raise Conflict(name) from None
            return there.version  # written before, and the answer was lost
        return str(answer["generation"])

    def _run(self, work: Callable[[], Awaitable[_T]], seconds: float | None = None) -> _T:
        """Run work on fsspec's loop and return its result, within this time.

        The limit holds whatever gcsfs and google-auth wait for.
        """
        from fsspec.asyn import get_loop, sync

        limit = self._seconds if seconds is None else seconds

        async def opened() -> _T:
            await _aside(self._open)  # signing in blocks, now and again, and others share the loop
            return await work()

        try:
            result: _T = sync(get_loop(), opened, timeout=limit)
        except TimeoutError as error:
            raise StoreError(f"{self._url} did not answer within {limit:g} s") from error
        except FileNotFoundError as error:
            raise StoreError(str(error) if error.errno else f"{self._url}: there is no such bucket") from error
        except _failures() as error:
            line = (str(error).strip() or type(error).__name__).splitlines()
            raise StoreError(f"{self._url}: {' '.join(line)}") from error
        return result

    def _open(self) -> None:
        with self._opening:
            if self._fs is None:
                import aiohttp

                plain()
                from gcsfs.core import GCSFileSystem

                logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # what fails is said once, in one line
                wait = aiohttp.ClientTimeout(total=None, sock_connect=self._seconds / 4, sock_read=self._seconds / 3)
                self._fs = GCSFileSystem(requests_timeout=wait, use_listings_cache=False, skip_instance_cache=True)
        with suppress(*_failures()):  # gcsfs tries again, and says why it cannot
            self._fs.credentials.maybe_refresh()


async def _aside(work: Callable[[], None]) -> None:
    """Work in a thread that, unlike asyncio's own, keeps no process from its end."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  it is raised where it is waited for
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="sign-in", daemon=True).start()
    await asyncio.wrap_future(future)


def _failures() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError
    from gcsfs.retry import ChecksumError, HttpError, NonRetryableError
    from google.auth.exceptions import GoogleAuthError

    # Answers that are no JSON, or lack what Google's have, are failures too: a proxy's page, for one.
    return (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        HttpError,
        NonRetryableError,
        ChecksumError,
        ClientError,
        GoogleAuthError,
    )


def _multipart(name: str, content: bytes) -> tuple[str, bytes]:
    """Return the content type and the body of an upload that includes the metadata."""
    metadata: dict[str, object] = {"name": name, "cacheControl": "no-store"}
    record = base64.b64encode(zlib.compress(content)).decode()
    if len(record) <= _RECORD_LIMIT:
        metadata["metadata"] = {_RECORD: record}
    boundary = uuid.uuid4().hex
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
    middle = f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    return f"multipart/related; boundary={boundary}", (head + middle).encode() + content + f"\r\n--{boundary}--".encode()


def _kept(item: dict[str, Any]) -> bytes | None:
    """Return a listed object's content if its metadata holds all of it; None if it must be fetched."""
    try:
        content = zlib.decompress(base64.b64decode(item["metadata"][_RECORD], validate=True))
        md5 = base64.b64decode(item["md5Hash"])
    except (KeyError, ValueError, zlib.error):
        return None
    return content if hashlib.md5(content, usedforsecurity=False).digest() == md5 else None
