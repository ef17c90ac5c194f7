"""The fake of Google's storage: the behaviour that other tests rely on, from Google's reference."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import pytest
from fake_storage import ApiError, Storage, StorageServer, compile_glob, select_fields
from waiting import limit

UPLOAD = "/upload/storage/v1/b/bucket/o?"
OBJECT = "/storage/v1/b/bucket/o/a"


@pytest.fixture
def storage() -> Storage:
    storage = Storage()
    storage.create_bucket("bucket")
    return storage


@pytest.fixture
def server() -> Iterator[StorageServer]:
    server = StorageServer()
    server.storage.create_bucket("bucket")
    yield server
    server.close()


def send(
    server: StorageServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=limit())
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def list_names(storage: Storage, **query: str) -> tuple[list[str], list[str], str]:
    page = storage.list("bucket", query)
    return [item["name"] for item in page.get("items", [])], page.get("prefixes", []), page.get("nextPageToken", "")


class YieldingDict(dict[str, Any]):
    """Attributes that let other threads run when they are read: between a write's check and the write."""

    def __contains__(self, key: object) -> bool:
        time.sleep(0)
        return super().__contains__(key)


def test_one_of_many_conditional_writes_wins(storage: Storage) -> None:
    def put(number: int, generation: str) -> int | None:
        try:
            condition = {"ifGenerationMatch": generation}
            return storage.put("bucket", "a", b"%d" % number, YieldingDict(), condition).generation
        except ApiError as error:
            assert error.status == 412
            return None

    generation = "0"
    with ThreadPoolExecutor(16) as pool:
        for _ in range(50):
            winners = [each for each in pool.map(put, range(16), [generation] * 16) if each is not None]
            assert len(winners) == 1
            assert winners[0] > int(generation)
            generation = str(winners[0])


@pytest.mark.parametrize(
    ("glob", "matches", "others"),
    [
        ("jobs/*/job.json", ["jobs/a/job.json", "jobs//job.json"], ["jobs/a/b/job.json", "jobs/job.json", "jobs/a/jobxjson"]),
        ("jobs/**", ["jobs/a", "jobs/a/b"], ["job", "jobs"]),
        ("**/job.json", ["a/b/job.json", "/job.json"], ["job.json.old"]),
        ("a?c", ["abc"], ["a/c", "ac"]),
        ("{a,b/c}*", ["a", "ax", "b/cx"], ["b", "a/x"]),
        ("[a-c]x", ["bx"], ["dx", "/x"]),
        ("[!a-c]x", ["dx"], ["bx", "/x"]),
        (r"a\*", ["a*"], ["ab"]),
    ],
)
def test_globs(glob: str, matches: list[str], others: list[str]) -> None:
    fits = compile_glob(glob).fullmatch
    assert [name for name in [*matches, *others] if fits(name)] == matches


def test_lists_have_prefixes_and_pages(storage: Storage) -> None:
    for name in ("b/2", "a", "b/1", "ü", "c", "b"):
        storage.put("bucket", name, b"", {}, {})
    assert list_names(storage) == (["a", "b", "b/1", "b/2", "c", "ü"], [], "")
    assert list_names(storage, delimiter="/") == (["a", "b", "c", "ü"], ["b/"], "")
    assert list_names(storage, delimiter="/", prefix="b/") == (["b/1", "b/2"], [], "")
    assert list_names(storage, startOffset="b/2", endOffset="ü") == (["b/2", "c"], [], "")
    pages: list[tuple[list[str], list[str]]] = []
    token = ""
    while token or not pages:
        names, prefixes, token = list_names(storage, delimiter="/", maxResults="2", pageToken=token)
        pages.append((names, prefixes))
    assert pages == [(["a", "b"], []), (["c"], ["b/"]), (["ü"], [])]
    for wrong in ({"pageToken": "%"}, {"maxResults": "x"}):
        with pytest.raises(ApiError) as caught:
            storage.list("bucket", wrong)
        assert caught.value.status == 400


def test_fields_select_a_part_of_a_resource() -> None:
    resource = {"items": [{"name": "a", "size": "1", "metadata": {"x": "1", "y": "2"}}], "kind": "k", "nextPageToken": "t"}
    assert select_fields(resource, "items(name,metadata/x),nextPageToken,none") == {
        "items": [{"name": "a", "metadata": {"x": "1"}}],
        "nextPageToken": "t",
    }
    assert select_fields(resource, "") == resource


