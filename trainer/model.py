"""What is trained: the two networks of TensorFlow's MNIST tutorials, as shapes and a pure function of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.mnist import PIXELS
from trainer.runtime import import_tensorflow

tf = import_tensorflow()

CLASSES = 10
_KEEP_HALF = 0.5
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """`shapes` of the variables by name, in the order in which they lie in the flat vector of parameters.

    `logits(variables, images, training)` maps float32 images [N, 784], 0 to 1, to float32 [N, 10].
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    logits: Callable[[Tensors, Any, bool], Any]

    @property
    def sizes(self) -> list[int]:
        """Elements of each variable, in order."""
        return [math.prod(shape) for shape in self.shapes.values()]

    def unflatten(self, flat: Any) -> dict[str, Any]:
        """The variables, by name, in a flat float32 vector."""
        pieces = tf.split(flat, self.sizes)
        return {name: tf.reshape(piece, shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def initial(self, seed: int) -> npt.NDArray[np.float32]:
        """Initial parameters, flat: He's normal for kernels, zero for biases. Source: He et al. 2015, eq. 10."""
        random = np.random.default_rng(seed)
        pieces = []
        for shape in self.shapes.values():
            piece = np.zeros(math.prod(shape), np.float32)
            if len(shape) > 1:
                piece = random.standard_normal(piece.size, np.float32)
                piece *= np.float32(math.sqrt(2.0 / math.prod(shape[:-1])))
            pieces.append(piece)
        return np.concatenate(pieces)


def _mlp(v: Tensors, images: Any, _training: bool) -> Any:
    """TensorFlow's "MNIST for experts" of fully connected layers: 128, 32, 10."""
    hidden = tf.nn.relu(images @ v["hidden1_kernel"] + v["hidden1_bias"])
    hidden = tf.nn.relu(hidden @ v["hidden2_kernel"] + v["hidden2_bias"])
    return hidden @ v["logits_kernel"] + v["logits_bias"]


def _cnn(v: Tensors, images: Any, training: bool) -> Any:
    """TensorFlow's "deep MNIST": two convolutions of 5×5 (32 and 64 filters), 1024 fully connected, dropout of a half."""
    maps = tf.reshape(images, [-1, 28, 28, 1])
    for layer in ("conv1", "conv2"):
        maps = tf.nn.relu(tf.nn.conv2d(maps, v[f"{layer}_kernel"], 1, "SAME") + v[f"{layer}_bias"])
        maps = tf.nn.max_pool2d(maps, 2, 2, "SAME")
    hidden = tf.reshape(maps, [-1, v["hidden_kernel"].shape[0]])
    hidden = tf.nn.relu(hidden @ v["hidden_kernel"] + v["hidden_bias"])
    if training:
        hidden = tf.nn.dropout(hidden, _KEEP_HALF)
    return hidden @ v["logits_kernel"] + v["logits_bias"]


def _layers(**kernels: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, kernel in kernels.items():
        shapes |= {f"{name}_kernel": kernel, f"{name}_bias": kernel[-1:]}
    return shapes


MODELS: Mapping[str, Model] = {
    "mlp": Model("mlp", _layers(hidden1=(PIXELS, 128), hidden2=(128, 32), logits=(32, CLASSES)), _mlp),
    "cnn": Model(
        "cnn",
        _layers(conv1=(5, 5, 1, 32), conv2=(5, 5, 32, 64), hidden=(7 * 7 * 64, 1024), logits=(1024, CLASSES)),
        _cnn,
    ),
}


def loss_and_correct(model: Model, variables: Tensors, images: Any, labels: Any, training: bool) -> tuple[Any, Any]:
    """Cross entropy of each image in nats, float32 [N], and whether its class is right, float32 [N], 0 or 1."""
    logits = model.logits(variables, images, training)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return loss, tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
