"""The server's HTTP interface: TensorFlow Serving's REST API, health, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hosts.serving import rest
from hosts.serving.manager import LoadedVersion, ModelManager
from hosts.serving.rest import RestError
from hosts.serving.saved import error_reason
from jobs.model_records import LoadState
from jobs.model_signatures import Tensor

MAX_REQUEST_BYTES = 16 << 20
"""The largest request, in bytes of uncompressed JSON: about three thousand images of MNIST."""
MAX_BYTES_IN_PROGRESS = 2 * MAX_REQUEST_BYTES
"""The most bytes of all requests in progress; in memory they take ten times as much."""
_LARGE_BYTES = 2**18
_UNPACKED_BYTES = 2**16
REQUEST_TIMEOUT = 60.0
"""Seconds in which a request must be answered."""
BODY_SECONDS = 30.0
"""Seconds in which the body must arrive: enough for 16 MB at 5 Mbit/s."""
_UNKNOWN = "?"
_Result = TypeVar("_Result")


class _NameConvertor(StringConvertor):
    """Match a segment of a path up to the colon before a method, as in `v1:predict`."""

    regex = "[^/:]+"


register_url_convertor("name", _NameConvertor())


class ServerMetrics:
    """Counters and gauges for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("model", "method", "code")
        self.requests = Counter("scaletier_requests", "Requests answered", names, registry=self.registry)
        self.seconds = Histogram(
            "scaletier_request_seconds",
            "Seconds from a request to its answer",
            ("model", "method"),
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60),
        )
        self.rows = Histogram(
            "scaletier_batch_rows",
            "Rows computed together",
            ("model",),
            registry=self.registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )
        self.loaded = Gauge("scaletier_versions_available", "Versions that answer", ("model",), registry=self.registry)

    def text(self, manager: ModelManager) -> bytes:
        self.loaded.clear()
        for name, served in manager.models.items():
            self.loaded.labels(name).set(sum(loaded.state is LoadState.AVAILABLE for loaded in served.versions.values()))
        text: bytes = generate_latest(self.registry)
        return text


class RequestMemoryLimit:
    """A limit on the bytes of all requests in progress, counted when they arrive or are copied."""

    def __init__(self) -> None:
        self._bytes_in_progress = 0

    @contextlib.asynccontextmanager
    async def content(self, request: Request) -> AsyncIterator[bytes]:
        """Yield a request's body; its bytes count against the limit while the context is open.

        Raises:
            RestError: 413 if the body is too large, 503 if the limit is reached, or one of `_content`.
        """
        size = 0

        def count_bytes(more: int) -> None:
            nonlocal size
            self._check(size + more, more)
            size += more
            self._bytes_in_progress += more

        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._check(int(declared), int(declared))
        try:
            yield await _content(request, count_bytes)
        finally:
            self._bytes_in_progress -= size

    @contextlib.contextmanager
    def copies(self, size: int) -> Iterator[None]:
        """Count the bytes that copying adds to a request while the context is open; RestError as by `content`."""
        self._check(size, size, "the request, with its context in each example,")
        self._bytes_in_progress += size
        try:
            yield
        finally:
            self._bytes_in_progress -= size

    def _check(self, size: int, more: int, what: str = "the request") -> None:
        if size > MAX_REQUEST_BYTES:
            raise RestError(413, f"{what} is larger than {MAX_REQUEST_BYTES >> 20} MB: ask for fewer instances at once")
        if self._bytes_in_progress + more > MAX_BYTES_IN_PROGRESS:
            raise RestError(503, "too many large requests at once", 1)


