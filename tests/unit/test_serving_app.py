"""The model server over HTTP, by ASGI: requests of TensorFlow Serving's clients, and refusals."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from waiting import limit

from hosts.serving import app as module
from hosts.serving import rest
from hosts.serving.__main__ import main
from hosts.serving.app import ServerMetrics, app
from hosts.serving.manager import ModelManager
from hosts.serving.rest import Arrays
from jobs.bucket import BucketError
from jobs.folder_bucket import FolderBucket
from jobs.model_catalog import Catalog
from jobs.model_records import LoadState, Version, folder_of
from jobs.model_signatures import Signature, Tensor


class Digits:
    """A model of two inputs, as the shipped trainer exports it."""

    def __init__(self, _: Path) -> None:
        inputs = {
            "key": Tensor("int64", (None,), "serving_default_key:0"),
            "image": Tensor("float32", (None, 2), "serving_default_image:0"),
        }
        outputs = {"scores": Tensor("float32", (None, 2), "StatefulPartitionedCall:0")}
        self.signatures = {"serving_default": Signature(inputs, outputs)}

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        if (inputs["key"] == 13).any():
            raise RuntimeError("it is Friday\nand more")
        if (inputs["key"] == 14).any():
            raise RuntimeError("Graph execution error:\n\nOOM when allocating tensor\nand more")
        return {"scores": inputs["image"]}

    def examples(self, signature: str, examples: Iterable[Any]) -> Arrays:
        parsed = list(examples)
        return {"key": np.array([e["key"] for e in parsed]), "image": np.array([e["image"] for e in parsed], np.float32)}


@pytest.fixture
def manager(tmp_path: Path) -> ModelManager:
    (tmp_path / "bucket").mkdir()
    catalog = Catalog(FolderBucket(tmp_path / "bucket"))
    catalog.change("mnist", lambda model: model.add_version(Version("v1", token="a")), create=True)
    file = tmp_path / "bucket" / folder_of("mnist", "v1") / "saved_model.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    catalog.change("mnist", lambda model: model.set_files("v1", "a", {"saved_model.pb": nothing}, 0).mark_ready("v1", "a"))
    return ModelManager(catalog, FolderBucket(tmp_path / "bucket"), tmp_path / "cache", Digits, lambda *_: None)


@pytest.fixture
def catalog(manager: ModelManager, tmp_path: Path) -> Catalog:
    """Return the models of the manager's bucket."""
    return Catalog(FolderBucket(tmp_path / "bucket"))


@pytest.fixture
def server(manager: ModelManager) -> Starlette:
    manager.reconcile()
    return app(manager, ServerMetrics())


Reply = tuple[int, Any, dict[str, str]]
"""Status, JSON or text, and headers of a reply."""


def ask(server: Starlette, method: str, path: str, body: Any = None, headers: Any = ()) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return run_concurrently(send_request(server, method, path, [content], headers))[0]


def run_concurrently(*requests: Coroutine[Any, Any, Reply]) -> list[Reply]:
    async def gather_all() -> list[Reply]:
        return await asyncio.gather(*requests)

    loop = asyncio.new_event_loop()  # its own loop: asyncio.run would remove the thread's loop, which others use
    try:
        return loop.run_until_complete(gather_all())
    finally:
        loop.close()


