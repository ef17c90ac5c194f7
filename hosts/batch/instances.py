"""Parse a line or a record of an input file into an instance of a prediction request; RestError if it is invalid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson

from hosts.serving.rest import RestError
from hosts.serving.saved import tensorflow
from jobs.model_signatures import Signature, Tensor

_RAW = "_raw"
KEY = "key"
"""An integer input of this name, without a feature in a TFRecord, gets the record's number, counted over all input files."""


def parse_line(line: bytes, signature: Signature) -> Any:
    """Return the JSON value of a line.

    If the only input takes strings, a line that is no JSON, or a JSON number, boolean or null, is itself the input's text.
    """
    takes_text = [tensor.dtype for tensor in signature.inputs.values()] == [None]
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if takes_text:
            return line
        raise RestError(400, f"is no JSON: {error}") from None
    return line if takes_text and (value is None or isinstance(value, int | float)) else value


def parse_record(record: bytes, signature: Signature, key: int) -> Any:
    """Return the input values of a tf.train.Example: the features that have the inputs' names, in the inputs' shapes.

    If the feature of a numeric input NAME is missing, read the feature NAME_raw, one byte per element, as images are stored;
    bytes for a float input are divided by 255. A missing integer input `key` gets the argument `key`. A single input of strings
    gets the whole record if no feature has its name.
    """
    inputs = signature.inputs
    try:
        feature_map = tensorflow().example.Example.FromString(record).features.feature
    except Exception as error:  # noqa: BLE001  protobuf has errors of its own
        raise RestError(400, f"is no tf.train.Example: {error}") from None
    features = {name: _values(feature_map[name]) for name in feature_map}
    if len(inputs) == 1 and not features.keys() & inputs.keys():
        ((name, tensor),) = inputs.items()
        if tensor.dtype is None:
            return {name: record}
    instance: dict[str, Any] = {}
    for name, tensor in inputs.items():
        if name in features:
            instance[name] = _shaped(features[name], tensor)
        elif name + _RAW in features and tensor.dtype is not None:
            instance[name] = _shaped(_numbers_from_bytes(features[name + _RAW], np.dtype(tensor.dtype)), tensor)
        elif name == KEY and tensor.dtype is not None and np.dtype(tensor.dtype).kind in "iu":
            instance[name] = key
    if len(instance) < len(inputs):
        names = f"the features {', '.join(sorted(features))}" if features else "no features"
        raise RestError(400, f"has {names}; this signature takes {', '.join(sorted(inputs))}")
    return instance


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []


def _numbers_from_bytes(values: list[Any], kind: np.dtype[Any]) -> Any:
    """Convert a single bytes value to uint8, or for floats to float32 from 0 to 1; return other values unchanged."""
    if len(values) != 1 or not isinstance(values[0], bytes):
        return values
    elements = np.frombuffer(values[0], np.uint8)
    return elements if kind.kind in "biu" else elements / np.float32(255)  # the kind of bfloat16 is "V"


def _shaped(values: Any, tensor: Tensor) -> Any:
    """Return the values in the input's shape without the first dimension, the batch.

    Values that do not fit the shape stay flat; a later check refuses them.
    """
    shape = [-1 if size is None else size for size in (tensor.shape or (None, None))[1:]]
    elements = math.prod(size for size in shape if size >= 0)
    if shape.count(-1) > 1 or not elements or len(values) % elements or (-1 not in shape and len(values) != elements):
        return values
    array = np.asarray(values, object if tensor.dtype is None else None).reshape(shape)
    return array.tolist() if tensor.dtype is None else array
