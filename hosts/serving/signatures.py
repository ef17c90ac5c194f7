"""The signatures of a SavedModel, read from its saved_model.pb without TensorFlow.

Source: the protocol buffers encoding, and TensorFlow's saved_model.proto, meta_graph.proto, tensor_shape.proto, types.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Signatures of TensorFlow's own begin so.
_PRIVATE = "__saved_model"
_STRING = 7
_TYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
}


@dataclass(frozen=True)
class Tensor:
    """An input or output of a signature: NumPy kind, None for texts, and shape, None for any; its name in the graph."""

    dtype: str | None
    shape: tuple[int | None, ...] | None
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Signature:
    """A function of a model."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def by_rows(self) -> bool:
        """True if each input row gives an output row by the shapes: then requests can be batched."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        return bool(self.inputs) and all(tensor.shape and tensor.shape[0] is None for tensor in tensors)


def shape_text(shape: Sequence[int | None] | None) -> str:
    """Return a shape as `[?, 784]`."""
    return "any" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def read_signatures(content: bytes) -> dict[str, Signature]:
    """Return the signatures of a saved_model.pb by name.

    Raises:
        ValueError: if the content is no SavedModel.
    """
    by_name = {}
    try:
        for graph in _values(content, 2):  # SavedModel.meta_graphs
            for entry in _values(graph, 5):  # MetaGraphDef.signature_def
                name, signature = _entry(entry)
                if not name.startswith(_PRIVATE):
                    by_name[name] = Signature(_tensors(signature, 1), _tensors(signature, 2))
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a SavedModel ({error})") from None
    return dict(sorted(by_name.items()))


def _tensors(signature: bytes, number: int) -> dict[str, Tensor]:
    return {name: _tensor(info) for name, info in sorted(_entry(entry) for entry in _values(signature, number))}


def _tensor(info: bytes) -> Tensor:
    """Parse a TensorInfo."""
    (name,) = _values(info, 1) or [b""]
    (kind,) = _values(info, 2) or [0]
    (shape,) = _values(info, 3) or [b""]
    dtype = None if kind == _STRING else _TYPES.get(kind, f"type {kind}")
    if any(_values(shape, 3)):  # TensorShapeProto.unknown_rank
        return Tensor(dtype, None, str(name, "utf-8"))
    sizes = [(_values(dim, 1) or [0])[0] for dim in _values(shape, 2)]
    return Tensor(dtype, tuple(None if size >> 63 else size for size in sizes), str(name, "utf-8"))  # -1 is any size


def _entry(entry: bytes) -> tuple[str, bytes]:
    """Return key and value of a map's entry."""
    (key,), (value,) = _values(entry, 1) or [b""], _values(entry, 2) or [b""]
    if not isinstance(key, bytes) or not isinstance(value, bytes):
        raise ValueError("an entry of a map whose key or value is a number")
    return key.decode(), value


def _values(message: bytes, number: int) -> list[Any]:
    """Return the values of a field, in order: numbers as int, everything else as bytes."""
    return [value for field_number, value in _fields(message) if field_number == number]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message in order."""
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
    """Decode a number, seven bits a byte; return it and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
