"""Read the signatures of a SavedModel from its saved_model.pb, without TensorFlow.

Source: the protocol buffers encoding, and TensorFlow's saved_model.proto, meta_graph.proto, tensor_shape.proto, types.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TAG = "serve"
"""The only tag of the graph that is served."""
# The names of TensorFlow's internal signatures begin with this.
_PRIVATE = "__saved_model"
# Numbers of data types in types.proto.
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
    """An input or output of a signature.

    Attributes:
        dtype: the name of its type, mostly as in NumPy; None for strings.
        shape: its sizes, each None if unknown; None if the rank is unknown.
        name: the name of the tensor in the graph.
    """

    dtype: str | None
    shape: tuple[int | None, ...] | None
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Signature:
    """A function of a model."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def batchable(self) -> bool:
        """True if all shapes have a first dimension of unknown size: each input row gives one output row."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        return bool(self.inputs) and all(tensor.shape and tensor.shape[0] is None for tensor in tensors)


def shape_text(shape: Sequence[int | None] | None) -> str:
    """Return a shape as text, such as `[?, 784]`; `any` if the rank is unknown."""
    return "any" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def read_signatures(content: bytes) -> dict[str, Signature]:
    """Return the signatures of a saved_model.pb by name; ValueError if the content is not a SavedModel."""
    by_name, other_tags = dict[str, Signature](), set[str]()
    try:
        for graph in _values(content, 2):  # SavedModel.meta_graphs
            for info in _values(graph, 1):  # MetaGraphDef.meta_info_def
                tags = {str(tag, "utf-8") for tag in _values(info, 4)}
                if tags != {TAG}:
                    other_tags.add("+".join(sorted(tags)) or "none")
                    break
            else:
                by_name.update(_signatures_of(graph))
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a SavedModel ({error})") from None
    if other_tags and not by_name:
        raise ValueError(f"no graph of the model has the tag {TAG} alone; there are {', '.join(sorted(other_tags))}")
    return dict(sorted(by_name.items()))


def _signatures_of(graph: bytes) -> Iterator[tuple[str, Signature]]:
    """Yield the signatures of a MetaGraphDef with their names."""
    for entry in _values(graph, 5):  # MetaGraphDef.signature_def
        name, signature = _entry(entry)
        if not name.startswith(_PRIVATE):
            yield name, Signature(_tensors(signature, 1), _tensors(signature, 2))


def _tensors(signature: bytes, number: int) -> dict[str, Tensor]:
    """Return the tensors of a SignatureDef: field 1 has the inputs, field 2 the outputs."""
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
    """Return the key and the value of an entry of a map."""
    (key,), (value,) = _values(entry, 1) or [b""], _values(entry, 2) or [b""]
    if not isinstance(key, bytes) or not isinstance(value, bytes):
        raise ValueError("the key or value of an entry of a map is a number")
    return key.decode(), value


def _values(message: bytes, number: int) -> list[Any]:
    """Return the values of the field with this number, in order: numbers as int, others as bytes."""
    return [value for field_number, value in _fields(message) if field_number == number]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message, in order."""
    at = 0  # the index of the next byte
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
    """Decode a number with seven bits per byte; return it and the index of the byte after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