def app(manager: ModelManager, metrics: ServerMetrics) -> Starlette:
    """Return the application; another thread polls `manager`."""

    limit = RequestMemoryLimit()

    async def status(request: Request) -> Response:
        versions = manager.versions_of(request.path_params["model"], request.path_params.get("version"))
        return _json({"model_version_status": [_status(loaded) for loaded in versions]})

    async def metadata(request: Request) -> Response:
        model = request.path_params["model"]
        loaded = manager.find(model, request.path_params.get("version"))
        assert loaded.model is not None
        signatures = {
            name: {
                "inputs": {key: _info(tensor) for key, tensor in signature.inputs.items()},
                "outputs": {key: _info(tensor) for key, tensor in signature.outputs.items()},
                "method_name": "tensorflow/serving/predict",
                "defaults": {},
            }
            for name, signature in loaded.model.signatures.items()
        }
        spec = {"name": model, "signature_name": "", "version": loaded.name}
        return _json({"model_spec": spec, "metadata": {"signature_def": {"signature_def": signatures}}})

    async def predict(request: Request) -> Response:
        loaded = manager.find(request.path_params["model"], request.path_params.get("version"))
        assert loaded.model is not None
        signatures = loaded.model.signatures

        def read(content: bytes) -> tuple[str, rest.Arrays, bool]:
            body = rest.body_of(content)
            name = rest.signature_name(body)
            return name, *rest.parse_request(body, rest.get_signature(signatures, name))

        async with limit.content(request) as content:
            name, inputs, by_rows = await _run(len(content), read, content)
            outputs = await _compute(loaded, name, inputs)
            answer = await _run(len(content), rest.predict_response, outputs, by_rows)
        return Response(answer, media_type="application/json")

    async def classify(request: Request) -> Response:
        loaded = manager.find(request.path_params["model"], request.path_params.get("version"))
        assert loaded.model is not None
        model = loaded.model

        def read(content: bytes) -> tuple[str, dict[str, Any], int]:
            body = rest.body_of(content)
            name = rest.signature_name(body)
            rest.get_signature(model.signatures, name)
            return name, body, rest.copied_bytes(body)

        async with limit.content(request) as content:
            name, body, copied = await _run(len(content), read, content)
            with limit.copies(copied):
                size = len(content) + copied
                inputs = await _run(size, lambda: model.examples(name, rest.examples(body)))
                outputs = await _compute(loaded, name, inputs)
                return Response(await _run(size, rest.classify_response, outputs), media_type="application/json")

    async def prometheus(_: Request) -> Response:
        return Response(metrics.text(manager), media_type=CONTENT_TYPE_LATEST)

    async def health(_: Request) -> Response:
        return _json({"polled": manager.polled, "models": sorted(manager.models)}, 200 if manager.ready else 503)

    def timed(method: str, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await work(request)
            except RestError as error:
                response = _error_response(error)
            except Exception as error:  # noqa: BLE001  a client gets an answer whatever error a model raises
                response = _json({"error": f"{type(error).__name__}: {error_reason(error)}"}, 500)
            # All unknown names share one label, so that clients cannot create labels without limit.
            model = request.path_params["model"] if request.path_params["model"] in manager.models else _UNKNOWN
            metrics.requests.labels(model, method, str(response.status_code)).inc()
            metrics.seconds.labels(model, method).observe(time.perf_counter() - began)
            return response

        return handler

    routes = []
    for path in ("/v1/models/{model:name}", "/v1/models/{model:name}/versions/{version:name}"):
        routes += [
            Route(f"{path}:predict", timed("predict", predict), methods=["POST"]),
            Route(f"{path}:classify", timed("classify", classify), methods=["POST"]),
            Route(f"{path}/metadata", timed("metadata", metadata)),
            Route(path, timed("status", status)),
        ]
    routes += [Route("/health", health), Route("/metrics", prometheus), Route("/monitoring/prometheus/metrics", prometheus)]
    return Starlette(routes=routes, exception_handlers={HTTPException: _unknown_path})


async def _content(request: Request, count_bytes: Callable[[int], None]) -> bytes:
    """Return the request's uncompressed body. Call `count_bytes` with the size of each piece; it raises RestError at a limit.

    RestError 408 if the body arrives too slowly, 415 if its encoding is unknown, 400 if it is no gzip.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise RestError(415, f"the request has the Content-Encoding {encoding!r}: only gzip, or none, is accepted")
    unpacker = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    pieces = []
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for received in request.stream():
                for piece in _unpack(unpacker, received) if unpacker else (received,):
                    count_bytes(len(piece))
                    pieces.append(piece)
    except TimeoutError:
        raise RestError(
            408, f"the request did not arrive within {BODY_SECONDS:.0f} s: ask for fewer instances at once"
        ) from None
    if unpacker and not unpacker.eof:
        raise RestError(400, "the request is no gzip: it ends too early")
    return b"".join(pieces)


def _unpack(unpacker: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """Decompress a part of a gzip stream in small pieces, since it may grow a thousandfold."""
    try:
        while packed and not unpacker.eof:
            yield unpacker.decompress(packed, _UNPACKED_BYTES)
            packed = unpacker.unconsumed_tail
    except zlib.error as error:
        raise RestError(400, f"the request is no gzip: {error}") from None
    if packed:
        raise RestError(400, "the request is no gzip: bytes follow its end")


async def _run(size: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function on a request of `size` bytes: for a large one in another thread, so that the event loop continues."""
    return await asyncio.to_thread(function, *arguments) if size > _LARGE_BYTES else function(*arguments)


async def _compute(loaded: LoadedVersion, signature: str, inputs: rest.Arrays) -> rest.Arrays:
    assert loaded.batcher is not None
    try:
        return await asyncio.wait_for(asyncio.wrap_future(loaded.batcher.put(signature, inputs)), REQUEST_TIMEOUT)
    except TimeoutError:
        raise RestError(504, f"no answer within {REQUEST_TIMEOUT:.0f} s: ask for fewer instances at once") from None


def _status(loaded: LoadedVersion) -> dict[str, Any]:
    code = "OK" if loaded.state is not LoadState.END else "UNKNOWN"
    status = {"error_code": code, "error_message": loaded.why}
    return {"version": loaded.name, "state": loaded.state, "status": status, "deployment": loaded.deployment}


def _info(tensor: Tensor) -> dict[str, Any]:
    """Return a TensorInfo in the JSON form of protocol buffers."""
    dtype = "DT_STRING" if tensor.dtype is None else _DTYPES.get(tensor.dtype, f"DT_{tensor.dtype.upper()}")
    dims = [{"size": "-1" if size is None else str(size), "name": ""} for size in tensor.shape or ()]
    return {"dtype": dtype, "tensor_shape": {"dim": dims, "unknown_rank": tensor.shape is None}, "name": tensor.name}


_DTYPES = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error_response(error: RestError) -> Response:
    response = _json({"error": str(error)}, error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 408:
        response.headers["Connection"] = "close"  # the rest of the request may never arrive
    return response


async def _unknown_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    requests = "POST /v1/models/MODEL:predict or MODEL:classify, GET /v1/models/MODEL or MODEL/metadata"
    return _json({"error": f"{error.detail}: {requests}"}, error.status_code)
