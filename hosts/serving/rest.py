"""TensorFlow Serving's REST API, version 1: parse requests and format responses without TensorFlow.

Source: "RESTful API" in TensorFlow Serving's documentation. Here versions have names, as in Cloud ML, instead of numbers.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from jobs.model_signatures import Signature, Tensor, shape_text

SIGNATURE = "serving_default"
_BASE64 = "b64"
_BYTES = "_bytes"  # the suffix of the name of a binary output
# An array of strings with more dimensions crashes TensorFlow.
_MAX_STRING_RANK = 32
# A float64 holds each integer below this exactly. NumPy makes all numbers of a list floats if one of them is a float.
_FLOAT64_EXACT = 2**53
# The first integer that is too large for int64.
_INT64_LIMIT = 2**63

Arrays = dict[str, np.ndarray[Any, Any]]


class RestError(Exception):
    """A failed request: the HTTP status, one line, and the seconds until a retry is useful."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def body_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. RestError 400 if it is none; NaN and Infinity are no JSON."""
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
    """Return the signature of that name; if there is none, RestError 400 lists those that exist."""
    if name not in signatures:
        raise RestError(400, f"there is no signature {name!r}; there are {', '.join(sorted(signatures)) or 'none'}")
    return signatures[name]


def parse_request(body: Mapping[str, Any], signature: Signature) -> tuple[Arrays, bool]:
    """Return the arrays of a predict request, and True if it has rows (`instances`), False if columns (`inputs`)."""
    if ("instances" in body) == ("inputs" in body):
        raise RestError(400, "the request must have either instances (rows) or inputs (columns)")
    if "instances" in body:
        return _parse_rows(body["instances"], signature), True
    return _parse_columns(body["inputs"], signature), False


def _parse_rows(instances: Any, signature: Signature) -> Arrays:
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
        return {name: _parse_array(name, values, names[name]) for name, values in columns.items()}
    return _single_input("an instance", instances, names)


def _parse_columns(inputs: Any, signature: Signature) -> Arrays:
    names = signature.inputs
    if isinstance(inputs, dict) and not (len(names) == 1 and _BASE64 in inputs):
        if names.keys() - inputs.keys():  # additional names are ignored, as TensorFlow Serving does for columns only
            raise RestError(
                400, f"inputs has {', '.join(sorted(inputs)) or 'nothing'}; this signature takes {', '.join(sorted(names))}"
            )
        return {name: _parse_array(name, inputs[name], names[name]) for name in names}
    return _single_input("inputs", inputs, names)


def _single_input(what: str, value: Any, tensors: Mapping[str, Tensor]) -> Arrays:
    """Return the array of a signature with one input, whose name a request may leave out."""
    if len(tensors) != 1:
        raise RestError(400, f"{what} must be an object with {', '.join(sorted(tensors))}")
    ((name, tensor),) = tensors.items()
    return {name: _parse_array(name, value, tensor)}


