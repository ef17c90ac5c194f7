"""Serve the part of Google Cloud Storage's API that this project uses, from memory, on a loopback port.

Source: the reference of the JSON API (objects: delete, get, insert, list, patch, rewrite; buckets: delete, get, insert), its
pages on request preconditions, resumable uploads and partial responses, and for a Go client's reads that of the XML API.

A write and its preconditions are one step under a lock, and a list sees every write that was answered before it. Not here:
permissions, object versions, composite objects and CRC32C.
"""

from __future__ import annotations

import base64
import email
import hashlib
import json
import re
import socket
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

_METADATA_LIMIT = 8 << 10  # bytes of an object's custom metadata, keys and values together
_NAME_LIMIT = 1024  # bytes of an object's name
_PAGE_LIMIT = 1000  # entries of a list's page
_CHUNK_UNIT = 256 << 10  # chunks of a resumable upload except the last are multiples of this; excess bytes are dropped
_WRITABLE = ("contentType", "contentEncoding", "contentDisposition", "contentLanguage", "cacheControl", "metadata")
_CONDITIONS = (
    ("ifGenerationMatch", "generation", True),
    ("ifGenerationNotMatch", "generation", False),
    ("ifMetagenerationMatch", "metageneration", True),
    ("ifMetagenerationNotMatch", "metageneration", False),
)

Query = dict[str, str]


class ApiError(Exception):
    """An answer that reports an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        detail = {"message": message, "domain": "global", "reason": reason}
        self.resource = {"error": {"code": status, "message": message, "errors": [detail]}}


@dataclass(frozen=True)
class StoredObject:
    """The one live version of an object."""

    bucket: str
    name: str
    content: bytes
    generation: int
    created: datetime
    attributes: dict[str, Any]
    metageneration: int = 1
    updated: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def md5(self) -> str:
        """The content's MD5 in base64."""
        return base64.b64encode(hashlib.md5(self.content, usedforsecurity=False).digest()).decode()

    def describe(self) -> dict[str, Any]:
        """Return the object resource of the JSON API."""
        return self.attributes | {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "bucket": self.bucket,
            "name": self.name,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "size": str(len(self.content)),
            "md5Hash": self.md5,
            "etag": f"{self.generation}/{self.metageneration}",
            "storageClass": "STANDARD",
            "timeCreated": _format_time(self.created),
            "updated": _format_time(self.updated),
        }


@dataclass
class Upload:
    """A resumable upload that has begun."""

    bucket: str
    name: str
    attributes: dict[str, Any]
    query: Query
    content: bytearray = field(default_factory=bytearray)


