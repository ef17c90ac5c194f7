"""TensorFlow Serving's REST API, version 1: parse requests, format answers, without TensorFlow.

Source: "RESTful API" in TensorFlow Serving's documentation. Versions have names here, as in Cloud ML, and no numbers.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from hosts.serving.signatures import Signature, Tensor, shape_text

SIGNATURE = "serving_default"
_BASE64 = "b64"
_BYTES = "_bytes"  # an output whose name ends so is binary
# NumPy and TensorFlow have no arrays of more dimensions; an array of strings with more crashes TensorFlow.
_DEEPEST = 32
# A float64 holds each whole number below this exactly. One float in a list makes all numbers floats in NumPy.
_MOST_EXACT = 2**53
# No int64 holds this number.
_LEAST_UNSIGNED = 2**63

Arrays = dict[str, np.ndarray[Any, Any]]


class RestError(Exception):
    """A failed request: the HTTP status, one line, and the seconds until a retry is useful."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def body_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. NaN and Infinity are no JSON. RestError 400 if it is not one."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RestError(400, f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RestError(400, "the request must be a JSON object with instances, or inputs")
    return body


def signature_name(body: Mapping[str, Any]) -> str:
    """Return the name of the requested signature."""
    name = body.get("signature_name", SIGNATURE)
    if not isinstance(name, str):
        raise RestError(400, "signature_name must be a string")
    return name or SIGNATURE


def get_signature(signatures: Mapping[str, Signature], name: str) -> Signature:
    """Return the signature of that name; RestError 400 if there is none; it lists those that exist."""
    if name not in signatures:
        raise RestError(400, f"there is no signature {name!r}; there are {', '.join(sorted(signatures)) or 'none'}")
    return signatures[name]


def parse_request(body: Mapping[str, Any], signature: Signature) -> tuple[Arrays, bool]:
    """Return the arrays of a predict request, and whether it is by rows (`instances`, else `inputs`)."""
    if ("instances" in body) == ("inputs" in body):
        raise RestError(400, "the request must have either instances (rows) or inputs (columns)")
    if "instances" in body:
        return _rows(body["instances"], signature), True
    return _columns(body["inputs"], signature), False


def _rows(instances: Any, signature: Signature) -> Arrays:
    if not isinstance(instances, list) or not instances:
        raise RestError(400, "instances must be a list with one instance or more")
    names = signature.inputs
    if isinstance(instances[0], dict) and not (len(names) == 1 and _BASE64 in instances[0]):
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for index, row in enumerate(instances):
            if not isinstance(row, dict) or row.keys() != names.keys():
                keys = ", ".join(sorted(row)) if isinstance(row, dict) else "no object"
                which = f"instance {index}" if len(instances) > 1 else "the instance"
                raise RestError(400, f"{which} has {keys or 'nothing'}; this signature takes {', '.join(sorted(names))}")
            for name in names:
                columns[name].append(row[name])
        return {name: _array(name, values, names[name]) for name, values in columns.items()}
    return _single_input("an instance", instances, names)


def _columns(inputs: Any, signature: Signature) -> Arrays:
    names = signature.inputs
    if isinstance(inputs, dict) and not (len(names) == 1 and _BASE64 in inputs):
        if names.keys() - inputs.keys():  # TensorFlow Serving ignores others, here only
            raise RestError(
                400, f"inputs has {', '.join(sorted(inputs)) or 'nothing'}; this signature takes {', '.join(sorted(names))}"
            )
        return {name: _array(name, inputs[name], names[name]) for name in names}
    return _single_input("inputs", inputs, names)


def _single_input(what: str, value: Any, tensors: Mapping[str, Tensor]) -> Arrays:
    """Return the array of a signature with one input, whose name a request may leave out."""
    if len(tensors) != 1:
        raise RestError(400, f"{what} must be an object with {', '.join(sorted(tensors))}")
    ((name, tensor),) = tensors.items()
    return {name: _array(name, value, tensor)}


def _array(name: str, value: Any, tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a JSON value as an array of the input's dtype; RestError 400 if it is of another dtype or shape."""
    try:
        array = _strings_of(value, name) if tensor.dtype is None else _numbers(name, _as_array(value), tensor.dtype)
    except (ValueError, TypeError, OverflowError):
        raise RestError(400, f"input {name} must be {_expected(tensor)}, all rows of one length") from None
    if not _fits(array.shape, tensor.shape):
        raise RestError(400, f"input {name} has the shape {list(array.shape)}, and must have {shape_text(tensor.shape)}")
    return array


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a JSON value as an array; NumPy makes floats of a list that only uint64 can hold if it has a small number."""
    array = np.asarray(value)
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() >= _LEAST_UNSIGNED:
        elements = np.asarray(value, object)
        if all(isinstance(element, int) for element in elements.flat):
            return elements.astype(np.uint64)
    return array


def _numbers(name: str, array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the numbers in this dtype; they may change by rounding only."""
    if array.dtype.kind not in "fiub":
        raise ValueError(name)
    wanted = np.dtype(dtype)
    if array.size == 0:
        return array.astype(wanted)
    if wanted.kind == "b" and not np.isin(array, (0, 1)).all():
        raise RestError(400, f"input {name} must be true or false")
    if wanted.kind in "iu":
        least, most = np.iinfo(wanted).min, np.iinfo(wanted).max
        if np.any(array != np.floor(array)) or not least <= array.min().item() <= array.max().item() <= most:
            raise RestError(400, f"input {name} must be whole numbers from {least} to {most}")
        if array.dtype.kind == "f" and np.abs(array).max() >= _MOST_EXACT:
            raise RestError(
                400, f"input {name} has numbers that a float cannot hold exactly: write all without point or exponent"
            )
    with np.errstate(over="ignore"):
        numbers = array.astype(wanted)
    if wanted.kind not in "biu" and not np.isfinite(numbers.astype(np.float64)).all():  # bfloat16 is of a kind of its own
        raise RestError(400, f"input {name} has a number that is too large for {dtype}")
    return numbers


def _strings_of(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the strings as bytes; ValueError if lists differ in length, which NumPy would keep as elements."""
    array = np.array(_decoded(value, name), dtype=object)
    if not all(isinstance(item, bytes) for item in array.flat):
        raise ValueError(name)
    return array


def _expected(tensor: Tensor) -> str:
    return "strings" if tensor.dtype is None else "numbers"


def _decoded(value: Any, name: str, depth: int = 0) -> Any:
    """Return the value with strings as bytes; `{"b64": …}` is decoded."""
    if isinstance(value, list):
        if depth == _DEEPEST:
            raise RestError(400, f"input {name} has lists nested {_DEEPEST} deep, and no tensor has that many dimensions")
        return [_decoded(item, name, depth + 1) for item in value]
    content = string_to_bytes(value)
    if not isinstance(content, bytes):
        raise ValueError(value)
    return content


def string_to_bytes(value: Any) -> Any:
    """Return a string, or a `{"b64": …}`, as bytes, and any other value unchanged; RestError 400 if it is no base64.

    As in TensorFlow Serving, base64 may have white space and lack its padding.
    """
    if isinstance(value, dict) and value.keys() == {_BASE64}:
        try:
            content = "".join(value[_BASE64].split())
            return base64.b64decode(content + "=" * (-len(content) % 4), validate=True)
        except (AttributeError, binascii.Error, ValueError):
            raise RestError(400, "b64 is no base64") from None
    return value.encode() if isinstance(value, str) else value


def _fits(shape: Sequence[int], expected: Sequence[int | None] | None) -> bool:
    if expected is None:
        return True
    return len(shape) == len(expected) and all(want in (None, size) for size, want in zip(shape, expected, strict=True))


def answer(outputs: Arrays, by_rows: bool) -> bytes:
    """Return the body of a predict answer: `predictions`, one a row, or `outputs`. A single output has no name."""
    if by_rows:
        return _json({"predictions": _by_instance(outputs)}, outputs)
    columns = _columns_of(outputs)
    return _json({"outputs": columns if len(columns) > 1 else next(iter(columns.values()), columns)}, outputs)


def prediction_rows(outputs: Arrays, count: int) -> list[bytes]:
    """Return each element of the `predictions` of `answer` as JSON; RestError 400 if their number is not `count`."""
    values = _by_instance(outputs)
    if len(values) != count:
        raise RestError(400, f"the outputs of this signature have {len(values)} rows for {count} instances")
    encode = _encoder(outputs)
    return [encode(row) for row in values]


def _by_instance(outputs: Arrays) -> list[Any]:
    """Return a value for each row of the outputs; a single output has no name."""
    if len(_row_counts(outputs)) != 1 or None in _row_counts(outputs):
        raise RestError(400, "the outputs of this signature have not one row for each instance: ask by columns (inputs)")
    columns = _columns_of(outputs)
    if len(columns) == 1:
        only: list[Any] = next(iter(columns.values()))
        return only
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns_of(outputs: Arrays) -> dict[str, Any]:
    """Return the outputs sorted by name: TensorFlow's order differs between processes."""
    return {name: _plain(name, outputs[name]) for name in sorted(outputs)}


def examples(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the examples of a classify request, each with the features of the shared `context`."""
    items, context = _examples_and_context(body)
    return [{**context, **item} for item in items]


def copied_bytes(body: Mapping[str, Any]) -> int:
    """Return the bytes of JSON by which `examples` enlarges a classify request: it copies `context` into each example."""
    items, context = _examples_and_context(body)
    try:
        return len(orjson.dumps(context)) * len(items) if context else 0
    except orjson.JSONEncodeError:
        raise RestError(400, "context has lists that are nested too deep") from None


def _examples_and_context(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    items, context = body.get("examples"), body.get("context", {})
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in [*items, context]):
        raise RestError(400, "examples must be a list of objects, feature to value, and context one such object")
    return items, context


def classify_response(outputs: Arrays) -> bytes:
    """Return the body of a classify response: pairs of label and score; labels are `classes` if one per score, else 0, 1, …."""
    scores = outputs.get("scores", outputs.get("probabilities"))
    if scores is None or scores.ndim != 2:
        raise RestError(400, f"this signature gives {', '.join(sorted(outputs))}: to classify takes scores of each class")
    labels = outputs.get("classes")
    if labels is None or labels.shape != scores.shape:
        names: Any = [[str(index) for index in range(scores.shape[1])]] * len(scores)
    else:
        names = _plain("classes", labels)
    pairs = [[list(pair) for pair in zip(*row, strict=True)] for row in zip(names, scores.tolist(), strict=True)]
    return _json({"results": pairs}, {"scores": scores})


def _row_counts(outputs: Arrays) -> set[int | None]:
    return {array.shape[0] if array.ndim else None for array in outputs.values()}


def _plain(name: str, array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == object or array.dtype.kind in "SU":
        return _strings(array.tolist(), name.endswith(_BYTES))
    return array.tolist()


def _strings(value: Any, binary: bool) -> Any:
    if isinstance(value, list):
        return [_strings(item, binary) for item in value]
    content = value if isinstance(value, bytes) else str(value).encode()
    if binary:
        return {_BASE64: base64.b64encode(content).decode()}
    return content.decode("utf-8", "replace")


def _json(value: Any, arrays: Arrays) -> bytes:
    return _encoder(arrays)(value)


def _encoder(arrays: Arrays) -> Callable[[Any], bytes]:
    """Return a function that writes values of these arrays as JSON.

    NaN and Infinity are written as by TensorFlow Serving, which Python reads.
    """
    floats = [array for array in arrays.values() if array.dtype.kind in "fV" and not array.dtype.names]  # bfloat16 is a "V"
    if all(np.isfinite(array).all() for array in floats):
        return orjson.dumps
    return lambda value: json.dumps(value, separators=(",", ":")).encode()
