"""The two networks of TensorFlow's MNIST tutorials, images to logits [N, 10], and their learning rate.

Images are float32 [N, 784], 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scaletier.runtime import import_tensorflow
from trainer.mnist import LABELS, PIXELS

tf = import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

_SIDE = 28
_WARMUP_STEPS = 80
# Gradients of several replicas have less noise together: their rate is higher by up to this factor, and so is the warm-up.
_MAX_GROWTH = 8.0


def make_model(name: str, hidden_units: Sequence[int], precision: str) -> Any:
    """Return the Keras model of this name.

    `hidden_units` are the widths of the mlp's hidden layers, `precision` is a policy of Keras. Logits are float32 whatever the
    precision.
    """
    layers = _cnn(precision) if name == "cnn" else _mlp(hidden_units, precision)
    logits = keras.layers.Dense(LABELS, kernel_initializer="he_normal", dtype=_policy(precision), name="logits")
    as_float = keras.layers.Activation("linear", dtype="float32", name="float32")
    return keras.Sequential(
        [keras.Input((PIXELS,)), *layers, logits, *([] if precision == "float32" else [as_float])], name=name
    )


def _policy(precision: str) -> str:
    return precision if precision == "float32" else f"mixed_{precision}"


def _dense(name: str, width: int, precision: str) -> Any:
    """Return a dense layer; initial kernels are He's normal.

    Source: He et al. 2015, "Delving deep into rectifiers", eq. 10.
    """
    return keras.layers.Dense(width, "relu", kernel_initializer="he_normal", dtype=_policy(precision), name=name)


def _mlp(hidden_units: Sequence[int], precision: str) -> list[Any]:
    """Return TensorFlow's fully connected network for MNIST; 128 and 32 hidden units in the tutorial."""
    return [_dense(f"hidden{number}", width, precision) for number, width in enumerate(hidden_units, 1)]


def _cnn(precision: str) -> list[Any]:
    """Return TensorFlow's "deep MNIST".

    It has two convolutions of 5×5 (32 and 64 filters), 1024 fully connected units, and a dropout of a half.
    """
    dtype = _policy(precision)

    def convolution(name: str, filters: int) -> list[Any]:
        kind, pool = keras.layers.Conv2D, keras.layers.MaxPool2D
        like = {"padding": "same", "dtype": dtype}
        return [
            kind(filters, 5, activation="relu", kernel_initializer="he_normal", name=name, **like),
            pool(2, name=f"{name}_pool", **like),
        ]

    return [
        keras.layers.Reshape((_SIDE, _SIDE, 1), dtype=dtype, name="image"),
        *convolution("conv1", 32),
        *convolution("conv2", 64),
        keras.layers.Flatten(dtype=dtype, name="flat"),
        _dense("hidden", 1024, precision),
        keras.layers.Dropout(0.5, dtype=dtype, name="dropout"),
    ]


class WarmupCosineDecay(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The learning rate of each global step: it rises, and falls to the job's last step.

    Sources: the rise and its growth with the replicas: Goyal et al. 2017, "Accurate, large minibatch SGD"; the fall:
    Loshchilov and Hutter 2017, "SGDR".
    """

    def __init__(self, learning_rate: float, max_steps: int, replicas: int) -> None:
        growth = min(float(replicas), _MAX_GROWTH)
        self._highest, self._max_steps = learning_rate * growth, max_steps
        self._warmup = min(_WARMUP_STEPS * growth, max_steps / 2)

    def __call__(self, step: Any) -> Any:
        """Return the learning rate, float32 [], at a step, int64 []."""
        now = tf.cast(step, tf.float32) + 1.0
        rise = tf.minimum(1.0, now / self._warmup)
        fall = 0.5 + 0.5 * tf.cos(math.pi * tf.minimum(1.0, now / self._max_steps))
        return self._highest * rise * fall