async def send_request(server: Starlette, method: str, path: str, pieces: Sequence[bytes | None], headers: Any = ()) -> Reply:
    """Send a body in pieces and return the reply; after None the client sends nothing more."""
    sent: list[dict[str, Any]] = []
    remaining = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = remaining.pop(0)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": bool(remaining)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8501),
        "client": ("127.0.0.1", 1),
    }
    await server(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    reply_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(text) if reply_headers["content-type"] == "application/json" else text, reply_headers


ROWS = {"instances": [{"key": 1, "image": [0.25, 0.75]}, {"key": 2, "image": [1, 0]}]}


@pytest.mark.parametrize("path", ["/v1/models/mnist:predict", "/v1/models/mnist/versions/v1:predict"])
def test_predict_requests(server: Starlette, path: str) -> None:
    assert ask(server, "POST", path, ROWS)[:2] == (200, {"predictions": [[0.25, 0.75], [1.0, 0.0]]})
    columns = {"signature_name": "serving_default", "inputs": {"key": [1], "image": [[0, 1]]}}
    assert ask(server, "POST", path, columns)[:2] == (200, {"outputs": [[0.0, 1.0]]})


def test_classify_requests(server: Starlette) -> None:
    body = {"context": {"key": 1}, "examples": [{"image": [0.25, 0.75]}]}
    assert ask(server, "POST", "/v1/models/mnist:classify", body)[:2] == (200, {"results": [[["0", 0.25], ["1", 0.75]]]})


def test_status_and_metadata_requests(server: Starlette) -> None:
    version = {"version": "v1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}, "deployment": "a"}
    for path in ("/v1/models/mnist", "/v1/models/mnist/versions/v1"):
        assert ask(server, "GET", path)[:2] == (200, {"model_version_status": [version]})
    shape = {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False}
    signature = {
        "inputs": {
            "key": {"dtype": "DT_INT64", "tensor_shape": {**shape, "dim": shape["dim"][:1]}, "name": "serving_default_key:0"},
            "image": {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": "serving_default_image:0"},
        },
        "outputs": {"scores": {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": "StatefulPartitionedCall:0"}},
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    assert ask(server, "GET", "/v1/models/mnist/metadata")[:2] == (
        200,
        {
            "model_spec": {"name": "mnist", "signature_name": "", "version": "v1"},
            "metadata": {"signature_def": {"signature_def": {"serving_default": signature}}},
        },
    )
    text = {"dtype": "DT_STRING", "tensor_shape": {"dim": [], "unknown_rank": True}, "name": "text"}
    assert module._info(Tensor(None, None, "text")) == text
    assert module._info(Tensor("float64", ()))["tensor_shape"] == {"dim": [], "unknown_rank": False}


def test_the_status_of_a_broken_version(manager: ModelManager, catalog: Catalog) -> None:
    catalog.change("mnist", lambda model: model.add_version(Version("v2", token="b")).set_files("v2", "b", {"x": "00"}, 0))
    manager.reconcile()
    status = {"error_code": "UNKNOWN", "error_message": "ValueError: x is not in the bucket"}
    version = {"version": "v2", "state": "END", "status": status, "deployment": "b"}
    reply = ask(app(manager, ServerMetrics()), "GET", "/v1/models/mnist/versions/v2")
    assert reply[:2] == (200, {"model_version_status": [version]})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/models/nope:predict", ROWS, 404, "there is no model 'nope' here; there are mnist"),
        ("POST", "/v1/models/mnist/versions/7:predict", ROWS, 404, "model mnist has no version '7' here; there are v1"),
        ("GET", "/v1/models/nope", b"", 404, "there is no model 'nope' here; there are mnist"),
        ("POST", "/v1/models/mnist:predict", b"{", 400, "the request is no JSON"),
        ("POST", "/v1/models/mnist:predict", {"signature_name": "x", **ROWS}, 400, "there is no signature 'x'"),
        ("POST", "/v1/models/mnist:classify", {"signature_name": "x", "examples": [{}]}, 400, "there is no signature 'x'"),
        ("POST", "/v1/models/mnist:predict", {"instances": [{"key": 13, "image": [1, 2]}]}, 500, "RuntimeError: it is Friday"),
        ("POST", "/v1/models/mnist:predict", {"instances": [{"key": 14, "image": [1, 2]}]}, 500, "RuntimeError: OOM when"),
        ("GET", "/v1/models/mnist:predict", b"", 405, "Method Not Allowed"),
        ("POST", "/v1/models/mnist:explain", b"", 404, "Not Found: POST /v1/models/MODEL:predict"),
        (
            "POST",
            "/v1/models/mnist:regress",
            b"",
            404,
            "Not Found: POST /v1/models/MODEL:predict or MODEL:classify, GET /v1/models/MODEL or MODEL/metadata",
        ),
        ("GET", "/", b"", 404, "Not Found"),
    ],
)
def test_invalid_requests_are_refused(server: Starlette, method: str, path: str, body: Any, status: int, message: str) -> None:
    actual_status, reply, _ = ask(server, method, path, body)
    assert (actual_status, list(reply)) == (status, ["error"])
    assert reply["error"].startswith(message)
    assert "\n" not in reply["error"]


def test_a_too_large_request_is_refused(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 1 << 20)
    for headers, body in (([(b"content-length", b"104857600")], b""), ((), b"x" * ((1 << 20) + 1))):
        status, reply, _ = ask(server, "POST", "/v1/models/mnist:predict", body, headers)
        assert (status, reply["error"]) == (413, "the request is larger than 1 MB: ask for fewer instances at once")
    body = json.dumps(ROWS).encode()
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", len(body))
    for pieces, expected in (([body], 200), ([body[:9], body[9:]], 200), ([body[:9], body[9:] + b" "], 413)):
        assert run_concurrently(send_request(server, "POST", "/v1/models/mnist:predict", pieces))[0][0] == expected


GZIP = [(b"content-encoding", b"gzip")]


def test_a_gzipped_request_is_unpacked(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNPACKED_BYTES", 7)
    path, packed = "/v1/models/mnist:predict", gzip.compress(json.dumps(ROWS).encode())
    for pieces in ([packed], [bytes([byte]) for byte in packed]):
        reply = run_concurrently(send_request(server, "POST", path, pieces, GZIP))[0]
        assert reply[:2] == (200, {"predictions": [[0.25, 0.75], [1.0, 0.0]]})
    for body, reason in (
        (json.dumps(ROWS).encode(), "Error -3 while decompressing data: incorrect header check"),
        (packed[:-1], "it ends too early"),
        (b"", "it ends too early"),
        (packed + b"x", "bytes follow its end"),
    ):
        assert ask(server, "POST", path, body, GZIP)[:2] == (400, {"error": f"the request is no gzip: {reason}"})
    status, reply, _ = ask(server, "POST", path, packed, [(b"content-encoding", b"br")])
    assert (status, reply) == (415, {"error": "the request has the Content-Encoding 'br': only gzip, or none, is accepted"})


def test_unpacked_bytes_count(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = "/v1/models/mnist:predict", json.dumps(ROWS).encode()
    monkeypatch.setattr(module, "_UNPACKED_BYTES", 1 << 10)
    unpacked, unpack = list[int](), module._unpack

    def record(*given: Any) -> Iterator[bytes]:
        for piece in unpack(*given):
            unpacked.append(len(piece))
            yield piece

    monkeypatch.setattr(module, "_unpack", record)
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", len(body))
    assert ask(server, "POST", path, gzip.compress(body), GZIP)[0] == 200
    unpacked.clear()
    status, reply, _ = ask(server, "POST", path, gzip.compress(body + b" " * 10_000), GZIP)
    assert (status, reply["error"]) == (413, "the request is larger than 0 MB: ask for fewer instances at once")
    assert unpacked == [1 << 10], "no more is unpacked"
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 1 << 20)
    monkeypatch.setattr(module, "MAX_BYTES_IN_PROGRESS", len(body))
    assert ask(server, "POST", path, gzip.compress(body + b" "), GZIP)[0] == 503
    assert ask(server, "POST", path, gzip.compress(body), GZIP)[0] == 200, "its memory is released"


def test_a_context_counts_once_for_each_example(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse 190 kB that would become gigabytes: a context of 10,000 features in each of 30,000 examples."""
    path, body = "/v1/models/mnist:classify", {"context": {"key": 1, "image": [0.25, 0.75]}, "examples": [{}] * 99}
    copied = len(b'{"key":1,"image":[0.25,0.75]}') * 99
    answer = [[["0", 0.25], ["1", 0.75]]] * 99
    for name, status, message in (
        ("MAX_REQUEST_BYTES", 413, "the request, with its context in each example, is larger than 0 MB"),
        ("MAX_BYTES_IN_PROGRESS", 503, "too many large requests at once"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, copied - 1)
            reply = ask(server, "POST", path, body)
            assert (reply[0], reply[1]["error"].partition(":")[0]) == (status, message)
            patch.setattr(module, name, copied + len(json.dumps(body)))
            for _ in range(2):
                assert ask(server, "POST", path, body)[:2] == (200, {"results": answer}), "its memory is released"


def test_concurrent_large_requests_are_limited(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(ROWS).encode()
    monkeypatch.setattr(module, "MAX_BYTES_IN_PROGRESS", len(body))
    for headers in ([], [(b"content-length", b"%d" % (len(body) + 1))]):
        status, reply, reply_headers = ask(server, "POST", "/v1/models/mnist:predict", body + b" ", headers)
        assert (status, reply["error"], reply_headers["retry-after"]) == (503, "too many large requests at once", "1")
    for headers in ([], [(b"content-length", b"%d" % len(body))]):
        assert ask(server, "POST", "/v1/models/mnist:predict", body, headers)[0] == 200, "its memory is released"


def test_announced_bytes_use_no_memory(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunked request of unknown length also uses only the bytes received."""
    monkeypatch.setattr(module, "BODY_SECONDS", limit(0.5))
    path, body = "/v1/models/mnist:predict", json.dumps(ROWS).encode()
    silent = [send_request(server, "POST", path, [b"{", None], [(b"content-length", b"16777216")]) for _ in range(3)]
    small = [send_request(server, "POST", path, [body[:9], body[9:]]) for _ in range(20)]
    answers = run_concurrently(*silent, *small)
    assert [status for status, *_ in answers] == [408] * 3 + [200] * 20
    assert "did not arrive within" in answers[0][1]["error"]
    assert answers[0][2]["connection"] == "close"
    monkeypatch.setattr(module, "MAX_BYTES_IN_PROGRESS", len(body))
    assert ask(server, "POST", path, ROWS)[0] == 200, "their memory is released"


def test_a_large_request_is_parsed_in_a_thread(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(ROWS).encode()
    threads: list[bool] = []

    def record_thread(name: str) -> None:
        original = getattr(rest, name)

        def record(*given: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return original(*given)

        monkeypatch.setattr(rest, name, record)

    record_thread("body_of")
    record_thread("predict_response")
    for most, in_main in ((len(body), True), (len(body) - 1, False)):
        monkeypatch.setattr(module, "_LARGE_BYTES", most)
        answer = ask(server, "POST", "/v1/models/mnist:predict", body)
        assert answer[:2] == (200, {"predictions": [[0.25, 0.75], [1.0, 0.0]]})
        assert threads == [in_main] * 2
        threads.clear()
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    assert ask(server, "POST", "/v1/models/mnist:predict", b"{")[0] == 400


def test_a_large_context_is_copied_in_a_thread(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"context": {"key": 1, "image": [0.25, 0.75]}, "examples": [{}] * 9}).encode()
    original, threads = rest.examples, []

    def record(body: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return original(body)

    monkeypatch.setattr(rest, "examples", record)
    for large in (1 << 20, len(body)):
        monkeypatch.setattr(module, "_LARGE_BYTES", large)
        assert ask(server, "POST", "/v1/models/mnist:classify", body)[0] == 200
    assert threads == [True, False]


def test_requests_before_loading_are_refused(manager: ModelManager) -> None:
    application = app(manager, ServerMetrics())
    status, reply, headers = ask(application, "POST", "/v1/models/mnist:predict", ROWS)
    assert (status, reply, headers["retry-after"]) == (503, {"error": "the models are not loaded yet"}, "1")


def test_a_slow_request_times_out(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.0)
    assert ask(server, "POST", "/v1/models/mnist:predict", ROWS)[0] == 504


def test_metrics_for_prometheus(
    server: Starlette, manager: ModelManager, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 100.5, *range(101, 107)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    ask(server, "POST", "/v1/models/mnist:predict", ROWS)
    for name in ("a", "b", "c"):
        ask(server, "POST", f"/v1/models/{name}:predict", ROWS)
    status, text, _ = ask(server, "GET", "/metrics")
    assert status == 200
    assert 'scaletier_requests_total{code="200",method="predict",model="mnist"} 1.0' in text
    assert 'scaletier_requests_total{code="404",method="predict",model="?"} 3.0' in text, (
        "an unknown model name adds no new metric"
    )
    assert 'scaletier_versions_available{model="mnist"} 1.0' in text
    counts = {
        **dict.fromkeys(("0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2"), "0.0"),
        **dict.fromkeys(("0.5", "1.0", "2.0", "5.0", "10.0", "60.0", "+Inf"), "1.0"),
    }
    name, labels = "scaletier_request_seconds", 'method="predict",model="mnist"'
    lines = [f'{name}_bucket{{le="{most}",{labels}}} {count}' for most, count in counts.items()]
    assert [line for line in text.splitlines() if line.startswith(name) and labels in line][: len(lines) + 2] == [
        *(*lines, f"{name}_count{{{labels}}} 1.0", f"{name}_sum{{{labels}}} 0.5")
    ]
    catalog.change("mnist", lambda model: model.undeploy("v1"))
    manager.reconcile()
    status, text, _ = ask(server, "GET", "/monitoring/prometheus/metrics")
    assert status == 200
    assert "scaletier_versions_available{" not in text


def test_the_rows_of_a_batch_are_measured(manager: ModelManager) -> None:
    metrics = ServerMetrics()
    metrics.rows.labels("mnist").observe(2)
    counts = [line for line in metrics.text(manager).decode().splitlines() if line.startswith("scaletier_batch_rows_bucket")]
    assert counts == [
        f'scaletier_batch_rows_bucket{{le="{most}",model="mnist"}} {float(most != "1.0")}'
        for most in ("1.0", "2.0", "4.0", "8.0", "16.0", "32.0", "64.0", "128.0", "+Inf")
    ]


def test_health_needs_all_models_loaded(manager: ModelManager) -> None:
    server = app(manager, ServerMetrics())
    assert ask(server, "GET", "/health")[:2] == (503, {"polled": False, "models": []})
    manager.reconcile()
    assert ask(server, "GET", "/health")[:2] == (200, {"polled": True, "models": ["mnist"]})


def test_health_waits_for_downloads_at_the_start_only(manager: ModelManager, catalog: Catalog) -> None:
    def fail(*_: object) -> bool:
        raise BucketError("away")

    server, files = app(manager, ServerMetrics()), manager._files
    failing = SimpleNamespace(download=fail)
    manager._files = failing  # type: ignore[assignment]
    manager.reconcile()
    assert ask(server, "GET", "/health")[:2] == (503, {"polled": True, "models": ["mnist"]})
    manager._files = files
    manager.reconcile()
    assert ask(server, "GET", "/health")[0] == 200
    manager._files = failing  # type: ignore[assignment]
    catalog.change("mnist", lambda model: model.add_version(Version("v2", token="b")).set_files("v2", "b", {"x": "00"}, 0))
    manager.reconcile()
    assert manager.versions_of("mnist", "v2")[0].state is LoadState.LOADING
    assert ask(server, "GET", "/health")[0] == 200, "v1 still answers"


def test_a_sigterm_before_the_server_runs_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, handler = uvicorn.Server.run, signal.getsignal(signal.SIGTERM)

    def interrupted(server: uvicorn.Server, sockets: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    monkeypatch.setattr("hosts.serving.__main__._reconcile_forever", lambda *_: None)
    try:
        assert main(["--bucket", str(tmp_path), "--cache", str(tmp_path), "--port", "0"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_foreign_address_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bucket", str(tmp_path), "--cache", str(tmp_path), "--host", "127.0.0.1", "192.0.2.1", "--port", "0"]
    assert main(arguments) == 1
    message = (
        "<3>serving: cannot listen: Cannot assign requested address (while attempting to bind on address ('192.0.2.1', 0))\n"
    )
    assert capsys.readouterr().err == message
