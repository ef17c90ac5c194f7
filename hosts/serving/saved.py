"""A SavedModel in this process: its signatures as functions of NumPy arrays.

It is the only module here that imports TensorFlow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hosts.serving.download import NO_SIGNATURE
from hosts.serving.rest import Arrays, RestError, Signature, Tensor


@cache
def tensorflow() -> Any:
    """Import and return TensorFlow, which takes seconds; call it in a background thread."""
    import tensorflow as tf

    return tf


class ServingModel:
    """A SavedModel that was loaded. `run` is for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Load a SavedModel; raise TensorFlow's error if that fails."""
        tf = tensorflow()
        self._model = tf.saved_model.load(str(folder))  # the functions live as long as it does
        self._functions = dict(self._model.signatures)
        if not self._functions:
            raise ValueError(f"the model {NO_SIGNATURE}")
        self.signatures = {name: _signature(function) for name, function in self._functions.items()}

    def warm_up(self) -> None:
        """Run signatures with zeros, so that the first request does not wait for TensorFlow's set-up."""
        for name, signature in self.signatures.items():
            inputs = {key: _zeros(tensor) for key, tensor in signature.inputs.items()}
            if all(array is not None for array in inputs.values()):
                with contextlib.suppress(Exception):  # zeros are no input of every model
                    self.run(name, inputs)  # type: ignore[arg-type]  # there is no None in it

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        """Return the outputs of a signature.

        Raises:
            RestError: 400 if the model refuses the inputs.
        """
        tf = tensorflow()
        try:
            tensors = {name: tf.constant(array) for name, array in inputs.items()}
            outputs = self._functions[signature](**tensors)
            return {name: output.numpy() for name, output in outputs.items()}
        except (tf.errors.InvalidArgumentError, ValueError, TypeError) as error:
            raise RestError(400, f"the model refuses the input: {str(error).partition(chr(10))[0]}") from None

    def examples(self, signature: str, examples: Sequence[Mapping[str, Any]]) -> Arrays:
        """Return a signature's inputs for examples: serialized if it takes one text, else by name.

        The serialized form is tf.train.Example.
        """
        inputs = self.signatures[signature].inputs
        if len(inputs) == 1 and next(iter(inputs.values())).dtype is None:
            serialized = [_example(example) for example in examples]
            return {next(iter(inputs)): np.array(serialized, dtype=object)}
        from hosts.serving.rest import predict

        return predict({"instances": [dict(example) for example in examples]}, self.signatures[signature])[0]


def _signature(function: Any) -> Signature:
    _, keywords = function.structured_input_signature
    inputs = {name: _tensor(spec) for name, spec in keywords.items()}
    outputs = {name: _tensor(spec) for name, spec in function.structured_outputs.items()}
    return Signature(inputs, outputs)


def _tensor(spec: Any) -> Tensor:
    kind = None if spec.dtype == tensorflow().string else spec.dtype.as_numpy_dtype
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return Tensor(None if kind is None else np.dtype(kind).name, shape)


def _zeros(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if tensor.dtype is None or tensor.shape is None:
        return None
    return np.zeros([1 if size is None else size for size in tensor.shape], tensor.dtype)


def _example(features: Mapping[str, Any]) -> bytes:
    """Return a tf.train.Example; numbers with a point are floats, whole ones int64, texts bytes."""
    train = tensorflow().train
    present = {}
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in values):
            present[name] = train.Feature(bytes_list=train.BytesList(value=[item.encode() for item in values]))
        elif all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in values):
            present[name] = train.Feature(int64_list=train.Int64List(value=values))
        elif all(isinstance(item, int | float) for item in values):
            present[name] = train.Feature(float_list=train.FloatList(value=values))
        else:
            raise RestError(400, f"feature {name} must be a number, a text, or a list of either")
    content: bytes = train.Example(features=train.Features(feature=present)).SerializeToString()
    return content