def test_conditions_of_reads_and_writes(server: StorageServer) -> None:
    stored = server.storage.put("bucket", "a", b"one", {}, {})
    right, wrong = str(stored.generation), "7"
    for path in (OBJECT, f"{OBJECT}?alt=media"):
        mark = "&" if "?" in path else "?"
        assert send(server, "GET", f"{path}{mark}ifGenerationMatch={right}")[0] == 200
        assert send(server, "GET", f"{path}{mark}ifGenerationMatch={wrong}")[0] == 412
        assert send(server, "GET", f"{path}{mark}ifGenerationNotMatch={right}")[0] == 304
        assert send(server, "GET", f"{path}{mark}generation={wrong}")[0] == 404
    for method, body in (("DELETE", None), ("PATCH", b"{}")):
        assert send(server, method, f"{OBJECT}?ifMetagenerationMatch={wrong}", body)[0] == 412
        assert send(server, method, f"{OBJECT}?ifGenerationNotMatch={right}", body)[0] == 412
    upload = f"{UPLOAD}uploadType=media&name=a"
    status, _, answer = send(server, "POST", f"{upload}&ifGenerationMatch=0", b"two")
    assert (status, json.loads(answer)["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    assert send(server, "POST", f"{upload}&ifMetagenerationMatch=1", b"two")[0] == 200
    assert send(server, "DELETE", OBJECT)[0] == 204
    status, _, answer = send(server, "GET", OBJECT)
    assert (status, json.loads(answer)["error"]["message"]) == (404, "No such object: bucket/a")
    assert send(server, "POST", f"{upload}&ifGenerationMatch={right}", b"two")[0] == 412


def test_metadata(server: StorageServer) -> None:
    first = server.storage.put("bucket", "a", b"one", {"metadata": {"x": "1", "y": "2"}, "other": 1}, {})
    changed = json.loads(send(server, "PATCH", OBJECT, b'{"metadata": {"x": null, "z": "3"}}')[2])
    assert changed["metadata"] == {"y": "2", "z": "3"}
    assert (changed["generation"], changed["metageneration"]) == (str(first.generation), "2")
    large = json.dumps({"metadata": {"x": "1" * 8192}}).encode()
    assert send(server, "PATCH", OBJECT, large)[0] == 400


@pytest.mark.parametrize(
    ("range_header", "status", "content"),
    [
        ("bytes=1-2", 206, b"12"),
        ("bytes=3-", 206, b"34"),
        ("bytes=-2", 206, b"34"),
        ("bytes=3-99", 206, b"34"),
        ("bytes=2-1", 200, b"01234"),
        ("bytes=5-", 416, None),
    ],
)
def test_ranges(server: StorageServer, range_header: str, status: int, content: bytes | None) -> None:
    server.storage.put("bucket", "a", b"01234", {}, {})
    for path in (f"/download{OBJECT}?alt=media", "/bucket/a"):
        actual_status, headers, body = send(server, "GET", path, Range=range_header)
        assert actual_status == status
        assert content is None or body == content
        assert (headers.get("Content-Range", "")[-2:] == "/5") == (status == 206)


def test_a_resumable_upload(server: StorageServer) -> None:
    unit = 256 << 10
    _, headers, _ = send(
        server, "POST", f"{UPLOAD}uploadType=resumable&name=a&ifGenerationMatch=0", b'{"metadata": {"x": "1"}}'
    )
    path = headers["Location"].partition(str(server.port))[2]
    content = bytes(range(256)) * (3 * unit // 256)
    assert send(server, "PUT", path, Content_Range="bytes */*")[0] == 308
    # Bytes beyond a multiple of 256 KiB are sent again.
    status, headers, _ = send(server, "PUT", path, content[: unit + 5], Content_Range=f"bytes 0-{unit + 4}/{3 * unit}")
    assert (status, headers["Range"]) == (308, f"bytes=0-{unit - 1}")
    status, headers, _ = send(server, "PUT", path, Content_Range=f"bytes */{3 * unit}")
    assert (status, headers["Range"]) == (308, f"bytes=0-{unit - 1}")
    with pytest.raises(ApiError):
        server.storage.get("bucket", "a", {})
    last = f"bytes {unit}-{3 * unit - 1}/{3 * unit}"
    created = server.storage.put("bucket", "a", b"other", {}, {})
    assert send(server, "PUT", path, content[unit:], Content_Range=last)[0] == 412
    server.storage.delete("bucket", "a", {"ifGenerationMatch": str(created.generation)})
    assert send(server, "PUT", path, content[unit:], Content_Range=last)[0] == 200
    assert server.storage.get("bucket", "a", {}).content == content
    assert server.storage.get("bucket", "a", {}).attributes["metadata"] == {"x": "1"}


def test_a_copy(server: StorageServer) -> None:
    server.storage.put("bucket", "a", b"one", {"contentType": "text/plain"}, {})
    path = f"{OBJECT}/rewriteTo/b/bucket/o/b%2Fc"
    assert send(server, "POST", f"{path}?ifSourceGenerationMatch=7", b"")[0] == 412
    answer: dict[str, Any] = json.loads(send(server, "POST", path, b"{}")[2])
    assert answer["done"]
    assert (answer["resource"]["name"], answer["resource"]["contentType"]) == ("b/c", "text/plain")
    assert server.storage.get("bucket", "b/c", {}).content == b"one"


def test_buckets(server: StorageServer) -> None:
    assert send(server, "POST", "/storage/v1/b?project=p", b'{"name": "bucket"}')[0] == 409
    server.storage.put("bucket", "a", b"one", {}, {})
    assert send(server, "DELETE", "/storage/v1/b/bucket")[0] == 409
    send(server, "DELETE", OBJECT)
    assert send(server, "DELETE", "/storage/v1/b/bucket")[0] == 204
    for method, path in (
        ("GET", "/storage/v1/b/bucket"),
        ("GET", "/storage/v1/b/bucket/o"),
        ("POST", f"{UPLOAD}uploadType=media&name=a"),
    ):
        assert send(server, method, path, b"" if method == "POST" else None)[0] == 404
    assert send(server, "GET", "/storage/v1/unknown")[0] == 501


def test_an_incomplete_request_changes_nothing_and_a_stop_cuts_it(server: StorageServer) -> None:
    query = urlencode({"uploadType": "media", "name": "a"})
    with socket.create_connection(("127.0.0.1", server.port), timeout=limit()) as client:
        client.sendall(f"POST {UPLOAD}{query} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf".encode())
        with socket.create_connection(("127.0.0.1", server.port), timeout=limit()) as idle:
            idle.sendall(b"GET /storage/v1/b/bucket HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"  # both connections were accepted
            server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert list_names(server.storage) == ([], [], "")


def test_a_page_continues_after_a_deleted_object(storage: Storage) -> None:
    for name in ("a", "b", "c"):
        storage.put("bucket", name, b"", {}, {})
    token = list_names(storage, maxResults="1")[2]
    storage.delete("bucket", "a", {})
    assert list_names(storage, pageToken=token)[0] == ["b", "c"]
