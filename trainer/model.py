"""The two networks of TensorFlow's MNIST tutorials, from images to logits [N, 10], and their learning rate.

Images are float32 [N, 784], 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scaletier.tensorflow_setup import import_tensorflow
from trainer.mnist import CLASS_COUNT, PIXELS, SIDE

tf = import_tensorflow()
import keras  # noqa: E402 - after TensorFlow, whose log messages are held back

# The moving means must converge within few steps: five replicas take about 110 steps each.
_MEAN_MOMENTUM = 0.9
# The gradients of several replicas together have less noise: the learning rate grows with them, up to this factor.
_MAX_GROWTH = 8.0


def make_model(name: str, hidden_units: Sequence[int], precision: str, batch_norm: bool) -> Any:
    """Return the Keras model of this name.

    `hidden_units` are the widths of the mlp's hidden layers; `batch_norm` is for the cnn. Logits are float32 in every
    `precision`.
    """
    layers = _cnn(precision, batch_norm) if name == "cnn" else _mlp(hidden_units, precision)
    logits = keras.layers.Dense(CLASS_COUNT, kernel_initializer="he_normal", dtype=_policy(precision), name="logits")
    as_float = keras.layers.Activation("linear", dtype="float32", name="float32")
    return keras.Sequential(
        [keras.Input((PIXELS,)), *layers, logits, *([] if precision == "float32" else [as_float])], name=name
    )


def _policy(precision: str) -> str:
    return precision if precision == "float32" else f"mixed_{precision}"


def _dense(name: str, width: int, precision: str) -> Any:
    """Return a dense layer; its initial kernel has He's normal distribution.

    Source: He et al. 2015, "Delving deep into rectifiers", eq. 10.
    """
    return keras.layers.Dense(width, "relu", kernel_initializer="he_normal", dtype=_policy(precision), name=name)


def _mlp(hidden_units: Sequence[int], precision: str) -> list[Any]:
    """Return TensorFlow's fully connected network for MNIST; 128 and 32 hidden units in the tutorial."""
    return [_dense(f"hidden{number}", width, precision) for number, width in enumerate(hidden_units, 1)]


def _cnn(precision: str, batch_norm: bool) -> list[Any]:
    """Return TensorFlow's "deep MNIST".

    It has two convolutions of 5×5 (32 and 64 filters), 1024 fully connected units, and a dropout of a half. `batch_norm`
    normalizes the outputs of the convolutions, after the pooling, where they are a quarter as large. Source: Ioffe and Szegedy
    2015, "Batch normalization".
    """
    dtype = _policy(precision)

    def convolution(name: str, filters: int) -> list[Any]:
        like = {"padding": "same", "dtype": dtype}
        kernel = {"kernel_initializer": "he_normal", "use_bias": not batch_norm}
        norm = keras.layers.BatchNormalization(momentum=_MEAN_MOMENTUM, dtype=dtype, name=f"{name}_norm")
        return [
            keras.layers.Conv2D(filters, 5, name=name, **kernel, **like),
            keras.layers.MaxPool2D(2, name=f"{name}_pool", **like),
            *([norm] if batch_norm else []),
            keras.layers.ReLU(dtype=dtype, name=f"{name}_relu"),
        ]

    return [
        keras.layers.Reshape((SIDE, SIDE, 1), dtype=dtype, name="image"),
        *convolution("conv1", 32),
        *convolution("conv2", 64),
        keras.layers.Flatten(dtype=dtype, name="flat"),
        _dense("hidden", 1024, precision),
        keras.layers.Dropout(0.5, dtype=dtype, name="dropout"),
    ]


class WarmupCosineDecay(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The learning rate of each global step: a linear warm-up, and a cosine decay to the job's last step.

    The rate grows with the replicas; the warm-up has the same batches for any number of them. Sources: Goyal et al. 2017,
    "Accurate, large minibatch SGD", for both; Loshchilov and Hutter 2017, "SGDR", for the decay.
    """

    def __init__(self, learning_rate: float, warmup_steps: int, max_steps: int, replicas: int) -> None:
        self._peak, self._max_steps = learning_rate * min(float(replicas), _MAX_GROWTH), max_steps
        self._warmup_steps = min(float(warmup_steps), max_steps / 2)

    def __call__(self, step: Any) -> Any:
        """Return the learning rate, float32 [], at a step, int64 []."""
        steps_done = tf.cast(step, tf.float32) + 1.0
        warmup = tf.minimum(1.0, steps_done / self._warmup_steps)
        decay = 0.5 + 0.5 * tf.cos(math.pi * tf.minimum(1.0, steps_done / self._max_steps))
        return self._peak * warmup * decay
