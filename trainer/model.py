"""What is trained: the two networks of TensorFlow's MNIST tutorials, as layers, each a pure function of its variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.mnist import PIXELS
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

CLASSES = 10
HIDDEN_UNITS = (128, 32)
_KEEP_HALF = 0.5
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Layer:
    """One layer: its variables `<name>_kernel`, of shape `kernel`, and `<name>_bias`, of the kernel's last dimension.

    `apply(kernel, bias, inputs, training)` is what it does to a batch. While it trains it computes in `precision`, a dtype;
    the variables and their gradients are float32 all the same.
    """

    name: str
    kernel: tuple[int, ...]
    apply: Callable[[Any, Any, Any, bool], Any]
    precision: str = "float32"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the variables by name."""
        return {f"{self.name}_kernel": self.kernel, f"{self.name}_bias": self.kernel[-1:]}

    def __call__(self, variables: Tensors, inputs: Any, training: bool) -> Any:
        dtype = self.precision if training else "float32"
        kernel, bias = variables[f"{self.name}_kernel"], variables[f"{self.name}_bias"]
        return self.apply(tf.cast(kernel, dtype), tf.cast(bias, dtype), tf.cast(inputs, dtype), training)


@dataclass(frozen=True)
class Model:
    """Layers in order; their variables lie in this order in the flat vector of parameters."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all variables by name."""
        return {name: shape for layer in self.layers for name, shape in layer.shapes.items()}

    @property
    def sizes(self) -> list[int]:
        """Elements of each variable, in order."""
        return [math.prod(shape) for shape in self.shapes.values()]

    def logits(self, variables: Tensors, images: Any, training: bool) -> Any:
        """Images, float32 [N, 784], 0 to 1, to float32 [N, 10]."""
        for layer in self.layers:
            images = layer(variables, images, training)
        return images

    def unflatten(self, flat: Any) -> dict[str, Any]:
        """The variables, by name, in a flat float32 vector."""
        pieces = tf.split(flat, self.sizes)
        return {name: tf.reshape(piece, shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def initial(self, seed: int) -> npt.NDArray[np.float32]:
        """Initial parameters, flat."""
        random = np.random.default_rng(seed)
        return np.concatenate([initial_value(shape, random).reshape(-1) for shape in self.shapes.values()])


def initial_value(shape: Sequence[int], random: np.random.Generator) -> npt.NDArray[np.float32]:
    """He's normal for a kernel, zero for a bias. Source: He et al. 2015, "Delving deep into rectifiers", eq. 10."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    value = random.standard_normal(shape, np.float32)
    value *= np.float32(math.sqrt(2.0 / math.prod(shape[:-1])))
    return value


def _dense(kernel: Any, bias: Any, inputs: Any, _training: bool) -> Any:
    return inputs @ kernel + bias


def _relu(kernel: Any, bias: Any, inputs: Any, _training: bool) -> Any:
    return tf.nn.relu(inputs @ kernel + bias)


def _convolution(kernel: Any, bias: Any, inputs: Any, _training: bool) -> Any:
    maps = tf.nn.relu(tf.nn.conv2d(inputs, kernel, 1, "SAME") + bias)
    return tf.nn.max_pool2d(maps, 2, 2, "SAME")


def _first_convolution(kernel: Any, bias: Any, images: Any, training: bool) -> Any:
    return _convolution(kernel, bias, tf.reshape(images, [-1, 28, 28, 1]), training)


def _dropped_relu(kernel: Any, bias: Any, maps: Any, training: bool) -> Any:
    hidden = _relu(kernel, bias, tf.reshape(maps, [-1, kernel.shape[0]]), training)
    return tf.nn.dropout(hidden, _KEEP_HALF) if training else hidden


def _mlp(hidden_units: Sequence[int]) -> Model:
    """TensorFlow's fully connected network for MNIST; 128 and 32 hidden units in the tutorial."""
    widths = (PIXELS, *hidden_units)
    hidden = [Layer(f"hidden{number}", pair, _relu) for number, pair in enumerate(pairwise(widths), 1)]
    return Model("mlp", (*hidden, Layer("logits", (widths[-1], CLASSES), _dense)))


def _cnn(_hidden_units: Sequence[int]) -> Model:
    """TensorFlow's "deep MNIST": two convolutions of 5×5 (32 and 64 filters), 1024 fully connected, dropout of a half."""
    return Model(
        "cnn",
        (
            Layer("conv1", (5, 5, 1, 32), _first_convolution),
            Layer("conv2", (5, 5, 32, 64), _convolution),
            Layer("hidden", (7 * 7 * 64, 1024), _dropped_relu),
            Layer("logits", (1024, CLASSES), _dense),
        ),
    )


_MAKERS: Mapping[str, Callable[[Sequence[int]], Model]] = {"cnn": _cnn, "mlp": _mlp}


def make_model(name: str, hidden_units: Sequence[int] = HIDDEN_UNITS, precision: str = "float32") -> Model:
    """The model of this name; `hidden_units` are the widths of the mlp's hidden layers. KeyError for another name."""
    model = _MAKERS[name](hidden_units)
    return replace(model, layers=tuple(replace(layer, precision=precision) for layer in model.layers))


def losses_and_correct(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Cross entropy of each image in nats, float32 [N], and whether its class is right, float32 [N], 0 or 1."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return losses, tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
