"""A SavedModel in a session of TensorFlow, a `predicting.Runs`: a batch needs no more of TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hosts.batch.library import tensorflow
from hosts.serving.download import NO_SIGNATURE
from hosts.serving.rest import Arrays, RestError, Signature, Tensor

_TAG = "serve"
# Signatures of TensorFlow's own begin so.
_PRIVATE = "__saved_model"


class PredictorModel:
    """A SavedModel that was loaded. `run` is for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Load a SavedModel; raise TensorFlow's error if that fails."""
        tf = tensorflow()
        self._session = tf.session.Session(graph=tf.ops.Graph())
        definitions = tf.saved_model.SavedModelLoader(str(folder)).load(self._session, [_TAG]).signature_def
        signatures = {
            name: definitions[name] for name in definitions if not name.startswith(_PRIVATE) and definitions[name].outputs
        }
        if not signatures:
            raise ValueError(f"the model {NO_SIGNATURE}")
        self.signatures = {name: Signature(_tensors(s.inputs), _tensors(s.outputs)) for name, s in signatures.items()}
        self._calls = {name: self._callable(signature) for name, signature in signatures.items()}

    def _callable(self, signature: Any) -> Any:
        element = self._session.graph.as_graph_element
        inputs = [element(info.name) for _, info in sorted(signature.inputs.items())]
        return self._session.make_callable({name: info.name for name, info in signature.outputs.items()}, feed_list=inputs)

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        """Return the outputs of a signature.

        Raises:
            RestError: 400 if the model refuses the inputs.
        """
        errors = tensorflow().errors
        try:
            outputs = self._calls[signature](*(inputs[name] for name in sorted(inputs)))
            return {name: np.asarray(output) for name, output in outputs.items()}
        except (errors.InvalidArgumentError, ValueError, TypeError) as error:
            raise RestError(400, f"the model refuses the input: {str(error).partition(chr(10))[0]}") from None


def _tensors(infos: Any) -> dict[str, Tensor]:
    return {name: _tensor(info) for name, info in infos.items()}


def _tensor(info: Any) -> Tensor:
    kind = tensorflow().dtypes.as_dtype(info.dtype)
    shape = None if info.tensor_shape.unknown_rank else tuple(None if d.size < 0 else d.size for d in info.tensor_shape.dim)
    return Tensor(None if kind == tensorflow().dtypes.string else np.dtype(kind.as_numpy_dtype).name, shape)