class Storage:
    """Buckets with their objects; every method is one step for all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, StoredObject]] = {}
        self._uploads: dict[str, Upload] = {}
        self._last_generation = 0

    def create_bucket(self, name: str) -> None:
        """Create a bucket."""
        with self._lock:
            self._buckets[name] = {}

    def get(self, bucket: str, name: str, query: Query) -> StoredObject:
        """Return an object if it meets the query's conditions: 404, 412 or 304 otherwise."""
        with self._lock:
            stored = self._find(bucket, name, query)
            _check_conditions(query, stored, reads=True)
            return stored

    def put(self, bucket: str, name: str, content: bytes, attributes: dict[str, Any], query: Query) -> StoredObject:
        """Store a new generation of an object if the present one meets the query's conditions: 412 otherwise."""
        with self._lock:
            objects = self._objects(bucket)
            _check_name(name)
            _check_conditions(query, objects.get(name))
            writable = {key: attributes[key] for key in _WRITABLE if key in attributes}
            _check_metadata(writable)
            now = datetime.now(UTC)
            self._last_generation = max(self._last_generation + 1, int(now.timestamp() * 1e6))
            stored = StoredObject(bucket, name, content, self._last_generation, now, writable, updated=now)
            objects[name] = stored
            return stored

    def patch(self, bucket: str, name: str, changes: dict[str, Any], query: Query) -> StoredObject:
        """Change attributes of an object: null deletes one, and so it does in the custom metadata."""
        with self._lock:
            before = self._find(bucket, name, query)
            _check_conditions(query, before)
            attributes = _merge(before.attributes, {key: value for key, value in changes.items() if key in _WRITABLE})
            _check_metadata(attributes)
            stored = StoredObject(
                bucket, name, before.content, before.generation, before.created, attributes, before.metageneration + 1
            )
            self._buckets[bucket][name] = stored
            return stored

    def delete(self, bucket: str, name: str, query: Query) -> None:
        """Delete an object if it meets the query's conditions."""
        with self._lock:
            _check_conditions(query, self._find(bucket, name, query))
            del self._buckets[bucket][name]

    def rewrite(self, source: tuple[str, str], target: tuple[str, str], changes: dict[str, Any], query: Query) -> StoredObject:
        """Copy an object to another name; the source's conditions have separate parameters."""
        of_source = {key.replace("ifSource", "if"): value for key, value in query.items() if key.startswith("ifSource")}
        attributes = {key: value for key, value in changes.items() if key in _WRITABLE}
        with self._lock:
            source_object = self.get(*source, of_source)
            return self.put(*target, source_object.content, attributes or source_object.attributes, query)

    def list(self, bucket: str, query: Query) -> dict[str, Any]:
        """Return a page of the objects in the order of their names' UTF-8, and of the prefixes up to the delimiter."""
        with self._lock:
            objects = dict(self._objects(bucket))
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        fits = compile_glob(query["matchGlob"]).fullmatch if query.get("matchGlob") else None
        after = base64.urlsafe_b64decode(query.get("pageToken", ""))
        limit = min(_parse_number(query, "maxResults", _PAGE_LIMIT), _PAGE_LIMIT) or _PAGE_LIMIT
        entries: dict[bytes, StoredObject | str] = {}
        for name, stored in objects.items():
            if not name.startswith(prefix) or (fits and not fits(name)):
                continue
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            key = f"{prefix}{head}{cut}" if cut else name
            if key.encode() > after:
                entries[key.encode()] = key if cut else stored
        keys = sorted(entries)
        page = [entries[key] for key in keys[:limit]]
        listing: dict[str, Any] = {"kind": "storage#objects"}
        if items := [each.describe() for each in page if isinstance(each, StoredObject)]:
            listing["items"] = items
        if prefixes := [each for each in page if isinstance(each, str)]:
            listing["prefixes"] = prefixes
        if len(keys) > limit:
            listing["nextPageToken"] = base64.urlsafe_b64encode(keys[limit - 1]).decode()
        return listing

    def begin_upload(self, bucket: str, name: str, attributes: dict[str, Any], query: Query) -> str:
        """Return the id of a new resumable upload."""
        with self._lock:
            self._objects(bucket)
            _check_name(name)
            upload_id = uuid.uuid4().hex
            self._uploads[upload_id] = Upload(bucket, name, attributes, query)
            return upload_id

    def continue_upload(self, upload_id: str, content_range: str, content: bytes) -> StoredObject | int:
        """Take a chunk of an upload.

        Args:
            upload_id: what `begin_upload` returned.
            content_range: the header Content-Range, empty for a whole object at once.
            content: the chunk.

        Returns:
            the object if it is complete, otherwise the number of bytes stored.
        """
        with self._lock:
            upload = self._uploads[upload_id]
            parsed = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", content_range or f"bytes 0-0/{len(content)}")
            assert parsed
            start = int(parsed[1] or 0) if content else len(upload.content)
            total = None if parsed[3] == "*" else int(parsed[3])
            if start <= len(upload.content):
                combined = upload.content[:start] + content
                if total is None or len(combined) < total:
                    del combined[len(combined) // _CHUNK_UNIT * _CHUNK_UNIT :]
                if len(combined) > len(upload.content):
                    upload.content = combined
            if total is None or len(upload.content) < total:
                return len(upload.content)
            return self.put(upload.bucket, upload.name, bytes(upload.content), upload.attributes, upload.query)

    def _objects(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self._buckets:
            raise ApiError(404, "notFound", "The specified bucket does not exist.")
        return self._buckets[bucket]

    def _find(self, bucket: str, name: str, query: Query) -> StoredObject:
        stored = self._objects(bucket).get(name)
        if stored is None or _parse_number(query, "generation", stored.generation) != stored.generation:
            raise ApiError(404, "notFound", f"No such object: {bucket}/{name}")
        return stored


def compile_glob(glob: str) -> re.Pattern[str]:
    """Translate a `matchGlob`, in which `*` stops at `/`; other wildcards are not known."""
    assert not re.search(r"\*\*|[?{\[\\]", glob)
    return re.compile("[^/]*".join(map(re.escape, glob.split("*"))), re.DOTALL)


def select_fields(resource: Any, fields: str) -> Any:
    """Return the part of a resource that a `fields` parameter names, such as `items(name,metadata/a),nextPageToken`."""

    def parse(tokens: deque[str]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        while tokens and tokens[0] != ")":
            branch = tree.setdefault(tokens.popleft(), {})
            while tokens and tokens[0] == "/":
                tokens.popleft()
                branch = branch.setdefault(tokens.popleft(), {})
            if tokens and tokens[0] == "(":
                tokens.popleft()
                branch.update(parse(tokens))
                tokens.popleft()
            if tokens and tokens[0] == ",":
                tokens.popleft()
        return tree

    def select(value: Any, tree: dict[str, Any]) -> Any:
        if isinstance(value, list):
            return [select(each, tree) for each in value]
        if not tree or "*" in tree or not isinstance(value, dict):
            return value
        return {key: select(value[key], tree[key]) for key in tree if key in value}

    return select(resource, parse(deque(re.findall(r"[^,()/]+|[,()/]", fields))))


def _check_conditions(query: Query, stored: StoredObject | None, reads: bool = False) -> None:
    for parameter, attribute, wants_equal in _CONDITIONS:
        if parameter in query:
            present = getattr(stored, attribute) if stored else 0
            if (present == _parse_number(query, parameter)) != wants_equal:
                status = 304 if reads and not wants_equal else 412
                raise ApiError(status, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


def _check_name(name: str) -> None:
    if not 0 < len(name.encode()) <= _NAME_LIMIT or "\r" in name or "\n" in name:
        raise ApiError(400, "invalid", f"Disallowed object name: {name!r}")


def _check_metadata(attributes: dict[str, Any]) -> None:
    size = sum(len(f"{key}{value}".encode()) for key, value in attributes.get("metadata", {}).items())
    if size > _METADATA_LIMIT:
        raise ApiError(400, "metadataTooLarge", f"The custom metadata has {size} bytes, and may have {_METADATA_LIMIT}.")


def _merge(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = before | {
        key: _merge(before.get(key, {}), value) if isinstance(value, dict) else value for key, value in changes.items()
    }
    return {key: value for key, value in merged.items() if value is not None}


def _parse_number(query: Query, parameter: str, default: int = 0) -> int:
    return int(query.get(parameter, default))


def _format_time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parse_multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the metadata and the content of a multipart upload; the content's type is among the metadata."""
    boundary = email.message_from_string(f"Content-Type: {content_type}\n\n").get_boundary()
    parts = re.split(rb"\r?\n--" + re.escape(boundary.encode()) + rb"(?:--)?[ \t]*(?=\r?\n|\Z)", b"\n" + body)
    (_, metadata), (header, content) = (re.split(rb"\r?\n\r?\n", part, maxsplit=1) for part in parts[1:3])
    kind = email.message_from_bytes(header.lstrip() + b"\n\n")["Content-Type"]
    return {"contentType": kind or "application/octet-stream"} | json.loads(metadata), content


class _Handler(BaseHTTPRequestHandler):
    """Answers requests on one connection."""

    server: StorageServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send an answer's head and body together
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = self.read_body()
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            for method, pattern, answer in ROUTES:
                if self.command in method.split("|") and (match := re.fullmatch(pattern, url.path)):
                    answer(self, *map(unquote, match.groups()), *([body] if self.command in ("POST", "PUT", "PATCH") else []))
                    break
            else:
                raise ApiError(501, "notImplemented", f"the fake does not know {self.command} {self.path}")
        except ApiError as error:
            self.send_json(error.resource, error.status)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.read_exactly(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0] or b"-1", 16):
            chunks.append(self.read_exactly(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            """Trailers."""
        return b"".join(chunks)

    def read_exactly(self, size: int) -> bytes:
        content = self.rfile.read(size) if size > 0 else b""
        if len(content) != size:
            raise ConnectionError("the client is gone")  # an incomplete request changes nothing
        return content

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(content)

    def send_json(self, resource: Any, status: int = 200) -> None:
        fields = self.query.get("fields", "") if status < 300 else ""
        content = json.dumps(select_fields(resource, fields)).encode()
        self.send(status, content, Content_Type="application/json; charset=UTF-8")

    def create_bucket(self, body: bytes) -> None:
        name = json.loads(body)["name"]
        self.server.storage.create_bucket(name)
        self.send_json({"kind": "storage#bucket", "name": name})

    def list_objects(self, bucket: str) -> None:
        self.send_json(self.server.storage.list(bucket, self.query))

    def get_object(self, bucket: str, name: str) -> None:
        if self.query.get("alt") == "media":
            self.download(bucket, name)
        else:
            self.send_json(self.server.storage.get(bucket, name, self.query).describe())

    def download(self, bucket: str, name: str) -> None:
        stored = self.server.storage.get(bucket, name, self.query)
        attributes = stored.attributes
        headers = {
            "Content-Type": attributes.get("contentType", "application/octet-stream"),
            "Last-Modified": format_datetime(stored.updated, usegmt=True),
            "ETag": f'"{stored.generation}"',
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": str(stored.metageneration),
            "X-Goog-Hash": f"md5={stored.md5}",
            "X-Goog-Stored-Content-Encoding": attributes.get("contentEncoding", "identity"),
            "X-Goog-Stored-Content-Length": str(len(stored.content)),
        }
        for key, header in (("cacheControl", "Cache-Control"), ("contentEncoding", "Content-Encoding")):
            if attributes.get(key):
                headers[header] = attributes[key]
        size = len(stored.content)
        byte_range = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if byte_range is None:
            return self.send(200, stored.content, **headers)
        start = int(byte_range[1]) if byte_range[1] else max(size - int(byte_range[2]), 0)
        end = min(int(byte_range[2]), size - 1) if byte_range[1] and byte_range[2] else size - 1
        if start >= size:
            raise ApiError(416, "requestedRangeNotSatisfiable", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return self.send(206, stored.content[start : end + 1], **headers)

    def insert_object(self, bucket: str, body: bytes) -> None:
        storage, kind = self.server.storage, self.query.get("uploadType")
        if kind == "multipart":
            attributes, content = _parse_multipart(self.headers.get("Content-Type", ""), body)
            name = self.query.get("name") or attributes.get("name", "")
            stored = storage.put(bucket, name, content, attributes, self.query)
        elif kind == "resumable":
            attributes = {"contentType": self.headers.get("X-Upload-Content-Type", "application/octet-stream")}
            attributes |= json.loads(body or b"{}")
            name = self.query.get("name") or str(attributes.get("name", ""))
            upload_id = storage.begin_upload(bucket, name, attributes, self.query)
            path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
            return self.send(200, Location=f"http://{self.headers['Host']}{path}")
        else:
            raise ApiError(400, "invalid", "Invalid upload type.")
        return self.send_json(stored.describe())

    def continue_upload(self, bucket: str, body: bytes) -> None:
        state = self.server.storage.continue_upload(self.query["upload_id"], self.headers.get("Content-Range", ""), body)
        if isinstance(state, StoredObject):
            self.send_json(state.describe())
        elif state:
            self.send(308, Range=f"bytes=0-{state - 1}")
        else:
            self.send(308)

    def patch_object(self, bucket: str, name: str, body: bytes) -> None:
        self.send_json(self.server.storage.patch(bucket, name, json.loads(body), self.query).describe())

    def delete_object(self, bucket: str, name: str) -> None:
        self.server.storage.delete(bucket, name, self.query)
        self.send(204)

    def rewrite_object(self, bucket: str, name: str, to_bucket: str, to_name: str, body: bytes) -> None:
        changes = json.loads(body or b"{}")
        stored = self.server.storage.rewrite((bucket, name), (to_bucket, to_name), changes, self.query)
        size = str(len(stored.content))
        report = {"kind": "storage#rewriteResponse", "done": True, "totalBytesRewritten": size, "objectSize": size}
        self.send_json(report | {"resource": stored.describe()})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the class above
        """Print nothing."""


_BUCKET = r"/storage/v1/b/([^/]+)"
_OBJECT = rf"{_BUCKET}/o/(.+)"
_UPLOAD = rf"/upload{_BUCKET}/o"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("POST", "/storage/v1/b", _Handler.create_bucket),
    ("GET", rf"{_BUCKET}/o", _Handler.list_objects),
    ("POST", rf"{_OBJECT}/rewriteTo/b/([^/]+)/o/(.+)", _Handler.rewrite_object),
    ("GET", _OBJECT, _Handler.get_object),
    ("PATCH", _OBJECT, _Handler.patch_object),
    ("DELETE", _OBJECT, _Handler.delete_object),
    ("GET", rf"/download{_OBJECT}", _Handler.download),
    ("POST", _UPLOAD, _Handler.insert_object),
    ("PUT", _UPLOAD, _Handler.continue_upload),
    ("GET|HEAD", r"/(?!storage/|upload/|download/)([^/]+)/(.+)", _Handler.download),  # the XML API
]


class LoopbackServer(ThreadingHTTPServer):
    """An HTTP server on a port of its own, which can be stopped amid requests."""

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, further simultaneous connections wait a second

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._connections: set[socket.socket] = set()
        self._held: socket.socket | None = None
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The loopback port."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """Cut all connections and refuse new ones; the port stays reserved until `close`."""
        if self._held is None:
            self.shutdown()
            self.server_close()
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("127.0.0.1", self.port))
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop, and release the port."""
        self.stop()
        if self._held is not None:
            self._held.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has disconnected, or `stop` was called
            super().handle_error(request, client_address)


class StorageServer(LoopbackServer):
    """A storage behind HTTP."""

    def __init__(self) -> None:
        self.storage = Storage()
        super().__init__(_Handler)
