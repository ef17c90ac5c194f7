"""What a line or a record of the input says: an instance, as the server takes it. RestError where it says none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson

from predictor.library import tensorflow
from serving.rest import RestError, Signature, Tensor

_RAW = "_raw"
KEY = "key"


def of_line(line: bytes) -> Any:
    """The JSON value of a line."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RestError(400, f"is no JSON: {error}") from None


def of_record(record: bytes, signature: Signature, key: int) -> Any:
    """The features of a tf.train.Example that are named as inputs, in their shapes; others are passed over.

    An input of numbers that it lacks is made of the bytes NAME_raw, one an element, as images are kept: as they are for whole
    numbers, from 0 to 1 for others. `key` is its number, for a signature that takes a `key` where the record has none. A
    signature with one input of texts gets the record itself, where no feature has its name.
    """
    inputs = signature.inputs
    try:
        found = tensorflow().example.Example.FromString(record).features.feature
    except Exception as error:  # noqa: BLE001  protobuf has errors of its own
        raise RestError(400, f"is no tf.train.Example: {error}") from None
    features = {name: _values(found[name]) for name in found}
    if len(inputs) == 1 and not features.keys() & inputs.keys():
        ((name, tensor),) = inputs.items()
        if tensor.dtype is None:
            return {name: record}
    instance: dict[str, Any] = {}
    for name, tensor in inputs.items():
        if name in features:
            instance[name] = _shaped(features[name], tensor)
        elif name + _RAW in features and tensor.dtype is not None:
            instance[name] = _shaped(_bytes(features[name + _RAW], np.dtype(tensor.dtype)), tensor)
        elif name == KEY and tensor.dtype is not None and np.dtype(tensor.dtype).kind in "iu":
            instance[name] = key
    return instance


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []


def _bytes(values: list[Any], kind: np.dtype[Any]) -> Any:
    """The elements that one value of bytes is, as numbers of that kind; whatever else there is, as it is."""
    if len(values) != 1 or not isinstance(values[0], bytes):
        return values
    found = np.frombuffer(values[0], np.uint8)
    return (found / np.float32(255)).astype(kind) if kind.kind == "f" else found


def _shaped(values: Any, tensor: Tensor) -> Any:
    """As the input has it, without the first dimension; what has another size stays flat, which is refused later."""
    wanted = [-1 if size is None else size for size in (tensor.shape or (None, None))[1:]]
    known = math.prod(size for size in wanted if size >= 0)
    if wanted.count(-1) > 1 or not known or len(values) % known or (-1 not in wanted and len(values) != known):
        return values
    array = np.asarray(values, object if tensor.dtype is None else None).reshape(wanted)
    return array.tolist() if tensor.dtype is None or not wanted else array
