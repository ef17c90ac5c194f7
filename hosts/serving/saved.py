"""Run a SavedModel in a TensorFlow session, for the model server and for batch predictions.

As in TensorFlow Serving, a signature is a part of the graph. Server and batches import TensorFlow only by this module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hosts.serving.rest import Arrays, RestError, parse_request, string_to_bytes
from jobs.model_download import MODEL_FILE, NO_SIGNATURE
from jobs.model_signatures import TAG, Signature, Tensor, read_signatures

# What TensorFlow writes before the reason of an error: a heading, the number of errors of several operations, their names.
_ERROR_PREFIX = re.compile(r"\A(Graph execution error:|\d+ root error\(s\) found\.|\(0\) [A-Z_]+: |\{\{[^}]*\}\}|\s)*")


@dataclass(frozen=True)
class Library:
    """The TensorFlow modules that are used here."""

    errors: Any
    file_io: Any
    record_io: Any
    example: Any
    ops: Any
    session: Any
    saved_model: Any


@cache
def tensorflow() -> Library:
    """Import TensorFlow's C++ library and the Python modules that run a graph.

    The whole package takes 2 s of CPU time, these modules 1 s, most of the time of a small batch. So they are imported without
    the package's `__init__`; a test checks that this works in the hosts' version.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # the default of trainers, too
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # a trainer may use the same GPU
    spec = importlib.util.find_spec("tensorflow")
    if "tensorflow" not in sys.modules and spec is not None and spec.submodule_search_locations:
        package = types.ModuleType("tensorflow")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tensorflow"] = package
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # no warnings that TensorFlow 1's functions are deprecated
    return Library(
        *(
            importlib.import_module(f"tensorflow.{name}")
            for name in (
                "python.framework.errors",
                "python.lib.io.file_io",
                "python.lib.io._pywrap_record_io",
                "core.example.example_pb2",
                "python.framework.ops",
                "python.client.session",
                "python.saved_model.loader_impl",
            )
        )
    )


class SavedModel:
    """A loaded SavedModel. Only one thread at a time may call `run`."""

    def __init__(self, folder: Path) -> None:
        """Load a SavedModel; raise TensorFlow's error if that fails."""
        tf = tensorflow()
        self._session = tf.session.Session(graph=tf.ops.Graph())
        tf.saved_model.SavedModelLoader(str(folder)).load(self._session, [TAG])
        self.signatures = read_signatures((folder / MODEL_FILE).read_bytes())
        if not self.signatures:
            raise ValueError(f"the model {NO_SIGNATURE}")
        self._calls = {name: self._callable(signature) for name, signature in self.signatures.items()}

    def _callable(self, signature: Signature) -> Any:
        inputs = [self._session.graph.as_graph_element(tensor.name) for _, tensor in sorted(signature.inputs.items())]
        return self._session.make_callable({name: tensor.name for name, tensor in signature.outputs.items()}, feed_list=inputs)

    def warm_up(self) -> None:
        """Run signatures with zeros, so that the first request does not wait for TensorFlow's initialization."""
        for name, signature in self.signatures.items():
            with contextlib.suppress(Exception):  # some models refuse zeros
                self.run(name, {key: _zeros(tensor) for key, tensor in signature.inputs.items()})

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        """Return the outputs of a signature; RestError 400 if the model refuses the inputs."""
        try:
            outputs = self._calls[signature](*(inputs[name] for name in sorted(inputs)))
            return {name: np.asarray(output) for name, output in outputs.items()}
        except _server_errors():
            raise
        except (tensorflow().errors.OpError, ValueError, TypeError) as error:
            raise RestError(400, f"the model refuses the input: {error_reason(error)}") from None

    def examples(self, signature: str, examples: Sequence[Mapping[str, Any]]) -> Arrays:
        """Return a signature's inputs for examples: serialized tf.train.Example for one string input, else features by name."""
        inputs = self.signatures[signature].inputs
        if len(inputs) == 1 and next(iter(inputs.values())).dtype is None:
            serialized = [_example(example) for example in examples]
            return {next(iter(inputs)): np.array(serialized, dtype=object)}
        return parse_request({"instances": [dict(example) for example in examples]}, self.signatures[signature])[0]


def error_reason(error: Exception) -> str:
    """Return the reason of a model's error in one line."""
    return _ERROR_PREFIX.sub("", str(error)).partition("\n")[0]


def _server_errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that no input causes. Other errors mean that the model refuses the input."""
    errors = tensorflow().errors
    temporary = (errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError, errors.CancelledError)
    return (*temporary, errors.ResourceExhaustedError, errors.InternalError)  # InternalError: errors of a GPU


def _zeros(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype is None or tensor.shape is None:
        raise ValueError("there are no zeros of strings, or of any shape")
    return np.zeros([1 if size is None else size for size in tensor.shape], tensor.dtype)


def _example(features: Mapping[str, Any]) -> bytes:
    """Return a serialized tf.train.Example: a list of int64 if all values are integers, else of floats; strings are bytes."""
    example = tensorflow().example.Example()
    for name, value in features.items():
        values = [string_to_bytes(item) for item in (value if isinstance(value, list) else [value])]
        feature = example.features.feature[name]
        if all(isinstance(item, bytes) for item in values):
            feature.bytes_list.value.extend(values)
        elif all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in values):
            feature.int64_list.value.extend(values)
        elif all(isinstance(item, int | float) for item in values):
            feature.float_list.value.extend(values)
        else:
            raise RestError(400, f"feature {name} must be a number, a text, or a list of either")
    content: bytes = example.SerializeToString()
    return content