def _parse_array(name: str, value: Any, tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a JSON value as an array of the input's dtype; RestError 400 if it is of another dtype or shape."""
    try:
        array = _string_array(value, name) if tensor.dtype is None else _cast_numbers(name, _number_array(value), tensor.dtype)
    except (ValueError, TypeError, OverflowError):
        kind = "strings" if tensor.dtype is None else "numbers"
        raise RestError(400, f"input {name} must be {kind}, all rows of one length") from None
    if not _fits(array.shape, tensor.shape):
        raise RestError(400, f"input {name} has the shape {list(array.shape)}, and must have {shape_text(tensor.shape)}")
    return array


def _number_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a JSON value as an array: of uint64 if NumPy would convert integers above int64 to floats."""
    array = np.asarray(value)
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() >= _INT64_LIMIT:
        elements = np.asarray(value, object)
        if all(isinstance(element, int) for element in elements.flat):
            return elements.astype(np.uint64)
    return array


def _cast_numbers(name: str, array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Convert numbers to this dtype; RestError 400 if more than rounding would change them."""
    if array.dtype.kind not in "fiub":
        raise ValueError(name)
    target = np.dtype(dtype)
    if array.size == 0:
        return array.astype(target)
    if target.kind == "b" and not np.isin(array, (0, 1)).all():
        raise RestError(400, f"input {name} must be true or false")
    if target.kind in "iu":
        least, most = np.iinfo(target).min, np.iinfo(target).max
        if np.any(array != np.floor(array)) or not least <= array.min().item() <= array.max().item() <= most:
            raise RestError(400, f"input {name} must be whole numbers from {least} to {most}")
        if array.dtype.kind == "f" and np.abs(array).max() >= _FLOAT64_EXACT:
            raise RestError(
                400, f"input {name} has numbers that a float cannot hold exactly: write all without point or exponent"
            )
    with np.errstate(over="ignore"):
        numbers = array.astype(target)
    if target.kind not in "biu" and not np.isfinite(numbers.astype(np.float64)).all():  # the kind of bfloat16 is "V"
        raise RestError(400, f"input {name} has a number that is too large for {dtype}")
    return numbers


def _string_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Return an array of bytes; ValueError if nested lists differ in length: NumPy keeps those as elements."""
    array = np.array(_strings_to_bytes(value, name), dtype=object)
    if not all(isinstance(item, bytes) for item in array.flat):
        raise ValueError(name)
    return array


def _strings_to_bytes(value: Any, name: str, depth: int = 0) -> Any:
    """Return the value with each string, or `{"b64": …}`, as bytes."""
    if isinstance(value, list):
        if depth == _MAX_STRING_RANK:
            raise RestError(400, f"input {name} must have at most {_MAX_STRING_RANK} dimensions, the limit for strings")
        return [_strings_to_bytes(item, name, depth + 1) for item in value]
    content = string_to_bytes(value)
    if not isinstance(content, bytes):
        raise ValueError(value)
    return content


def string_to_bytes(value: Any) -> Any:
    """Return a string, or a `{"b64": …}`, as bytes, and any other value unchanged; RestError 400 if it is no base64.

    As in TensorFlow Serving, base64 may contain white space, and its padding is optional.
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
    return len(shape) == len(expected) and all(limit in (None, size) for size, limit in zip(shape, expected, strict=True))


def predict_response(outputs: Arrays, by_rows: bool) -> bytes:
    """Return the body of a predict response: `predictions`, one per row, or `outputs`; a single output is without its name."""
    if by_rows:
        return _json({"predictions": _row_values(outputs)}, outputs)
    columns = _output_values(outputs)
    return _json({"outputs": columns if len(columns) > 1 else next(iter(columns.values()), columns)}, outputs)


def prediction_rows(outputs: Arrays, count: int) -> list[bytes]:
    """Return each element of `predictions` as JSON; RestError 400 if there are not `count`."""
    values = _row_values(outputs)
    if len(values) != count:
        raise RestError(400, f"the outputs of this signature have {len(values)} rows for {count} instances")
    encode = _encoder(outputs)
    return [encode(row) for row in values]


def _row_values(outputs: Arrays) -> list[Any]:
    """Return one value per row: a dict by output name, or the bare value of a single output."""
    counts = {array.shape[0] if array.ndim else None for array in outputs.values()}
    if len(counts) != 1 or None in counts:
        raise RestError(400, "the outputs of this signature have not one row for each instance: ask by columns (inputs)")
    columns = _output_values(outputs)
    if len(columns) == 1:
        only: list[Any] = next(iter(columns.values()))
        return only
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _output_values(outputs: Arrays) -> dict[str, Any]:
    """Return the outputs as JSON values, sorted by name: TensorFlow's order differs between processes."""
    return {name: _json_value(name, outputs[name]) for name in sorted(outputs)}


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
    """Return the body of a classify response: for each example a list of pairs `[label, score]`.

    The labels are the output `classes`, or 0, 1, … if it is absent or its shape is not that of the scores.
    """
    scores = outputs.get("scores", outputs.get("probabilities"))
    if scores is None or scores.ndim != 2:
        needed = "classify needs an output scores or probabilities of the shape [examples, classes]"
        raise RestError(400, f"{needed}; this signature has {', '.join(sorted(outputs))}")
    labels = outputs.get("classes")
    if labels is None or labels.shape != scores.shape:
        names: Any = [[str(index) for index in range(scores.shape[1])]] * len(scores)
    else:
        names = _json_value("classes", labels)
    pairs = [[list(pair) for pair in zip(*row, strict=True)] for row in zip(names, scores.tolist(), strict=True)]
    return _json({"results": pairs}, {"scores": scores})


def _json_value(name: str, array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == object or array.dtype.kind in "SU":
        return _json_strings(array.tolist(), name.endswith(_BYTES))
    return array.tolist()


def _json_strings(value: Any, binary: bool) -> Any:
    if isinstance(value, list):
        return [_json_strings(item, binary) for item in value]
    content = value if isinstance(value, bytes) else str(value).encode()
    if binary:
        return {_BASE64: base64.b64encode(content).decode()}
    return content.decode("utf-8", "replace")


def _json(value: Any, arrays: Arrays) -> bytes:
    return _encoder(arrays)(value)


def _encoder(arrays: Arrays) -> Callable[[Any], bytes]:
    """Return a function that writes values of these arrays as JSON.

    NaN and Infinity are written as TensorFlow Serving writes them; Python's json module reads them.
    """
    floats = [array for array in arrays.values() if array.dtype.kind in "fV" and not array.dtype.names]  # bfloat16 is a "V"
    if all(np.isfinite(array).all() for array in floats):
        return orjson.dumps
    return lambda value: json.dumps(value, separators=(",", ":")).encode()
