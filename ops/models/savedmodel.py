"""The signatures of a SavedModel, read from its saved_model.pb without TensorFlow.

Source: the protocol buffers encoding, and TensorFlow's saved_model.proto, meta_graph.proto, tensor_shape.proto, types.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Signatures are for machines that load the model; this one only makes it.
_INTERNAL = "__saved_model_init_op"
_TYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    19: "float16",
    22: "uint32",
    23: "uint64",
}


def signatures(content: bytes) -> dict[str, dict[str, dict[str, str]]]:
    """Each signature's `inputs` and `outputs`, tensors by name, such as `float32 [?, 784]`; ValueError for no SavedModel."""
    found = {}
    try:
        for graph in _all(content, 2):  # SavedModel.meta_graphs
            for entry in _all(graph, 5):  # MetaGraphDef.signature_def
                name, signature = _entry(entry)
                if name != _INTERNAL:
                    found[name] = {"inputs": _tensors(signature, 1), "outputs": _tensors(signature, 2)}
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a SavedModel ({error})") from None
    return dict(sorted(found.items()))


def _tensors(signature: bytes, field: int) -> dict[str, str]:
    return {name: _tensor(info) for name, info in sorted(_entry(entry) for entry in _all(signature, field))}


def _tensor(info: bytes) -> str:
    """A TensorInfo as `int64 [?]`."""
    (number,) = _all(info, 2) or [0]
    (shape,) = _all(info, 3) or [b""]
    kind = _TYPES.get(number, f"type {number}")
    if any(_all(shape, 3)):  # TensorShapeProto.unknown_rank
        return f"{kind} of any shape"
    sizes = [(_all(dim, 1) or [0])[0] for dim in _all(shape, 2)]
    return f"{kind} [{', '.join('?' if size >> 63 else str(size) for size in sizes)}]"  # -1 is any size


def _entry(entry: bytes) -> tuple[str, bytes]:
    """Key and value of a map's entry."""
    (key,), (value,) = _all(entry, 1) or [b""], _all(entry, 2) or [b""]
    return key.decode(), value


def _all(message: bytes, field: int) -> list[Any]:
    return [value for number, value in _fields(message) if number == field]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in order: numbers as int, everything else as bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
