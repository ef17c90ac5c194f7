"""The signatures of a SavedModel, read from its saved_model.pb without TensorFlow.

Source: the protocol buffers encoding, and TensorFlow's saved_model.proto, meta_graph.proto, tensor_shape.proto, types.proto.
"""

from __future__ import annotations

from ops.models.protobuf import all_of, entry_of

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
    """Return each signature's `inputs` and `outputs`, tensors by name, such as `float32 [?, 784]`.

    Raises:
        ValueError: if the content is no SavedModel.
    """
    by_name = {}
    try:
        for graph in all_of(content, 2):  # SavedModel.meta_graphs
            for entry in all_of(graph, 5):  # MetaGraphDef.signature_def
                name, signature = entry_of(entry)
                if name != _INTERNAL:
                    by_name[name] = {"inputs": _tensors(signature, 1), "outputs": _tensors(signature, 2)}
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a SavedModel ({error})") from None
    return dict(sorted(by_name.items()))


def _tensors(signature: bytes, field: int) -> dict[str, str]:
    return {name: _tensor(info) for name, info in sorted(entry_of(entry) for entry in all_of(signature, field))}


def _tensor(info: bytes) -> str:
    """Format a TensorInfo as `int64 [?]`."""
    (number,) = all_of(info, 2) or [0]
    (shape,) = all_of(info, 3) or [b""]
    kind = _TYPES.get(number, f"type {number}")
    if any(all_of(shape, 3)):  # TensorShapeProto.unknown_rank
        return f"{kind} of any shape"
    sizes = [(all_of(dim, 1) or [0])[0] for dim in all_of(shape, 2)]
    return f"{kind} [{', '.join('?' if size >> 63 else str(size) for size in sizes)}]"  # -1 is any size
